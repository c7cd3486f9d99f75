"""Stages that sample and train nothing also find how many responses have room side by side, in memory that is counted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.tasks.conftest import Pipeline
from tests.tasks.distillation_jobs import VERIFIER
from tests.tasks.distillation_jobs import job_in as distillation_job
from tests.tasks.small_model import write_small_model
from tests.tasks.test_found_limits import PLENTY, memory
from tests.tasks.test_stages_on_ranks import start
from vantage.attempts.micro_batches import with_limits
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.records.job import StageJob
from vantage.tasks import evaluation
from vantage.tasks.rewards import scoring
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout import judging, rollouts
from vantage.tasks.rollout.engine import LocalEngine, SamplesWhenAsked
from vantage.tasks.stages import run_stage
from vantage.tasks.training import memory_meter
from vantage.tasks.training.scratch import describe_found, read_found

EVALUATION = PolicyEvaluation(
    kind="evaluation",
    candidate="model",
    baseline="model",
    judge=Judge(verifier="arithmetic"),
    prompts="prompts",
    samples_per_prompt=12,
)
STAGES: dict[str, tuple[Stage, dict[str, str]]] = {
    "evaluation": (EVALUATION, {"candidate": "model", "baseline": "model", "prompts": "prompts"}),
    "preference_collection": (
        PreferenceCollection(
            kind="preference_collection",
            policy="model",
            demonstrations="demonstrations",
            samples_per_prompt=1,
            batch_size=200,
        ),
        {"policy": "model", "demonstrations": "demonstrations"},
    ),
    "rollout_collection": (
        RolloutCollection(
            kind="rollout_collection",
            policy="model",
            prompts="prompts",
            reward="main",
            samples_per_prompt=3,
            held_out_samples_per_prompt=3,
            batch_size=192,
        ),
        {"policy": "model", "prompts": "prompts"},
    ),
}
"""Stages that sample some 200 responses at once, and the inputs that they read."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return a pipeline whose model needs so much memory for each position that its weights count little."""
    torch.set_num_threads(1)
    return Pipeline(tmp_path_factory.mktemp("wide"), width=64)


def job_in(folder: Path, kind: str, pipeline: Pipeline, **changes: object) -> StageJob:
    """Return the job of a stage of a kind, in this folder."""
    work, sources = STAGES[kind]
    inputs = pipeline.inputs(sources)
    changes_of_job = {
        "name": "stage",
        "work": work.model_copy(update=changes),
        "inputs": inputs,
        "digests": pipeline.digests(inputs),
        "rewards": {"main": VERIFIER} if kind == "rollout_collection" else {},
    }
    return pipeline.job("prompts", folder=folder).model_copy(update=changes_of_job)


@dataclass(frozen=True)
class Drawn:
    """One call that sampled."""

    limits: PassLimits
    peak: int
    """Most bytes meanwhile; 0 where nothing is counted."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Drawn]:
    """Return what is sampled from now on."""
    seen: list[Drawn] = []
    sample = LocalEngine.sample_own

    def noted(self: LocalEngine, *given: Any, **named: Any) -> Any:
        if (meter := memory_meter.meter()) is not None:
            meter.begin()
        found = sample(self, *given, **named)
        seen.append(Drawn(self.limits, 0 if meter is None else meter.peak()))
        return found

    monkeypatch.setattr(LocalEngine, "sample_own", noted)
    return seen


def limits_of(drawn: list[Drawn]) -> list[PassLimits]:
    """Return the limits of what was sampled, and forget it."""
    limits = [each.limits for each in drawn]
    drawn.clear()
    return limits


def responses_in(folder: Path) -> list[Any]:
    """Return all sampled texts and ids of an artifact, in their order."""
    tables = [pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]
    tables += [pa.ipc.open_file(str(file)).read_all() for file in sorted(folder.glob("*.arrow"))]
    texts = ("response", "chosen", "rejected", "response_ids")
    return [
        table.column(name).to_pylist() for table in tables for name in texts if name in table.column_names
    ]


def logprobs_in(folder: Path) -> list[list[float]]:
    """Return the log-probabilities of every collected response, in their order."""
    tables = [pa.ipc.open_file(str(file)).read_all() for file in sorted(folder.glob("*.arrow"))]
    return [row for table in tables for row in table.column("sampler_logprobs").to_pylist()]


@pytest.mark.parametrize("kind", STAGES)
def test_what_is_sampled_side_by_side_has_room_and_is_what_it_would_be_one_by_one(
    kind: str, wide: Pipeline, tmp_path: Path, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``microbatch_size`` bounds no sampling where memory is counted, and all of it where it is not."""
    plain, whole, cut = (
        job_in(tmp_path / each, kind, wide, microbatch_size=8) for each in ("plain", "whole", "cut")
    )
    run_stage(plain)
    assert {each.rows for each in limits_of(drawn)} == {8}
    assert read_found(plain.scratch) is None

    with memory(PLENTY, monkeypatch):
        run_stage(whole)
    peak = max(each.peak for each in drawn)
    unbounded = read_found(whole.scratch)
    assert unbounded is not None
    assert set(limits_of(drawn)) == {PassLimits(tokens=unbounded.sampled_tokens)}

    limit = peak * 6 // 10
    with memory(limit, monkeypatch):
        run_stage(cut)
    assert 0.3 * limit < max(each.peak for each in drawn) <= limit
    found = read_found(cut.scratch)
    assert found is not None
    assert found.sampled_tokens is not None
    assert set(limits_of(drawn)) == {PassLimits(tokens=found.sampled_tokens)}

    expected = responses_in(plain.output)
    assert sum(map(len, expected)) > 100
    assert responses_in(whole.output) == responses_in(cut.output) == expected
    for found_here in (whole, cut):
        for few, many in zip(logprobs_in(plain.output), logprobs_in(found_here.output), strict=True):
            assert many == pytest.approx(few, abs=1e-5), "but for rounding"


def unequal_models(folder: Path, wide: Pipeline, **changes: object) -> StageJob:
    """Return the job of an evaluation of a narrow model against a wide one."""
    job = job_in(folder, "evaluation", wide, **{"samples_per_prompt": 1, **changes})
    narrow = folder / "narrow"
    write_small_model(narrow, width=16)
    return job.model_copy(update={"inputs": {**job.inputs, "candidate": narrow}})


def test_each_of_two_policies_has_the_limits_that_suit_it(
    wide: Pipeline, tmp_path: Path, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that goes on has the same ones, though memory is another by then; the provenance names both."""
    job = unequal_models(tmp_path, wide, microbatch_size=8)
    with memory(10**7, monkeypatch) as live:
        run_stage(job)
    assert live.asked == 2
    narrow, broad = read_found(job.scratch), read_found(job.scratch, other="baseline")
    assert narrow is not None
    assert broad is not None
    assert narrow.sampled_tokens is not None
    assert broad.sampled_tokens is not None
    assert 2 * broad.sampled_tokens < narrow.sampled_tokens
    each = [PassLimits(tokens=narrow.sampled_tokens)] * 2 + [PassLimits(tokens=broad.sampled_tokens)] * 2
    assert limits_of(drawn) == each, "sampled and greedy responses of one, then of the other"
    assert describe_found(job.scratch) == (
        f"{narrow.described}; baseline: responses of {broad.sampled_tokens:,} sampled side by side"
    )

    with memory(PLENTY, monkeypatch) as live:
        run_stage(job)
    assert live.asked == 0
    assert limits_of(drawn) == each


def test_the_reading_passes_of_each_policy_have_its_limits(
    wide: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own bound of rows stays beside what was found."""
    read: list[PassLimits] = []
    per_token = evaluation.per_token

    def noted(*given: Any, limits: PassLimits, **named: Any) -> Any:
        read.append(limits)
        return per_token(*given, limits=limits, **named)

    monkeypatch.setattr(evaluation, "per_token", noted)
    job = unequal_models(tmp_path, wide, microbatch_size=8)
    with memory(10**7, monkeypatch):
        run_stage(job)
    found = [read_found(job.scratch), read_found(job.scratch, other="baseline")]
    assert read == [PassLimits(rows=8, tokens=each.tokens) for each in found if each is not None]
    assert read[0].tokens != read[1].tokens


JUDGED = {
    "evaluation": {"judge": Judge(reward="main"), "samples_per_prompt": 1},
    "preference_collection": {"judge": Judge(reward="main"), "prompts": "prompts", "samples_per_prompt": 4},
    "rollout_collection": {},
}
"""Changes with which a reward scores what a stage samples."""


@pytest.mark.parametrize("kind", STAGES)
def test_a_reward_scores_within_what_was_found(
    kind: str, wide: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own bound of rows stays beside it."""
    read: list[PassLimits] = []

    def noted(*given: Any, limits: PassLimits, **named: Any) -> Any:
        read.append(limits)
        return scoring.score(*given, limits=limits, **named)

    for module in (judging, rollouts):
        monkeypatch.setattr(module, "score", noted)
    monkeypatch.setitem(BUILTIN_FUNCTIONS, "arithmetic", lambda prompt, response, answer: "a" in response)
    job = job_in(tmp_path, kind, wide, microbatch_size=8, **JUDGED[kind])
    inputs = {**job.inputs, "prompts": wide.folder("prompts")}
    job = job.model_copy(update={"rewards": {"main": VERIFIER}, "inputs": inputs})
    with memory(10**7, monkeypatch):
        run_stage(job)
    found = {read_found(job.scratch), read_found(job.scratch, other="baseline")}
    assert set(read) == {PassLimits(rows=8, tokens=each.tokens) for each in found if each is not None}


def test_after_memory_ran_out_the_smaller_bound_holds_for_both_policies(
    wide: Pipeline, tmp_path: Path, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ran out while the first policy sampled. The next attempt measures the second, and ``microbatch_size``
    bounds neither."""
    job = unequal_models(tmp_path, wide, microbatch_size=8)
    with memory(10**7, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(LocalEngine, "generate", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                run_stage(job)
        assert read_found(job.scratch) is not None
        assert read_found(job.scratch, other="baseline") is None
        halved = job.model_copy(update={"work": with_limits(job.work, microbatch_tokens=1000)})
        run_stage(halved)
    assert read_found(job.scratch, other="baseline") is not None
    assert limits_of(drawn) == [PassLimits(tokens=1000)] * 4


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_bound_that_the_recipe_gives_is_not_looked_for(
    wide: Pipeline, tmp_path: Path, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = unequal_models(tmp_path, wide, microbatch_tokens=500, rollout=Sampling(max_rows=5))
    with memory(PLENTY, monkeypatch) as live:
        run_stage(job)
    assert live.asked == 0
    assert limits_of(drawn) == [PassLimits(rows=5, tokens=500)] * 4


def test_the_teacher_of_a_distillation_has_limits_of_its_own(
    wide: Pipeline, tmp_path: Path, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the passes that train nor ``microbatch_size`` bound how many of the teacher's responses are sampled side
    by side.
    """
    job = distillation_job(
        wide, tmp_path, reward=VERIFIER, teacher="model", iterations=1, batch_size=8, microbatch_size=2
    )
    with memory(2 * 10**7, monkeypatch):
        run_stage(job)
    student, teacher = read_found(job.scratch), read_found(job.scratch, other="teacher")
    assert student is not None
    assert teacher is not None
    assert teacher.sampled_tokens is not None
    assert teacher.sampled_tokens > student.tokens
    seen = limits_of(drawn)
    assert set(seen) == {PassLimits(tokens=each.sampled_tokens) for each in (student, teacher)}


class Elsewhere(SamplesWhenAsked):
    """An engine that samples where no meter looks."""

    def __init__(self, engine: LocalEngine) -> None:
        self.generate, self.take_weights = engine.generate, engine.take_weights


def test_sampling_is_not_measured_where_another_engine_does_it(
    wide: Pipeline, tmp_path: Path, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes that read are; the provenance names no number of responses."""
    load = evaluation.load_engine
    monkeypatch.setattr(evaluation, "load_engine", lambda *given, **named: Elsewhere(load(*given, **named)))
    job = unequal_models(tmp_path, wide, microbatch_size=8)
    with memory(10**7, monkeypatch):
        run_stage(job)
    found = read_found(job.scratch)
    assert found is not None
    assert found.sampled_tokens is None
    assert describe_found(job.scratch) == f"found: passes of at most {found.tokens:,} positions"
    assert {each.rows for each in limits_of(drawn)} == {8}


@pytest.mark.slow
def test_all_ranks_sample_within_the_limit_of_the_one_with_least_memory(
    wide: Pipeline, tmp_path: Path
) -> None:
    """This holds whichever rank it is, and for both policies. The responses are those of one process."""
    alone = unequal_models(tmp_path / "alone", wide)
    run_stage(alone)
    shares = [[PLENTY, 10**7], [10**7, PLENTY]]
    jobs = [unequal_models(tmp_path / str(number), wide) for number in range(len(shares))]
    start(2, tmp_path / "jobs", jobs, memory=shares)
    for other in (None, "baseline"):
        first, second = (read_found(job.scratch, other=other) for job in jobs)
        assert first == second
        assert first is not None
        assert first.sampled_tokens is not None
        assert 72 <= first.sampled_tokens < 10**5
    for job in jobs:
        assert responses_in(job.output) == responses_in(alone.output)
