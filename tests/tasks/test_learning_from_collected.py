"""Stages learn from collected responses, as often as asked, sample nothing twice, and can be stopped and resumed."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.small_models import models_of
from vantage.algorithms.rewards import RunningMoments
from vantage.models.sampling import Samples
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.stages import BestOfN
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.best_of_n import responses_of_iteration
from vantage.tasks.data.examples import NothingLeft, codec_of
from vantage.tasks.rollout.collected import Collected, PromptNotCollected, prompt_numbers, read_collected
from vantage.tasks.rollout.collected_pairs import best_against_worst
from vantage.tasks.rollout.engine import LocalEngine
from vantage.tasks.rollout.response_source import load_source
from vantage.tasks.rollout.returns import training_rollout
from vantage.tasks.rollout.sampler_check import SamplerDisagrees
from vantage.tasks.stages import run_stage
from vantage.tasks.value_pretraining import run


def value_job(pipeline: Any, folder: Path, **changes: Any) -> StageJob:
    job: StageJob = pipeline.job("value", folder=folder, rollouts="collected", **changes)
    inputs = {**job.inputs, "rollouts": pipeline.folder("collected")}
    return job.model_copy(update={"work": resolve_work(job.work), "inputs": inputs})


def collected_in(pipeline: Any, split: str) -> Collected:
    job = pipeline.job("collected")
    digest = pipeline.result("collected").tokenizer_digest
    return read_collected(pipeline.folder("collected"), split, codec_of(job, "policy"), tokenizer=digest)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of responses that are sampled from now on, call by call."""
    counts: list[int] = []
    generate = LocalEngine.generate

    def counting(self: LocalEngine, prompts: Sequence[list[int]], *, count: int, **named: Any) -> Samples:
        counts.append(count * len(prompts))
        return generate(self, prompts, count=count, **named)

    monkeypatch.setattr(LocalEngine, "generate", counting)
    return counts


@pytest.mark.slow
def test_nothing_is_sampled_and_no_reward_is_loaded(
    pipeline: Any, tmp_path: Path, sampled: list[int]
) -> None:
    """Even the reward model's folder may be missing."""
    pipeline.folder("collected")
    sampled.clear()
    job = value_job(pipeline, tmp_path)
    without_reward = {role: path for role, path in job.inputs.items() if role != "reward.main.0"}
    result = run_stage(job.model_copy(update={"inputs": without_reward}))
    assert sampled == []
    assert result.metrics["explained_variance"] is not None


@pytest.mark.slow
def test_half_of_a_rollout_is_sampled_anew(pipeline: Any, tmp_path: Path, sampled: list[int]) -> None:
    pipeline.folder("collected")
    sampled.clear()
    run_stage(value_job(pipeline, tmp_path, fresh_share=0.5))
    assert sampled == [8, 8, 8, 8]  # 4 iterations of 16


def test_a_pass_reads_every_collected_response_once_and_the_next_in_another_order(
    pipeline: Any, tmp_path: Path
) -> None:
    everything = collected_in(pipeline, "train")
    whole = len(everything)
    job = value_job(pipeline, tmp_path, batch_size=whole // 8, minibatch_size=whole // 8)
    source = load_source(job, models_of(job, role="policy"))

    def one_pass(start: int) -> list[tuple[str, str]]:
        batches = [source.for_iteration(iteration).sampled for iteration in range(start, start + 8)]
        return [row for each in batches for row in zip(each.prompts, each.responses, strict=True)]

    passes = [one_pass(0), one_pass(8)]
    rows = everything.select(range(whole), torch.device("cpu")).sampled
    assert Counter(passes[0]) == Counter(passes[1]) == Counter(zip(rows.prompts, rows.responses, strict=True))
    assert passes[0] != passes[1]


def test_held_out_responses_are_one_to_each_prompt_before_a_second(pipeline: Any, tmp_path: Path) -> None:
    job = value_job(pipeline, tmp_path, validation_samples=20, test_samples=5)
    source = load_source(job, models_of(job, role="policy"))
    for split, asked, prompts in (("validation", 20, 16), ("test", 5, 8)):
        held_out = source.held_out(split)
        assert len(held_out.sampled.prompts) == asked
        counts = Counter(held_out.sampled.prompts)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len(counts) == min(asked, prompts)


def test_the_sampler_s_log_probabilities_stand_for_the_policy_s(pipeline: Any, tmp_path: Path) -> None:
    job = value_job(pipeline, tmp_path)
    models = models_of(job, role="policy", reference=pipeline.folder("model"))
    source = load_source(job, models)
    learned = training_rollout(source, RunningMoments(), 1)
    rollout = learned.rollout
    assert learned.gap == {}
    expected = models.policy.logprobs(rollout.sequences, temperature=1.0).logprobs
    mask = rollout.sequences.response_mask
    assert torch.allclose(rollout.logprobs[mask], expected[mask], atol=1e-4)
    assert rollout.kl[mask].abs().max() > 0.01, "the reference is another model"


def test_a_collection_of_another_policy_is_found_out(pipeline: Any, tmp_path: Path) -> None:
    job = value_job(pipeline, tmp_path)
    other = {**job.inputs, "policy": pipeline.folder("model"), "reference": pipeline.folder("model")}
    with pytest.raises(SamplerDisagrees, match="the policy that trains is not the one that sampled"):
        run_stage(job.model_copy(update={"inputs": other}))


@pytest.mark.slow
@pytest.mark.parametrize("fresh_share", [0.0, 0.5])
def test_a_kill_leaves_no_trace(
    pipeline: Any,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    fresh_share: float,
) -> None:
    job_in = partial(_job_in, pipeline, fresh_share)
    same_bytes_after_a_kill(run, job_in, tmp_path, step=3, contents=contents, monkeypatch=monkeypatch)


def _job_in(pipeline: Any, fresh_share: float, folder: Path) -> StageJob:
    return value_job(pipeline, folder, fresh_share=fresh_share)


@pytest.mark.slow
def test_several_critics_learn_the_same_responses(pipeline: Any, tmp_path: Path) -> None:
    """Critics of two seeds and two starts read the collection's responses."""
    one, other = (value_job(pipeline, tmp_path / name) for name in ("one", "other"))
    other = other.model_copy(update={"inputs": {**other.inputs, "init": pipeline.folder("sft")}})
    sources = [load_source(job, models_of(job, role="policy")) for job in (one, other)]
    first, second = (source.for_iteration(2).sampled.responses for source in sources)
    assert first == second
    assert run_stage(one).metrics["return_variance"] == run_stage(other).metrics["return_variance"]


# -- best of n


def test_best_of_n_samples_only_to_validate_and_to_test(
    pipeline: Any, tmp_path: Path, sampled: list[int]
) -> None:
    work = BestOfN(
        kind="best_of_n", init="sft", reward="main", prompts="prompts", samples_per_prompt=3, batch_size=12,
        minibatch_size=2, iterations=3, validate_every=3, validation_samples=6, test_samples=5, learning_rate=1e-3,
        rollouts="collected",
    )  # fmt: skip
    job = pipeline.job("policy", folder=tmp_path)
    inputs = {**job.inputs, "rollouts": pipeline.folder("collected")}
    for role in ("reference", "critic"):
        del inputs[role]
    sampled.clear()
    run_stage(job.model_copy(update={"work": resolve_work(work), "inputs": inputs}))
    assert sampled == [6, 6, 5]


# -- pairs


def synthetic(scores: list[float], *, group: int) -> Collected:
    """Return responses with these scores, ``group`` to a prompt; ids tell the row."""
    import pyarrow as pa

    count = len(scores)
    table = pa.table(
        {
            "prompt": [f"p{row // group}" for row in range(count)],
            "answer": pa.array([None] * count, pa.string()),
            "prompt_ids": [[1, 5 + row // group] for row in range(count)],
            "response_ids": [[20 + row, 2] for row in range(count)],
            "ended": [row % 2 == 0 for row in range(count)],
            "score": pa.array(scores, pa.float32()),
        }
    )
    return Collected(table, samples_per_prompt=group, pad_token_id=0)


def test_an_iteration_of_best_of_n_draws_from_the_collected_prompts(pipeline: Any) -> None:
    """Three prompts are collected, and the data has 500: six iterations of two prompts are four passes over the three."""
    work = BestOfN(
        kind="best_of_n", init="sft", reward="main", prompts="prompts", samples_per_prompt=3, batch_size=6,
        minibatch_size=2, iterations=6, validation_samples=6, learning_rate=1e-3, rollouts="collected",
    )  # fmt: skip
    job = pipeline.job("sft").model_copy(update={"work": resolve_work(work)})
    models = SimpleNamespace(policy=SimpleNamespace(device=torch.device("cpu")))
    collected: Any = SimpleNamespace(
        num_prompts=3, rows_of=lambda prompts, count: list(prompts), select=lambda rows, device: rows
    )
    taken: Counter[int] = Counter()
    for iteration in range(6):
        taken.update(responses_of_iteration(job, models, range(500), collected, iteration))  # type: ignore
    assert taken == {0: 4, 1: 4, 2: 4}


def test_the_best_stands_against_the_worst_and_ties_give_no_pair(pipeline: Any) -> None:
    """Each prompt has three responses. The first has 2 at row 1 and −1 at row 2, the second 0.5 everywhere, and the
    third 3 at rows 6 and 7, of which the first counts."""
    given = synthetic([0.0, 2.0, -1.0, 0.5, 0.5, 0.5, 3.0, 3.0, 1.0], group=3)
    pairs = best_against_worst(given, codec_of(pipeline.job("sft"), "init"), split="train")
    assert pairs.prompt_ids == [[1, 5], [1, 7]]
    assert pairs.response_ids == {"chosen": [[21, 2], [26, 2]], "rejected": [[22, 2], [28, 2]]}
    assert pairs.counts.num_rows == 3
    assert (pairs.counts.num_responses, pairs.counts.num_cut) == (4, 1)


def test_where_all_responses_score_the_same_nothing_is_left(pipeline: Any) -> None:
    codec = codec_of(pipeline.job("sft"), "init")
    with pytest.raises(
        NothingLeft, match="none of the 2 prompts of the validation split has responses of different"
    ):
        best_against_worst(synthetic([1.0, 1.0, 0.0, 0.0], group=2), codec, split="validation")


def test_dpo_tells_which_share_gave_no_pair(pipeline: Any, tmp_path: Path) -> None:
    work = DirectPreferenceOptimization(
        kind="dpo", init="sft", reference="sft", rollouts="collected", batch_size=16, learning_rate=1e-4
    )
    job = pipeline.job("sft", folder=tmp_path)
    inputs = {role: pipeline.folder("sft") for role in ("init", "reference")}
    inputs["rollouts"] = pipeline.folder("collected")
    result = run_stage(job.model_copy(update={"work": resolve_work(work), "inputs": inputs}))
    tied = total = 0
    for split in ("train", "validation", "test"):
        found = collected_in(pipeline, split)
        groups = found.scores.view(-1, found.samples_per_prompt).tolist()
        tied += sum(len(set(group)) == 1 for group in groups)
        total += len(groups)
    assert result.metrics["tied_share"] == pytest.approx(tied / total)


# -- prompts


def test_a_prompt_is_found_by_its_text_and_answer() -> None:
    given = synthetic([0.0] * 6, group=2)
    assert prompt_numbers(given, ["p2", "p0", "p2"], [None, None, None]).tolist() == [2, 0, 2]
    with pytest.raises(PromptNotCollected, match="no collected response to the prompt 'p9'"):
        prompt_numbers(given, ["p9"], [None])
    with pytest.raises(PromptNotCollected):
        prompt_numbers(given, ["p0"], ["42"])
