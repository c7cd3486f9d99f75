"""Sampler and trainer are one policy, measured token by token in one arithmetic; a stage stops where they are not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tasks.small_models import load
from vantage.ledger.journal import read
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import codec_of, read_prompts
from vantage.tasks.rewards.scoring import Scorer
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Sampled,
    rollout_logprobs,
    sample_responses,
)
from vantage.tasks.rollout.sampler_check import (
    MAX_SAMPLER_GAP,
    SamplerDisagrees,
    check_gap,
    compare_with_sampler,
)
from vantage.tasks.stages import run_stage
from vantage.tasks.training.optimization import Precision
from vantage.tasks.training.scratch import JOURNAL

TEMPERATURE = 0.7
VERIFIED = (VerifierTerm(verifier="arithmetic", wrong=-1.0),)


def job_at(pipeline: Any, name: str, *, temperature: float = TEMPERATURE, **changes: Any) -> StageJob:
    """Return a stage of the small pipeline whose temperature is not 1."""
    job: StageJob = pipeline.job(name, **changes)
    generation = job.generation.model_copy(update={"temperature": temperature})
    return job.model_copy(update={"generation": generation})


def best_of_n_job(pipeline: Any, **changes: Any) -> StageJob:
    work = BestOfN(
        kind="best_of_n", init="sft", reward="main", prompts="prompts", samples_per_prompt=4, batch_size=16,
        minibatch_size=4, iterations=1, validation_samples=4, learning_rate=1e-3,
    )  # fmt: skip
    job = job_at(pipeline, "policy")
    inputs = {role: job.inputs[role] for role in ("init", "prompts", "reward.main.0")}
    return job.model_copy(update={"work": work.model_copy(update=changes), "inputs": inputs})


def short(pipeline: Any, kind: str, **changes: Any) -> StageJob:
    if kind == "best_of_n":
        return best_of_n_job(pipeline, **changes)
    name = {"policy_optimization": "policy", "value_pretraining": "value"}[kind]
    return job_at(pipeline, name, iterations=1, validation_samples=4, **changes)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def sampled(
    request: pytest.FixtureRequest, pipeline: Any
) -> tuple[Precision, Sampled, Callable[[float], torch.Tensor]]:
    """Return responses at T = 0.7 in a precision, and the trainer's log-probabilities of them at any temperature."""
    precision: Precision = request.param
    job = job_at(pipeline, "policy")
    codec, policy = codec_of(job, "init"), load(job.inputs["init"])
    prompts = read_prompts(job.inputs["prompts"], "train", codec)
    engine = load_engine(policy, codec, limits=UNLIMITED, precision=precision)
    responses = sample_responses(engine, codec, prompts, range(32), device=policy.device, seed=3)

    def trainer(temperature: float) -> torch.Tensor:
        codec = codec_of(job_at(pipeline, "policy", temperature=temperature), "init")
        no_reward = Scorer(terms=(), missing_eos=None)
        models = RolloutModels(policy, engine, None, no_reward, codec, PassLimits(8), precision)
        return rollout_logprobs(policy, responses.sequences, models).logprobs

    return precision, responses, trainer


def test_the_trainer_says_of_each_token_what_the_sampler_said(sampled: Any) -> None:
    precision, responses, trainer = sampled
    gap = compare_with_sampler(trainer(TEMPERATURE), responses, precision=precision)
    # rounding alone: a hundredth and a fifth of the bounds, which leave room for larger models
    assert gap["sampler_gap"] < {"float32": 1e-5, "bfloat16": 0.01}[precision]
    assert 0 <= gap["sampler_gap_k3"] < gap["sampler_gap_worst"]
    assert gap["sampler_gap"] <= gap["sampler_gap_worst"] < {"float32": 1e-4, "bfloat16": 0.2}[precision]


def test_another_temperature_is_refused_though_the_mean_ratio_is_one(sampled: Any) -> None:
    precision, responses, trainer = sampled
    logprobs, mask = trainer(1.0), responses.sequences.response_mask
    ratio = (logprobs - responses.sampler_logprobs)[mask].exp()
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.1)
    with pytest.raises(
        SamplerDisagrees, match=rf"is above {MAX_SAMPLER_GAP[precision]:g}, .* precision={precision}"
    ):
        compare_with_sampler(logprobs, responses, precision=precision)


@pytest.mark.parametrize("measured", [math.nan, math.inf, 0.0011])
def test_what_is_no_number_is_refused_too(measured: float) -> None:
    check_gap("sampler_gap", 0.00099, "float32")
    with pytest.raises(
        SamplerDisagrees, match=r"sampler_gap=.* is not the one that sampled; nothing was updated; .*use"
    ):
        check_gap("sampler_gap", measured, "float32")


def test_the_sampler_computes_in_the_precision_of_training(pipeline: Any) -> None:
    """The sampler's logits have the type of its output head, which is float32 by default."""
    job = job_at(pipeline, "policy")
    codec, policy = codec_of(job, "init"), load(job.inputs["init"])
    prompts = read_prompts(job.inputs["prompts"], "train", codec)
    types: list[torch.dtype] = []
    policy.causal_lm.get_output_embeddings().register_forward_hook(lambda *call: types.append(call[-1].dtype))
    engine = load_engine(policy, codec, limits=UNLIMITED, precision="bfloat16")
    sample_responses(engine, codec, prompts, [0], device=policy.device, seed=1)
    assert set(types) == {torch.bfloat16}
    types.clear()
    engine = load_engine(policy, codec, limits=UNLIMITED)
    sample_responses(engine, codec, prompts, [0], device=policy.device, seed=1)
    assert set(types) == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["policy_optimization", "value_pretraining", "best_of_n"])
def test_every_stage_that_trains_on_samples_measures_it_in_each_iteration(
    kind: str, precision: Precision, pipeline: Any
) -> None:
    job = short(pipeline, kind, precision=precision)
    run_stage(job)
    [entry] = read(job.scratch / JOURNAL)
    highest = {"float32": 1e-5, "bfloat16": 0.01}[precision]
    assert 0 < entry.metrics["sampler_gap"] < highest
    assert 0 <= entry.metrics["sampler_gap_k3"] < entry.metrics["sampler_gap"]
    assert entry.metrics["sampler_gap_worst"] >= entry.metrics["sampler_gap"]


def at_another_temperature(*, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the passes with gradients, or those without, read the samples with T = 1."""
    right = PolicyModel.forward

    def wrong(*args: Any, temperature: float, **kwargs: Any) -> Any:
        is_wrong = torch.is_grad_enabled() == training
        return right(*args, temperature=1.0 if is_wrong else temperature, **kwargs)

    monkeypatch.setattr(PolicyModel, "forward", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "training", "metric"),
    [
        ("policy_optimization", False, "sampler_gap"),
        ("policy_optimization", True, "ratio_deviation_first"),
        ("value_pretraining", False, "sampler_gap"),
        ("best_of_n", True, "sampler_gap"),
    ],
)
def test_a_stage_whose_trainer_is_another_policy_stops_before_any_update(
    kind: str,
    training: bool,
    metric: str,
    precision: Precision,
    pipeline: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_another_temperature(training=training, monkeypatch=monkeypatch)
    steps: list[object] = []
    right = torch.optim.AdamW.step

    def step(*args: Any, **kwargs: Any) -> Any:
        steps.append(args)
        return right(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    job = short(pipeline, kind, precision=precision)
    bound = MAX_SAMPLER_GAP[precision]
    with pytest.raises(
        SamplerDisagrees, match=rf"^{metric}=.* is above {bound:g}, .*precision={precision}.*; nothing was"
    ):
        run_stage(job)
    assert not steps
    assert not list(job.output.iterdir())
    assert not list(read(job.scratch / JOURNAL)) if (job.scratch / JOURNAL).exists() else True


@pytest.mark.slow
def test_dropped_groups_leave_the_check_what_belongs_to_the_rest(pipeline: Any) -> None:
    """Selected from two rounds and joined, every response keeps its own log-probabilities."""
    switches = {"preset": "dapo", "samples_per_prompt": 4, "max_sampling_rounds": 2}
    algorithm = Algorithm.model_validate(switches)
    job = short(pipeline, "policy_optimization", algorithm=algorithm, critic=None)
    job.inputs.pop("critic")
    rewards = {"main": job.rewards["main"].model_copy(update={"terms": VERIFIED})}
    job = job.model_copy(update={"rewards": rewards})
    run_stage(job)
    [entry] = read(job.scratch / JOURNAL)
    assert entry.metrics["sampling_rounds"] == 2
    assert 0 < entry.metrics["sampler_gap"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("switches", [{"kl_kind": "k1"}, {"kl_kind": "full"}, {"shared_trunk": True}])
def test_equal_weights_have_no_kl_in_bfloat16(switches: dict[str, Any], pipeline: Any) -> None:
    """A policy that begins as its reference has a KL of exactly 0, without rounding of embeddings and norms."""
    algorithm = Algorithm.model_validate({"preset": "ppo", **switches})
    job = short(
        pipeline,
        "policy_optimization",
        algorithm=algorithm,
        precision="bfloat16",
        microbatch_size=5,
        critic=None if algorithm.shared_trunk else "value",
    )
    assert isinstance(job.work, PolicyOptimization)
    run_stage(job)
    [entry] = read(job.scratch / JOURNAL)
    assert entry.metrics["kl_to_reference"] == 0.0
    assert entry.metrics["reward_mean"] == pytest.approx(entry.metrics["score_mean"], abs=1e-6)


@pytest.mark.slow
def test_equal_weights_have_no_implicit_reward_in_bfloat16(pipeline: Any) -> None:
    """DPO's first loss is log 2 for every pair, since policy and reference give each token the same log-probability."""
    work = DirectPreferenceOptimization(
        kind="dpo", init="sft", data="preferences", batch_size=8, epochs=0.25, precision="bfloat16", microbatch_size=3,
        learning_rate=1e-6,
    )  # fmt: skip
    inputs = {"init": "sft", "reference": "sft", "data": "preferences"}
    job = job_at(pipeline, "sft").model_copy(
        update={"work": work, "inputs": {role: pipeline.folder(name) for role, name in inputs.items()}}
    )
    run_stage(job)
    first = next(iter(read(job.scratch / JOURNAL)))
    assert first.metrics["reward_gap"] == 0.0
    assert first.metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
