"""An engine, through the port by which stages sample, gives what it should, and is always given the newest weights."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.slow import slow
from tests.tasks.kills import killed_in
from tests.tasks.small_models import load
from vantage.models.policy import PolicyModel
from vantage.models.sampling import batches, sample
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.recipe.stages import BestOfN
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import codec_of, read_prompts
from vantage.tasks.rollout import rollout_models
from vantage.tasks.rollout.engine import LocalEngine, RolloutEngine, load_engine
from vantage.tasks.rollout.rollouts import sample_responses
from vantage.tasks.stages import run_stage
from vantage.tasks.training import progress, ranks

Contents = Callable[[Path], dict[str, bytes]]


def test_the_responses_of_a_prompt_stand_in_a_row(pipeline: Any) -> None:
    """Responses and their log-probabilities are those of the sampler for a list that repeats each prompt."""
    job = pipeline.job("policy")
    policy, codec = load(job.inputs["init"]), codec_of(job, "init")
    prompts = read_prompts(job.inputs["prompts"], "train", codec)
    engine = load_engine(policy, codec, limits=PassLimits(2))
    sampled = sample_responses(engine, codec, prompts, [5, 3], device=policy.device, count=3, seed=4)
    assert sampled.prompts == [prompts.texts[index] for index in (5, 5, 5, 3, 3, 3)]
    expected = sample(
        policy.causal_lm,
        [prompts.ids[index] for index in (5, 5, 5, 3, 3, 3)],
        max_new_tokens=codec.generation.max_response_tokens,
        temperature=1.0,
        eos_token_ids=codec.stop_token_ids,
        pad_token_id=codec.pad_token_id,
        seed=4,
    )
    assert len({tuple(response) for response in expected.responses}) > 2
    for row, (ids, logprobs) in enumerate(zip(expected.responses, expected.logprobs, strict=True)):
        assert sampled.sequences.response_ids[row, : len(ids)].tolist() == ids
        torch.testing.assert_close(sampled.sampler_logprobs[row, : len(ids)], torch.tensor(logprobs))


def test_an_engine_samples_from_the_weights_that_it_was_given_last(pipeline: Any) -> None:
    job = pipeline.job("policy")
    codec = codec_of(job, "init")
    untrained, trained = load(pipeline.folder("model")), load(job.inputs["init"])
    prompts = read_prompts(job.inputs["prompts"], "train", codec).ids[:4]

    def responses(engine: RolloutEngine) -> list[list[int]]:
        return engine.generate(prompts, count=2, seed=1).responses

    expected = responses(load_engine(trained, codec, limits=PassLimits()))
    engine = load_engine(untrained, codec, limits=PassLimits())
    assert responses(engine) != expected
    engine.take_weights(trained.causal_lm.named_parameters())
    assert responses(engine) == expected
    with pytest.raises(KeyError, match="no_such_weight"):
        engine.take_weights([("no_such_weight", torch.zeros(1))])


def test_it_tells_of_its_largest_batch_and_samples_within_the_budget(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three prompts is sampled twice. Two rows of the longest exceed the budget; four of the others do not."""
    job = pipeline.job("policy")
    policy, codec = load(job.inputs["init"]), codec_of(job, "init")
    limit = codec.generation.max_response_tokens
    prompts = [[1, 20, 21], [1] + [20] * 30, [1, 22]]
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(progress, "computing", lambda rows, tokens: told.append((rows, tokens)))
    whole = load_engine(policy, codec, limits=UNLIMITED).generate(prompts, count=2, seed=3)
    budget = 4 * (3 + limit)
    cut = load_engine(policy, codec, limits=PassLimits(tokens=budget)).generate(prompts, count=2, seed=3)
    assert told[0] == (6, 6 * (31 + limit))
    assert told[1] == max(
        [(4, budget), (budget // (31 + limit), budget // (31 + limit) * (31 + limit))],
        key=lambda each: each[1],
    )
    assert cut.responses == whole.responses


@pytest.mark.parametrize("tokens", [1, 60, 130, 10**6])
def test_ranks_that_sample_in_step_make_as_many_batches_as_the_one_that_has_most(
    tokens: int, pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pipeline.job("policy")
    policy, codec = load(job.inputs["init"]), codec_of(job, "init")
    limit = codec.generation.max_response_tokens
    prompts = [[1] * length for length in (2, 40, 3, 41, 2)]
    engine = LocalEngine(policy, codec, PassLimits(tokens=tokens), "float32")
    monkeypatch.setattr(ranks, "are_sharded", lambda: True)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    in_step = engine._in_step(prompts)
    assert in_step is not None
    of_ranks = [[2, 3, 2], [40, 41]]
    limits = PassLimits(tokens=tokens)
    assert in_step.num_batches == max(
        len(batches(lengths, limits, max_new_tokens=limit)) for lengths in of_ranks
    )


class EngineOfItsOwn(LocalEngine):
    """Holds a copy of the weights, as an engine in another process does."""

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep copies of the weights, so that none is the trained tensor itself."""
        super().take_weights((name, weight.detach().clone()) for name, weight in weights)


def load_engine_of_its_own(
    policy: PolicyModel, codec: Any, *, rollout: Sampling, **settings: Any
) -> RolloutEngine:
    assert rollout.engine == "loop"
    return EngineOfItsOwn(PolicyModel(copy.deepcopy(policy.causal_lm)), codec, **settings)


def best_of_n_job(pipeline: Any, folder: Path) -> StageJob:
    work = BestOfN(
        kind="best_of_n", init="sft", reward="main", prompts="prompts", samples_per_prompt=4, batch_size=16,
        minibatch_size=2, iterations=4, validate_every=2, validation_samples=8, learning_rate=1e-3, checkpoint_every=2,
    )  # fmt: skip
    job: StageJob = pipeline.job("policy", folder=folder)
    inputs = {role: job.inputs[role] for role in ("init", "prompts", "reward.main.0")}
    return job.model_copy(update={"work": work, "inputs": inputs})


@pytest.mark.parametrize(
    ("kind", "is_resumed"),
    [
        ("policy_optimization", False),
        ("best_of_n", True),
        *slow(("policy_optimization", True), ("best_of_n", False)),
    ],
)
def test_a_stage_gives_its_engine_every_new_weight_before_it_samples(
    kind: str,
    is_resumed: bool,
    pipeline: Any,
    contents: Contents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine with weights of its own ends with the bytes of one that shares the tensors; after a kill too."""

    def job_in(folder: Path) -> StageJob:
        if kind == "best_of_n":
            return best_of_n_job(pipeline, folder)
        job: StageJob = pipeline.job("policy", folder=folder)
        return job

    shared = job_in(tmp_path / "shared")
    expected = run_stage(shared)
    monkeypatch.setattr(rollout_models, "load_engine", load_engine_of_its_own)
    if is_resumed:
        with killed_in(3, monkeypatch):
            run_stage(job_in(tmp_path / "own"))
    own = job_in(tmp_path / "own")
    assert run_stage(own) == expected
    assert contents(own.output) == contents(shared.output)
