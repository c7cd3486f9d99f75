"""A run reports the share of padding that transformers' model was given."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slow import slow
from tests.tasks.model_reads import record_reads
from vantage.ledger.journal import read
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy
from vantage.models.logprobs import response_logprobs
from vantage.models.packing import pack
from vantage.models.pass_counts import taken_counts
from vantage.models.sequences import collate
from vantage.schemas.kinds import resolve_work
from vantage.tasks.stages import run_stage
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.cuts import OVERHEAD
from vantage.tasks.training.scratch import JOURNAL


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward", *slow("value", "policy")])
def test_a_step_says_how_much_of_its_passes_was_padding(
    stage: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pipeline.job(stage, folder=tmp_path)  # this makes the stage's inputs first
    job = job.model_copy(update={"work": resolve_work(job.work)})
    given = record_reads(monkeypatch)
    ends: list[int] = []
    finish_step = Attempt.finish_step

    def noted(self: Attempt[Any], *args: Any, **named: Any) -> None:
        ends.append(len(given))
        finish_step(self, *args, **named)

    monkeypatch.setattr(Attempt, "finish_step", noted)
    run_stage(job)

    said = [entry.metrics["padding_share"] for entry in read(job.scratch / JOURNAL)]
    assert len(said) == len(ends) > 1
    for (before, end), share in zip(pairwise(ends), said[1:], strict=True):
        positions = sum(each.positions for each in given[before:end])
        tokens = sum(each.tokens for each in given[before:end])
        assert share == pytest.approx(1 - tokens / positions, abs=1e-12)
        assert 0 <= share < 1
    assert any(share > 0 for share in said)


def test_packed_rows_are_counted_as_they_are_computed(tmp_path: Path) -> None:
    prompts, responses = [[1, 2, 3], [1, 2], [1]], [[4, 5], [4, 5, 6, 7], [8]]
    sequences = collate(prompts, responses, pad_token_id=0)
    build_builtin("tiny", tmp_path, seed=0)
    model = load_policy(tmp_path)
    taken_counts()
    with torch.no_grad():
        response_logprobs(model, sequences, temperature=1.0)
        counts = taken_counts()
        assert (counts.passes, counts.positions, int(counts.tokens)) == (1, 3 * 6, 13)
        response_logprobs(model, pack(sequences, [[1], [0, 2]]), temperature=1.0)
    counts = taken_counts()
    assert (counts.passes, counts.positions, int(counts.tokens)) == (1, 2 * 7, 13)
    assert taken_counts().positions == 0


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("sft", {"batch_size": 64, "group_by_length": False, "microbatch_size": None}),
        *slow(
            *(
                (stage, {"batch_size": 64, "minibatch_size": 64, "microbatch_size": None})
                for stage in ("value", "policy")
            )
        ),
    ],
)
def test_ragged_batches_are_padded_by_little(
    stage: str, changes: dict[str, Any], pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a twentieth of a stage's positions is padding, where whole batches would have a sixth and more."""

    def share(overhead: int, folder: Path) -> float:
        monkeypatch.setitem(OVERHEAD, "cpu", overhead)
        job = pipeline.job(stage, folder=folder, **changes)
        run_stage(job.model_copy(update={"work": resolve_work(job.work)}))
        said = [entry.metrics["padding_share"] for entry in read(job.scratch / JOURNAL)]
        return sum(said) / len(said)

    assert share(OVERHEAD["cpu"], tmp_path / "cut") <= 0.05
    assert share(10**6, tmp_path / "whole") > 0.16
