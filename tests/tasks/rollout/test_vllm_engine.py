"""vLLM samples for a stage; a module that has the same calls and fails on request replaces it here."""

import random
import weakref
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support import fake_vllm
from tests.support.fake_vllm import Faults
from tests.support.slow import slow
from tests.tasks.rollout.test_engine import best_of_n_job
from tests.tasks.small_models import load
from vantage.ledger.journal import read
from vantage.models.policy import PolicyModel
from vantage.models.sampling import sample
from vantage.schemas.metric_names import ENGINE
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Ahead, Sampling
from vantage.schemas.records.job import StageJob
from vantage.tasks import policy_optimization
from vantage.tasks.data.examples import Codec, codec_of, read_prompts
from vantage.tasks.rollout import checksums, running_vllm
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.held_weights import WeightsDiffer
from vantage.tasks.rollout.running_vllm import RunningVllm, VllmCannotStart, VllmFailed
from vantage.tasks.rollout.vllm_engine import VllmEngine
from vantage.tasks.stages import run_stage
from vantage.tasks.training import engine_record
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
    """Return a policy, its codec with some settings changed, and prompts."""
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
    """A large update is found by the bound, and a small one because the engine is nearer to the policy of before."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=1, seed=1)
    faults.keeps_old_weights = True
    moved(policy, by)
    with pytest.raises(WeightsDiffer, match=message):
        engine.take_weights(policy.causal_lm.named_parameters())


@pytest.mark.parametrize("chosen", [None, True, False, "not computed"])
def test_one_bit_of_a_weight_is_found_by_checksums(
    chosen: bool | str | None, pipeline: Any, faults: Faults
) -> None:
    """No log-probability of the fixed rows shows the bit."""
    policy, codec, prompts = parts(pipeline)
    faults.has_no_checksums = chosen == "not computed"
    rollout = Sampling(engine="vllm", checksums=None if isinstance(chosen, str) else chosen)
    engine = load_engine(policy, codec, limits=PassLimits(), rollout=rollout)
    engine.generate(prompts, count=1, seed=1)
    faults.flipped = {2}
    moved(policy, 0.01)
    is_found = chosen in (None, True) and not faults.has_no_checksums
    with (
        nullcontext()
        if not is_found
        else pytest.raises(
            WeightsDiffer,
            match=r"the sha256 of 1 of the \d+ that agreed before differ, the first that of .*qkv_proj",
        )
    ):
        engine.take_weights(policy.causal_lm.named_parameters())


def test_a_bit_of_large_weights_is_found_when_its_turn_comes(
    pipeline: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has one parameter of the size of a value projection or larger. All are compared at first; then the flipped bit is found in one of as
    many updates as there are parts, and in no run without it."""
    monkeypatch.setattr(checksums, "MOST_BYTES", 1)
    asked: list[Any] = []
    computed = RunningVllm.checksums
    monkeypatch.setattr(
        RunningVllm,
        "checksums",
        lambda self, names=None: (asked.append(names), computed(self, names))[1],
    )
    policy, codec, prompts = parts(pipeline)
    number = len(fake_vllm.checksums_of(policy.causal_lm))

    def update(engine: VllmEngine, times: int) -> None:
        engine.generate(prompts, count=1, seed=1)
        for _ in range(times):
            moved(policy, 0.01)
            engine.take_weights(policy.causal_lm.named_parameters())

    engine = engine_of(policy, codec)
    update(engine, number + 1)
    assert asked[0] is None and [len(names) for names in asked[1:]] == [1] * (number + 1)
    assert asked[1] == asked[-1] and len({names[0] for names in asked[1:]}) == number
    faults.raising_steps = {faults.steps + 1}
    engine.generate(prompts, count=1, seed=1)
    assert len(faults.engines) == 2 and asked[-1] is None, "one that starts anew is compared as a whole"
    faults.flipped = {each + faults.updates for each in range(2, number + 2)}
    with pytest.raises(WeightsDiffer, match=r"the sha256 of 1 of the 1 that agreed before .* of .*qkv_proj"):
        update(engine_of(policy, codec), number)


def test_checksums_are_those_of_joined_and_padded_weights(
    pipeline: Any, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    policy, codec, prompts = parts(pipeline)
    caplog.set_level("INFO")
    engine_of(policy, codec).generate(prompts, count=1, seed=1)
    [line] = [each for each in caplog.messages if each.startswith("the checksums of")]
    number = len(fake_vllm.checksums_of(policy.causal_lm))
    assert line == f"the checksums of {number} of {number} parameters of vLLM agree"
    assert number < len(list(policy.causal_lm.parameters()))


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
    with pytest.raises(VllmCannotStart, match=r"could not start: start 1 is broken"):
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
    """Threads left by earlier tests draw from ``random`` for the pauses between their requests, so of ``random`` one of
    three starts is enough."""
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


def test_a_missing_package_is_refused(pipeline: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vantage.tasks.rollout.vllm_engine.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="needs the package vllm, which is not installed; install it as docs/rollouts.md"
    ):
        engine_of(*parts(pipeline)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["policy", *slow("best_of_n", "collected", "evaluation", "value")])
def test_whole_stages_sample_with_it(
    kind: str, pipeline: Any, few_prompts: Path, faults: Faults, tmp_path: Path
) -> None:
    """The trainer's log-probabilities are the engine's, after every update."""
    job = best_of_n_job(pipeline, tmp_path) if kind == "best_of_n" else pipeline.job(kind, folder=tmp_path)
    rollout = job.work.rollout.model_copy(update={"engine": "vllm"})
    work = job.work.model_copy(update={"rollout": rollout})
    run_stage(job.model_copy(update={"work": work, "inputs": job.inputs | {"prompts": few_prompts}}))
    assert faults.asked
    if kind in ("policy", "best_of_n"):
        assert faults.starts == 1 and faults.updates > job.work.iterations
        curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
        weights = [step["sampled_weights"] for step in curves]
        assert len(weights) == job.work.iterations == len(set(weights)), "each rollout had weights of its own"
        assert [step["sampled_iteration"] for step in curves] == list(range(job.work.iterations))


def test_a_rollout_records_which_weights_sampled_it(pipeline: Any, faults: Faults) -> None:
    """Later sampling in the same step, for example in validation, does not replace the record."""
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


def test_an_engine_that_shares_a_gpu_sleeps_while_others_compute(pipeline: Any, faults: Faults) -> None:
    """The engine wakes for an update and for responses; the fake one refuses both while it is asleep."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    first = engine.generate(prompts, count=2, seed=1)
    assert engine._vllm is not None and not faults.engines[0].llm_engine.is_asleep  # on a CPU it never sleeps
    engine._vllm._can_sleep = True
    assert engine.generate(prompts, count=2, seed=1) == first
    assert faults.engines[0].llm_engine.is_asleep
    assert engine.generate(prompts, count=2, seed=1) == first
    moved(policy, 0.05)
    engine.take_weights(policy.causal_lm.named_parameters())
    assert not faults.engines[0].llm_engine.is_asleep
    after = engine.generate(prompts, count=2, seed=1)
    assert after == engine_of(policy, codec).generate(prompts, count=2, seed=1) != first
    assert faults.starts == 2


def test_vllm_sleeps_until_the_passes_of_an_update_are_over(
    pipeline: Any, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KL to the policy before the update is measured with all of the GPU's memory too."""
    monkeypatch.setitem(running_vllm.ON_CPU, "enable_sleep_mode", True)
    asleep: list[bool] = []

    def measured(*arguments: Any) -> float:
        asleep.append(faults.engines[-1].llm_engine.is_asleep)
        return 0.01

    monkeypatch.setattr(policy_optimization, "kl_to_old", measured)
    job = pipeline.job("policy", folder=tmp_path, iterations=2)
    algorithm = job.work.algorithm.model_copy(update={"kl_penalty_target": 0.01, "kl_penalty_coef": 0.1})
    changes = {"rollout": Ahead(engine="vllm"), "algorithm": algorithm}
    run_stage(job.model_copy(update={"work": job.work.model_copy(update=changes)}))
    assert asleep == [True, True]


def test_failures_of_a_step_that_samples_nothing_are_those_of_the_next() -> None:
    engine_metrics()
    engine_record.note_failure()
    engine_record.note_stale(2)
    assert engine_metrics() == {}
    engine_record.note_sampled(digest="1f", gap=0.5, iteration=3)
    expected = {
        "sampled_weights": 31.0,
        "sampled_iteration": 3.0,
        "engine_gap": 0.5,
        "stale_responses": 2.0,
        "engine_failures": 1.0,
    }
    assert engine_metrics() == expected
    assert engine_metrics() == {}


def test_an_engine_that_cannot_sleep_is_started_again(pipeline: Any, faults: Faults) -> None:
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    first = engine.generate(prompts, count=2, seed=1)
    assert engine._vllm is not None
    engine._vllm._can_sleep = faults.fails_to_sleep = True
    assert engine.generate(prompts, count=2, seed=1) == first
    assert engine._vllm is None
    assert engine.generate(prompts, count=2, seed=1) == first
    assert faults.starts == 2


def test_vllm_takes_what_is_free_and_the_first_of_a_process_can_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(running_vllm, "_one_has_slept", False)
    found = []
    for free in (80, 8):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80))
        found.append(running_vllm._on_gpu())
    assert found == [
        {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True},
        {"gpu_memory_utilization": pytest.approx(0.095)},
    ]


def test_an_error_of_vllm_holds_none_of_its_memory_while_it_is_handled(
    pipeline: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that broke is collected before the next one starts: its memory is needed by that one."""
    policy, codec, prompts = parts(pipeline)
    engine = engine_of(policy, codec)
    engine.generate(prompts, count=2, seed=1)
    broken = weakref.ref(faults.engines.pop().model)
    faults.raising_steps = {faults.steps + 2}
    alive = []
    started = fake_vllm.FakeLLM.__init__

    def starting(self: fake_vllm.FakeLLM, *given: Any, **settings: Any) -> None:
        alive.append(broken() is not None)
        started(self, *given, **settings)

    monkeypatch.setattr(fake_vllm.FakeLLM, "__init__", starting)
    engine.generate(prompts, count=2, seed=1)
    assert alive == [False]
