"""The inner loops of stages would not wait for a GPU for each token, nor for each micro-batch."""

import importlib
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaModel, PreTrainedModel

from tests.tasks.host_waits import LIBRARY, HostWaits
from vantage.models import sampling
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy
from vantage.models.pass_counts import taken_counts
from vantage.models.sampling import Samples, sample
from vantage.schemas.kinds import resolve_work
from vantage.tasks.stages import run_stage

STEPS = {
    "sft": ("vantage.tasks.sft.accumulate_nll", 2),
    "reward": ("vantage.tasks.reward_model.accumulate_preferences", 2),
    "value": ("vantage.tasks.updates.value_regression.accumulate_value_loss", 3),
    "policy": ("vantage.tasks.updates.policy_update.accumulate_losses", 3),
}
"""Stage → what adds the gradient of a minibatch, and how often that may wait, whatever number of micro-batches it has."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", STEPS)
def test_a_minibatch_waits_as_often_however_many_passes_it_has(
    stage: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, most = STEPS[stage]
    module, _, name = path.rpartition(".")
    accumulate, forward = getattr(importlib.import_module(module), name), LlamaModel.forward
    shorter = {"iterations": 2, "validation_samples": 4} if stage in ("value", "policy") else {}
    job = pipeline.job(stage, folder=tmp_path, microbatch_size=2, **shorter)
    passes, found = [0], []

    @wraps(forward)
    def counted(*args: Any, **inputs: Any) -> Any:
        passes[0] += 1
        return forward(*args, **inputs)

    def noted(*args: Any, **inputs: Any) -> Any:
        passes[0] = 0
        with HostWaits() as waits:
            result = accumulate(*args, **inputs)
        found.append((passes[0], waits))
        return result

    monkeypatch.setattr(LlamaModel, "forward", counted)
    monkeypatch.setattr(path, noted)
    run_stage(job.model_copy(update={"work": resolve_work(job.work)}))
    assert len(found) > 2
    for made, waits in found:
        assert made >= 4
        assert waits.own <= most
        # its models look twice whether anything is hidden: with and without what is padded behind
        assert waits.where[LIBRARY] <= 2 * made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("tiny")
    build_builtin("tiny", folder, seed=0)
    return load_policy(folder)


def sampled(model: PreTrainedModel, prompts: list[list[int]], *, tokens: int, eos: range) -> Samples:
    return sample(
        model,
        prompts,
        max_new_tokens=tokens,
        temperature=1.0,
        eos_token_ids=eos,
        pad_token_id=0,
        seed=4,
    )


PADDED, ALIKE = [[5, 6, 7]] * 8 + [[5, 8]] * 8, [[5, 6, 7]] * 16


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [PADDED, ALIKE])
def test_a_token_waits_once(prompts: list[list[int]], tiny: PreTrainedModel) -> None:
    """It waits for the number of responses that have not ended, on a GPU that of the token before, and for no mask."""
    found = []
    for tokens in (10, 20):
        with HostWaits() as waits:
            samples = sampled(tiny, prompts, tokens=tokens, eos=range(0))
        assert {len(response) for response in samples.responses} == {tokens}
        found.append(waits)
    assert found[1].own - found[0].own == 10
    assert found[0].own <= 10 + 4, "and for ids, log-probabilities, lengths and ends when all is done"
    assert found[1].where[LIBRARY] == found[0].where[LIBRARY] <= 2, "with the prompts alone"


def test_rows_that_leave_the_batch_wait_once_more_each_time(tiny: PreTrainedModel) -> None:
    with HostWaits() as waits:
        samples = sampled(tiny, PADDED, tokens=30, eos=range(20))
    longest = max(map(len, samples.responses))
    ends = sorted({len(response) for response in samples.responses})
    assert len(ends) > 3
    assert longest < waits.own <= longest + len(ends) + 4


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 3])
def test_responses_are_the_same_where_ends_are_known_late(
    late: int, tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stay in the batch for some tokens more, which rounds log-probabilities otherwise and no more."""
    for prompts, eos in (
        (PADDED, range(20)),
        (PADDED, range(100)),
        (ALIKE, range(20)),
        (ALIKE[:1], range(40)),
    ):
        monkeypatch.setitem(sampling.LATE, "cpu", 0)
        at_once = sampled(tiny, prompts, tokens=30, eos=eos)
        monkeypatch.setitem(sampling.LATE, "cpu", late)
        taken_counts()
        later = sampled(tiny, prompts, tokens=30, eos=eos)
        counts = taken_counts()
        assert 0 <= counts.ended_rows < counts.sampled_rows
        assert later.responses == at_once.responses
        assert later.ended == at_once.ended
        assert all(at_once.ended)
        for ours, theirs in zip(later.logprobs, at_once.logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)


def test_what_waits_is_counted_by_hand() -> None:
    """Each line of the first block waits once, and none of the second block waits."""
    numbers, mask = torch.arange(6.0), torch.tensor([True, False, True, False, False, True])
    with HostWaits() as waits:
        numbers.sum().item()
        numbers.tolist()
        numbers[mask]
        numbers.clone()[mask] = torch.tensor([1.0, 2.0, 3.0])
        mask.nonzero()
        if mask.all():
            raise AssertionError
        numbers.masked_select(mask)
        mask.long().repeat_interleave(mask.long())
        torch.equal(numbers, numbers)
    assert sum(waits.where.values()) == 9
    with HostWaits() as waits:
        numbers.clone()[mask] = 1.0
        numbers[torch.tensor([0, 2])].sum()
        numbers.repeat_interleave(mask.long(), output_size=3)
        torch.where(mask, numbers, 0.0)
    assert not waits.where
