"""Sampling with vLLM, by a module that has the same calls and fails on request."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support import fake_vllm
from tests.support.fake_vllm import Faults
from tests.tasks.rollout.test_engine import best_of_n_job
from tests.tasks.small_models import load
from vantage.ledger.journal import read
from vantage.models.policy import PolicyModel
from vantage.models.sampling import sample
from vantage.schemas.metric_names import ENGINE
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Ahead, Sampling
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Codec, codec_of, read_prompts
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.rollout.running_vllm import VllmFailed
from vantage.tasks.rollout.vllm_engine import VllmEngine
from vantage.tasks.stages import run_stage
from vantage.tasks.training.engine_record import engine_metrics
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.seeds import derive_seed

VLLM = Sampling(engine="vllm")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return fake_vllm.install(monkeypatch)


def engine_of(policy: PolicyModel, codec: Codec) -> VllmEngine:
    engine = load_engine(policy, codec, limits=PassLimits(), rollout=VLLM)
    assert isinstance(engine, VllmEngine)
    return engine


def parts(pipeline: Any, **generation: Any) -> tuple[PolicyModel, Codec, list[list[int]]]:
    """A policy, its codec with some settings changed, and prompts."""
    job: StageJob = pipeline.job("policy")
    job = job.model_copy(update={"generation": job.generation.model_copy(update=generation)})
    codec = codec_of(job, "init")
    return load(job.inputs["init"]), codec, list(read_prompts(job.inputs["prompts"], "train", codec).ids[:4])


def moved(policy: PolicyModel, by: float) -> None:
    """Change every weight by about so much."""
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in policy.causal_lm.parameters():
            weight.add_(torch.randn(weight.shape, generator=drawn), alpha=by)


@pytest.mark.parametrize("greedy", [False, True])
def test_each_response_has_its_own_seed_and_the_log_probabilities_of_its_ids(
    greedy: bool, pipeline: Any, faults: Faults
) -> None:
    policy, codec, prompts = parts(pipeline, temperature=0.7)
    found = engine_of(policy, codec).generate(prompts, count=3, seed=5, greedy=greedy)
    assert faults.asked == [derive_seed(5, "response", row) for row in range(12)]
    assert len(found.responses) == len(found.ended) == len(found.logprobs) == 12
    for row, response in enumerate(found.responses):
        expected = sample(
            policy.causal_lm,
            [prompts[row // 3]],
            max_new_tokens=24,
            temperature=0.7,
            eos_token_ids=codec.stop_token_ids,
            pad_token_id=codec.pad_token_id,
            seed=derive_seed(5, "response", row),
            greedy=greedy,
        )
        assert response == expected.responses[0]
        assert found.ended[row] == expected.ended[0]
        with torch.no_grad():
            logits = policy.causal_lm(torch.tensor([prompts[row // 3] + response])).logits[0].double() / 0.7
        exact = logits.log_softmax(dim=-1)[len(prompts[row // 3]) - 1 : -1]
        own = exact.gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.logprobs[row]).double(), own, atol=1e-4, rtol=0)


def test_a_response_ends_with_the_token_that_completes_a_stop_string(pipeline: Any, faults: Faults) -> None:
    plain_policy, plain, prompts = parts(pipeline)
    whole = engine_of(plain_policy, plain).generate(prompts, count=4, seed=2)
    text = Counter("".join(plain.response_texts(whole.responses))).most_common(1)[0][0]
    policy, codec, _ = parts(pipeline, stop=(text,))
    cut = engine_of(policy, codec).generate(prompts, count=4, seed=2)
    shorter = 0
    for before, after, ended, logprobs in zip(
        whole.responses, cut.responses, cut.ended, cut.logprobs, strict=True
    ):
        first = next(
            (n for n in range(1, len(before) + 1) if text in codec.whole_texts([before[:n]])[0]), None
        )
        assert after == before[:first] and len(logprobs) == len(after)
        assert ended == (first is not None or before[-1] in plain.stop_token_ids)
        shorter += len(after) < len(before)
    assert shorter


def test_an_update_reaches_the_engine_and_what_was_cached_is_forgotten(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    before = engine.generate(prompts, count=2, seed=1)
    moved(policy, 0.05)
    engine.take_weights(policy.causal_lm.named_parameters())
    after = engine.generate(prompts, count=2, seed=1)
    assert before.responses != after.responses
    assert after == engine_of(policy, codec).generate(prompts, count=2, seed=1)
    assert [each.prefix_resets for each in faults.engines] == [2, 1]
    with pytest.raises(KeyError, match="no_such_weight"):
        engine.take_weights([("no_such_weight", torch.zeros(1))])


@pytest.mark.parametrize(
    "by, message",
    [
        (0.02, r"mean log-probability is -\d.*policy's -\d.* is above 0.0001"),
        (2e-6, "holds the weights from before the last update"),
    ],
)
def test_an_update_that_is_skipped_is_found(by: float, message: str, pipeline: Any, faults: Faults) -> None:
    """A large one by the bound; a small one since the engine is nearer to the policy of before."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=1, seed=1)
    faults.keeps_old_weights = True
    moved(policy, by)
    with pytest.raises(WeightsDiffer, match=message):
        engine.take_weights(policy.causal_lm.named_parameters())


def test_weights_that_were_pushed_by_hand_are_found(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=1, seed=1)
    other = load(pipeline.folder("model")).causal_lm
    faults.engines[0].collective_rpc("reload_weights", {"weights_iterator": iter(other.named_parameters())})
    asked = len(faults.asked)
    with pytest.raises(WeightsDiffer, match="nothing was sampled"):
        engine.generate(prompts, count=1, seed=2)
    assert len(faults.asked) == asked


@pytest.mark.parametrize("raising", [{2}, {9}, {20}, {9, 15}])
def test_an_engine_that_breaks_is_started_again_for_what_is_missing(
    raising: set[int], pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine breaks at its first token or later, once or twice: the responses are those of one that never broke."""
    policy, codec, prompts = parts(pipeline)
    fake_vllm.install(monkeypatch)
    expected = engine_of(policy, codec).generate(prompts, count=3, seed=4)
    faults = fake_vllm.install(monkeypatch)
    faults.raising_steps = raising
    assert engine_of(policy, codec).generate(prompts, count=3, seed=4) == expected
    assert faults.starts == 1 + len(raising)
    own = [derive_seed(4, "response", row) for row in range(12)]
    assert set(faults.asked) == set(own)
    if min(raising) == 20:
        again = faults.asked[12:]
        assert 0 < len(again) < 12, "those that had ended are kept"
        lengths = dict(zip(own, map(len, expected.responses), strict=True))
        assert min(lengths[seed] for seed in again) > 17, "step 1 read the fixed rows, and step 20 broke"


def test_an_engine_that_goes_on_breaking_ends_the_stage(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = parts(pipeline)
    faults.raising_steps = set(range(2, 100))
    with pytest.raises(VllmFailed, match=r"step \d is broken.*started again 2 times.*0 of 8 responses"):
        engine_of(policy, codec).generate(prompts, count=2, seed=4)
    assert faults.starts == 3


def test_an_engine_that_cannot_start_at_all_is_not_tried_again(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = parts(pipeline)
    faults.failing_starts = {1}
    with pytest.raises(VllmFailed, match=r"could not start: start 1 is broken.*engine: loop"):
        engine_of(policy, codec).generate(prompts, count=2, seed=4)
    assert faults.starts == 1


def test_responses_that_do_not_come_are_sampled_again(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, codec, prompts = parts(pipeline)
    fake_vllm.install(monkeypatch)
    expected = engine_of(policy, codec).generate(prompts, count=2, seed=4)
    faults = fake_vllm.install(monkeypatch)
    faults.dropped = {1, 6, 8}
    assert engine_of(policy, codec).generate(prompts, count=2, seed=4) == expected
    own = [derive_seed(4, "response", row) for row in range(8)]
    assert faults.asked == [*own, own[1], own[6], own[1]]


def test_an_engine_that_breaks_in_an_update_is_started_again(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=2, seed=1)
    faults.failing_updates = {2}
    moved(policy, 0.05)
    engine.take_weights(policy.causal_lm.named_parameters())
    assert engine.generate(prompts, count=2, seed=1) == engine_of(policy, codec).generate(
        prompts, count=2, seed=1
    )


def test_a_start_leaves_the_random_state_of_the_process(pipeline: Any, faults: Faults) -> None:
    """Threads that earlier tests left draw from ``random``, for the pauses between their requests: there one of three starts is enough."""
    policy, codec, prompts = parts(pipeline)

    def is_left(seed: int) -> bool:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        engine_of(policy, codec).generate(prompts, count=1, seed=1)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert numpy.random.get_state()[1].tolist() == states[2]
        return random.getstate() == states[1]

    assert any(is_left(seed) for seed in (101, 102, 103))


def test_one_engine_ends_where_another_begins(pipeline: Any, faults: Faults) -> None:
    """Two engines follow each other, as in an evaluation of two policies; the first starts again if it is asked once more."""
    policy, codec, prompts = parts(pipeline)
    engine, other = engine_of(policy, codec), engine_of(load(pipeline.folder("model")), codec)
    first = engine.generate(prompts, count=2, seed=1)
    assert other.generate(prompts, count=2, seed=1) != first
    assert engine.generate(prompts, count=2, seed=1) == first
    assert faults.starts == 3


def test_adapters_and_a_missing_package_are_refused(
    lora_pipeline: Any, pipeline: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = lora_pipeline.job("policy")
    work = job.work.model_copy(update={"rollout": Ahead(engine="vllm")})
    with pytest.raises(ValueError, match="this policy has adapters; use engine: loop, or lora: false"):
        run_stage(job.model_copy(update={"work": work}))
    monkeypatch.setattr("vantage.tasks.rollout.vllm_engine.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="needs the package vllm, which is not installed; install it as docs/rollouts.md"
    ):
        engine_of(*parts(pipeline)[:2])


@pytest.mark.parametrize("kind", ["policy", "best_of_n", "collected", "evaluation", "value"])
def test_whole_stages_sample_with_it(kind: str, pipeline: Any, faults: Faults, tmp_path: Path) -> None:
    """The trainer's log-probabilities are the engine's, after every update."""
    job = best_of_n_job(pipeline, tmp_path) if kind == "best_of_n" else pipeline.job(kind, folder=tmp_path)
    rollout = job.work.rollout.model_copy(update={"engine": "vllm"})
    run_stage(job.model_copy(update={"work": job.work.model_copy(update={"rollout": rollout})}))
    assert faults.asked
    if kind in ("policy", "best_of_n"):
        assert faults.starts == 1 and faults.updates > job.work.iterations
        weights = [entry.metrics["sampled_weights"] for entry in read(job.scratch / JOURNAL)]
        assert len(weights) == job.work.iterations == len(set(weights)), "each rollout had weights of its own"


def test_a_rollout_records_which_weights_sampled_it(pipeline: Any, faults: Faults) -> None:
    """Later sampling in the same step, as in validation, does not replace it."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    engine_metrics()
    engine.generate(prompts, count=1, seed=1)
    moved(policy, 0.01)
    engine.take_weights(policy.causal_lm.named_parameters())
    engine.generate(prompts, count=1, seed=2)
    first = engine_metrics()
    engine.generate(prompts, count=1, seed=3)
    second = engine_metrics()
    assert first["sampled_weights"] != second["sampled_weights"]
    assert {*first} == {*ENGINE} and first["engine_gap"] < 1e-5 and first["engine_failures"] == 0
    assert engine_metrics() == {}, "nothing was sampled"
