"""Losses of ``dpo`` stages beside DPO hold for micro-batches, held-out pairs, a kill, and stages without a reference."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.small_models import load
from tests.tasks.test_dpo import WORK, job_in
from vantage.ledger.journal import read
from vantage.schemas.metric_names import COMPILED, NONFINITE, UNCOMPILED
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.tasks.data.examples import Completions, codec_of, read_completions
from vantage.tasks.dpo import SIDES, accumulate_preferences, measure_pairs, run, tied_share
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates import trained_against_reference
from vantage.tasks.updates.against_reference import Models

LOSSES: dict[str, dict[str, Any]] = {
    "smoothed": {"label_smoothing": 0.2},
    "length-normalised": {"length_normalised": True, "beta": 5.0},
    "ipo": {"loss": "ipo"},
    "simpo": {"loss": "simpo", "beta": 2.0, "target_margin": 1.0},
    "orpo": {"loss": "orpo", "beta": 0.5},
}
FREE = ("simpo", "orpo")
every_loss = pytest.mark.parametrize("name", LOSSES)


def job_of(pipeline: Any, folder: Path, *, name: str, **changes: Any) -> StageJob:
    """Return a stage of this loss; one without a reference is given none."""
    job = job_in(pipeline, folder, **LOSSES[name], **changes)
    if name not in FREE:
        return job
    given = {
        field: {role: value for role, value in getattr(job, field).items() if role != "reference"}
        for field in ("inputs", "digests")
    }
    return job.model_copy(update=given)


@pytest.fixture(scope="module")
def pairs(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[StageJob, Completions]:
    job = job_in(pipeline, tmp_path_factory.mktemp("dpo"))
    return job, read_completions(job.inputs["data"], "train", SIDES, codec_of(job, "init"))


def models_of(job: StageJob, name: str) -> Models:
    reference = None if name in FREE else load(job.inputs["reference"])
    return Models(policy=load(job.inputs["init"]), reference=reference, temperature=1.0)


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize("limits", [{"microbatch_size": 1}, {"microbatch_size": 3}])
def test_micro_batches_leave_the_gradient_unchanged(
    name: str, limits: dict[str, int], pairs: tuple[StageJob, Completions]
) -> None:
    """The chosen responses differ in length: a mean over a micro-batch's tokens would weigh them differently."""
    job, data = pairs
    found = []
    for each in ({}, limits):
        models = models_of(job, name)
        work = WORK.model_copy(update={**LOSSES[name], **each})
        metrics, num_tokens = accumulate_preferences(models, data, list(range(10)), work)
        gradient = torch.cat([p.grad.flatten() for p in models.policy.parameters()])
        found.append((gradient, {**metrics, "tokens": num_tokens}))
    (whole, whole_metrics), (parts, part_metrics) = found
    torch.testing.assert_close(parts / whole.abs().max(), whole / whole.abs().max(), atol=2e-5, rtol=0)
    assert part_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)


@every_loss
def test_held_out_pairs_have_the_loss_of_training(name: str, pairs: tuple[StageJob, Completions]) -> None:
    """ORPO's held-out loss leaves out the likelihood of the chosen responses."""
    job, data = pairs
    few = Completions(
        prompt_ids=data.prompt_ids[:7],
        response_ids={side: ids[:7] for side, ids in data.response_ids.items()},
        pad_token_id=data.pad_token_id,
        num_too_long=0,
    )
    work = WORK.model_copy(update=LOSSES[name])
    trained, _ = accumulate_preferences(models_of(job, name), few, list(range(7)), work)
    for size in (1, 3, 64):
        measured = measure_pairs(models_of(job, name), few, work.model_copy(update={"batch_size": size}))
        assert measured["reward_gap"].value == pytest.approx(trained["reward_gap"], rel=1e-4, abs=1e-5)
        assert measured["pair_accuracy"].value == pytest.approx(trained["train_pair_accuracy"])
        expected = trained["loss"] - (trained["chosen_nll"] if name == "orpo" else 0)
        assert measured["preference_loss"].value == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_pairs_of_one_prompt_are_one_observation(pairs: tuple[StageJob, Completions]) -> None:
    """Three prompts have three, two and one pairs. The error equals Cochran's formula, computed pair by pair."""
    job, data = pairs
    six = Completions(
        prompt_ids=[data.prompt_ids[row] for row in (0, 0, 0, 1, 1, 2)],
        response_ids={side: ids[:6] for side, ids in data.response_ids.items()},
        pad_token_id=data.pad_token_id,
        num_too_long=0,
    )
    models = models_of(job, "simpo")
    work = WORK.model_copy(update=LOSSES["simpo"])
    measured = measure_pairs(models, six, work)["reward_gap"]
    gaps = []
    for prompt, chosen, rejected in zip(six.prompt_ids, *six.response_ids.values(), strict=True):
        means = []
        for response in (chosen, rejected):
            with torch.no_grad():
                logits = models.policy.causal_lm(torch.tensor([[*prompt, *response]])).logits[0].double()
            of_tokens = (logits / models.temperature).log_softmax(-1)[len(prompt) - 1 : -1]
            means.append(of_tokens[range(len(response)), response].mean().item())
        gaps.append(work.beta * (means[0] - means[1]))
    mean = sum(gaps) / 6
    apart = [sum(gap - mean for gap in gaps[begin:end]) for begin, end in ((0, 3), (3, 5), (5, 6))]
    error = (3 / 2 * sum(each**2 for each in apart) / 6**2) ** 0.5
    assert (measured.num_clusters, measured.num_rows) == (3, 6)
    assert measured.value == pytest.approx(mean, rel=1e-4)
    assert measured.standard_error == pytest.approx(error, rel=1e-3)


def test_the_share_of_ties_is_of_the_prompts_of_all_splits() -> None:
    """The stages collected 5, 4 and 2 prompts, of which 3, 1 and 2 have a pair."""

    class Pairs:
        def __init__(self, prompts: int, pairs: int) -> None:
            self.counts, self._pairs = SimpleNamespace(num_rows=prompts), pairs

        def __len__(self) -> int:
            return self._pairs

    job: Any = SimpleNamespace(work=SimpleNamespace(rollouts="collected"))
    given: Any = [Pairs(5, 3), Pairs(4, 1), Pairs(2, 2)]
    assert tied_share(job, given) == {"tied_share": pytest.approx(5 / 11)}
    job.work.rollouts = None
    assert tied_share(job, given) == {}


@pytest.mark.parametrize("name", FREE)
def test_a_stage_without_a_reference_reads_none_and_reports_the_metrics_of_the_page(
    name: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(
        trained_against_reference, "fixed_policy", lambda *_: loaded.append("a frozen policy")
    )
    job = job_of(pipeline, tmp_path, name=name, epochs=0.5)
    result = run(job)
    assert loaded == []
    entries = list(read(job.scratch / JOURNAL))
    names = {metric for entry in entries for metric in entry.metrics}
    assert names == curve_metric_names("dpo") - {*COMPILED, *NONFINITE}
    assert set(result.metrics) == headline_metric_names("dpo") - {"tied_share", *UNCOMPILED}
    losses = [entry.metrics["loss"] for entry in entries]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_orpo_makes_chosen_responses_likelier(pipeline: Any, tmp_path: Path) -> None:
    job = job_of(pipeline, tmp_path, name="orpo", epochs=0.5)
    run(job)
    nll = [entry.metrics["chosen_nll"] for entry in read(job.scratch / JOURNAL)]
    assert sum(nll[-5:]) < sum(nll[:5])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ipo", *FREE])
def test_killed_and_run_again_it_gives_the_same_bytes(
    name: str,
    pipeline: Any,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same_bytes_after_a_kill(
        run,
        partial(job_of, pipeline, name=name),
        tmp_path,
        step=3,
        contents=contents,
        monkeypatch=monkeypatch,
    )
