"""Fine-tuning with several demonstrations in a row is the same training, in fewer positions and passes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tasks.alike import ADAM_EPS, assert_alike_weights, run_to_compare
from tests.tasks.kills import killed_in
from tests.tasks.small_models import load
from tests.tasks.test_model_families import FAMILIES
from tests.tasks.test_stages_on_ranks import start
from vantage.ledger.journal import read
from vantage.models.builtin import write_tokenizer
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Packing, Sequences, collate
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training import packing_check, ranks
from vantage.tasks.training.likelihood import accumulate_nll
from vantage.tasks.training.passes import packed_passes
from vantage.tasks.training.scratch import JOURNAL

Contents = Callable[[Path], dict[str, bytes]]
MIXED = {"group_by_length": False, "epochs": 0.4}
"""Long and short demonstrations in one batch."""


def sft(pipeline: Any, folder: Path, **changes: Any) -> StageJob:
    job: StageJob = pipeline.job("sft", folder=folder, **{**MIXED, **changes})
    return job.model_copy(update={"work": resolve_work(job.work)})


def losses(job: StageJob) -> list[float]:
    return [entry.metrics["loss"] for entry in read(job.scratch / JOURNAL)]


def assert_same_training(packed: StageJob, plain: StageJob, *, rel: float = 1e-4) -> None:
    """Assert that losses are equal up to rounding, and weights, which AdamW moves, as close as those of several ranks."""
    assert losses(packed) == pytest.approx(losses(plain), rel=rel)
    [file] = [each.name for each in plain.output.glob("*model.safetensors")]
    found, expected = (load_file(job.output / file) for job in (packed, plain))
    assert_alike_weights(found, expected, learning_rate=1e-3)


@pytest.fixture(scope="module")
def plain(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> StageJob:
    """Return the result of training without packing."""
    job = sft(pipeline, tmp_path_factory.mktemp("plain"))
    run_to_compare(job)
    return job


@pytest.fixture(scope="module")
def packed(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> StageJob:
    """Return the result of training with packing, two rows in a pass."""
    job = sft(pipeline, tmp_path_factory.mktemp("packed"), packing=True, microbatch_size=2)
    run_to_compare(job)
    return job


@pytest.mark.slow
def test_a_packed_stage_trains_as_one_that_pads(plain: StageJob, packed: StageJob) -> None:
    assert len(losses(plain)) == 4
    assert_same_training(packed, plain)


@pytest.mark.slow
def test_a_killed_packed_stage_ends_with_the_same_bytes(
    packed: StageJob, pipeline: Any, contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_in(2, monkeypatch):
        run_to_compare(sft(pipeline, tmp_path, packing=True, microbatch_size=2))
    job = sft(pipeline, tmp_path, packing=True, microbatch_size=2)
    run_to_compare(job)
    assert contents(job.output) == contents(packed.output)


def test_checkpointed_layers_change_no_byte(
    packed: StageJob, pipeline: Any, contents: Contents, tmp_path: Path
) -> None:
    job = sft(pipeline, tmp_path, packing=True, microbatch_size=2, gradient_checkpointing=True)
    run_to_compare(job)
    assert contents(job.output) == contents(packed.output)


@pytest.mark.slow
def test_in_bfloat16(pipeline: Any, tmp_path: Path) -> None:
    """The arithmetic has three digits; the losses of both differ by less."""
    both = {}
    for packing in (False, True):
        folder = tmp_path / str(packing)
        both[packing] = sft(pipeline, folder, packing=packing, precision="bfloat16")
        run_stage(both[packing])
    assert losses(both[True]) == pytest.approx(losses(both[False]), rel=3e-3)


@pytest.mark.slow
def test_adapters_alone(lora_pipeline: Any, tmp_path: Path) -> None:
    """A packed stage that trains adapters alone trains as one that pads."""
    both = {}
    for packing in (False, True):
        both[packing] = sft(lora_pipeline, tmp_path / str(packing), packing=packing)
        run_to_compare(both[packing])
    assert_same_training(both[True], both[False])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 3), ("fsdp2", 2)])
def test_several_ranks(
    strategy: str, world_size: int, plain: StageJob, pipeline: Any, tmp_path: Path
) -> None:
    """Each rank packs its own rows, and all ranks make the same number of passes."""
    job = sft(pipeline, tmp_path, packing=True, microbatch_size=1)
    start(world_size, tmp_path / "jobs", [job], strategy=strategy, eps=ADAM_EPS)
    assert_same_training(job, plain)


def test_what_is_packed_has_fewer_positions_and_passes(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows have 60 tokens in all. Padded, with four in a pass, they take 4 · 20 + 4 · 12 positions. Packed in
    rows of at most 20, they are 20 alone, 12 with 5 and 3, and 9 with 5, 4 and 2: three rows of 20 in one pass."""
    counts: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
    logprobs = PolicyModel.logprobs

    def counted(self: PolicyModel, sequences: Sequences, **settings: Any) -> Any:
        is_packed = isinstance(sequences.layout, Packing)
        ids = sequences.layout.input_ids if is_packed else sequences.input_ids
        counts[is_packed].append(tuple(ids.shape))
        return logprobs(self, sequences, **settings)

    policy = load(pipeline.folder("model"))
    monkeypatch.setattr(PolicyModel, "logprobs", counted)
    lengths = [5, 20, 3, 4, 12, 5, 2, 9]
    batch = collate([[1]] * 8, [[7] * (length - 1) for length in lengths], pad_token_id=0)
    for packing in (False, True):
        accumulate_nll(
            policy, batch, temperature=1.0, limits=PassLimits(4), precision="float32", packing=packing
        )
    assert counts == {False: [(4, 20), (4, 5)], True: [(3, 20)]}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "limits", [UNLIMITED, PassLimits(1), PassLimits(2), PassLimits(tokens=24), PassLimits(tokens=8)]
)
def test_every_row_is_computed_once_and_all_ranks_make_as_many_passes(
    world_size: int, limits: PassLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [7, 3, 12, 1, 5, 5, 9, 2, 12, 4, 6]
    monkeypatch.setattr(ranks, "world_size", lambda: world_size)
    passes, found = set(), []
    for rank in range(world_size):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        parts = list(packed_passes(lengths, limits))
        passes.add(len(parts))
        for part in parts:
            layout = part.layout or [[0]]  # a row by itself keeps step with the other rank
            assert len(layout) <= (limits.rows or len(lengths))
            assert sorted(place for group in layout for place in group) == list(range(len(part.rows)))
            for group in layout:
                assert sum(lengths[part.rows[place]] for place in group) <= 12
            widths = [sum(lengths[part.rows[place]] for place in group) for group in layout]
            assert len(part.rows) == 1 or len(widths) * max(widths) <= (limits.tokens or sys.maxsize)
            if part.weight:
                found += part.rows
                assert all(row % world_size == rank for row in part.rows)
    assert len(passes) == 1
    assert sorted(found) == list(range(len(lengths)))


def test_a_model_that_mixes_them_up_is_refused_before_it_trains(pipeline: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(FAMILIES["bloom"]).save_pretrained(tmp_path / "bloom")
    write_tokenizer(tmp_path / "bloom")
    job = sft(pipeline, tmp_path, packing=True)
    job = job.model_copy(update={"inputs": {**job.inputs, "init": tmp_path / "bloom"}})
    with pytest.raises(
        ValueError,
        match=r"packing=true, but BloomForCausalLM does not keep the texts of a packed row apart: .* packing: false",
    ):
        run_stage(job)
    assert not (job.scratch / JOURNAL).exists() or not losses(job)


def test_the_trial_sees_a_model_whose_boundaries_do_not_hold(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial refuses a model that takes positions, but whose masks do not regard them."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not keep the texts of a packed row apart"):
        run_stage(sft(pipeline, tmp_path, packing=True))
    monkeypatch.undo()
    monkeypatch.setattr(packing_check, "boundaries_hold", lambda **_: True)
    run_stage(sft(pipeline, tmp_path, packing=True))
