"""A judge is asked about the responses of a batch while the next one is sampled; the results are the same."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_judge_server import FakeJudge
from tests.tasks.test_scored_meanwhile import job_in
from vantage.models import sampling
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.served_scores import JudgeServer
from vantage.schemas.recipe.terms import JudgeTerm
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.rewards.asking import JudgeRefused
from vantage.tasks.rollout import rollouts
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import ANSWERS

Contents = Callable[[Path], dict[str, bytes]]
PATIENCE = 60.0


@pytest.fixture
def judge() -> Iterator[FakeJudge]:
    with FakeJudge() as served:
        yield served


def judged(folder: Path, pipeline: Any, judge: FakeJudge, *names: str, **fields: Any) -> StageJob:
    """Return a job of best of two: four batches of four responses, each scored by a judge under each of the names."""
    job = job_in(folder, pipeline)
    terms = tuple(
        JudgeTerm(judge=JudgeServer(url=f"{judge.url}/v1", model="m", name=name, **fields))
        for name in names or ("judge",)
    )
    inputs = {role: path for role, path in job.inputs.items() if not role.startswith("reward")}
    return job.model_copy(update={"rewards": {"main": Reward(terms=terms)}, "inputs": inputs})


@pytest.mark.slow
def test_questions_are_under_way_before_the_last_batch_is_sampled(
    pipeline: Any, tmp_path: Path, judge: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch but the first is held up until the one before it has been asked about."""
    sample_batch, begun = sampling._sample_batch, list[int]()

    def waiting(*args: Any, **named: Any) -> Any:
        deadline = time.monotonic() + PATIENCE
        while begun and judge.seen.num_requests <= begun[-1] and time.monotonic() < deadline:
            time.sleep(0.01)
        begun.append(judge.seen.num_requests)
        return sample_batch(*args, **named)

    sample = sampling.sample

    def anew(*args: Any, **named: Any) -> Any:
        if len(begun) < 4:
            begun.clear()
        return sample(*args, **named)

    monkeypatch.setattr("vantage.tasks.rollout.engine.sample", anew)
    monkeypatch.setattr(sampling, "_sample_batch", waiting)
    run_stage(judged(tmp_path, pipeline, judge))
    assert begun[:4] == sorted(set(begun[:4]))


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["judge", "sampler"])
def test_which_is_slower_changes_no_bit_and_nothing_is_asked_twice(
    slow: str, pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two terms ask the same questions, 30 % of the requests fail, and at most three are under way for each term."""
    with FakeJudge() as one_by_one, monkeypatch.context() as patched:
        patched.setattr(rollouts, "scored_meanwhile", lambda *_: None)
        alone = judged(tmp_path / "alone", pipeline, one_by_one, "one", "two", at_once=3)
        expected = run_stage(alone)
    sample_batch = sampling._sample_batch

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.1)
        return sample_batch(*args, **named)

    if slow == "sampler":
        monkeypatch.setattr(sampling, "_sample_batch", slowly)
    with FakeJudge(delay=0.03 if slow == "judge" else 0.0) as judge:
        judge.faults.share = 0.3
        job = judged(tmp_path / slow, pipeline, judge, "one", "two", at_once=3)
        assert run_stage(job) == expected
    assert contents(job.output) == contents(alone.output)
    assert set(judge.seen.questions.values()) <= {1, 2}, "two is a late answer, which was asked again"
    assert judge.seen.most_at_once <= 2 * 3
    assert {each.line() for each in answers_in(job.scratch / ANSWERS)} == {
        each.line() for each in answers_in(alone.scratch / ANSWERS)
    }


def test_two_terms_with_equal_questions_ask_each_once(pipeline: Any, tmp_path: Path) -> None:
    """The second term would ask while the first one's request is under way."""
    with FakeJudge(delay=0.1) as judge:
        job = judged(tmp_path, pipeline, judge, "one", "two", at_once=8)
        run_stage(job)
    assert set(judge.seen.questions.values()) == {1}
    assert len(list(answers_in(job.scratch / ANSWERS))) == len(judge.seen.questions) > 16


def test_a_refusal_is_that_of_the_stage(pipeline: Any, tmp_path: Path, judge: FakeJudge) -> None:
    judge.faults.refused = 400
    with pytest.raises(JudgeRefused, match="answered 400"):
        run_stage(judged(tmp_path, pipeline, judge))


def test_a_sampler_that_fails_ends_what_is_asked(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_batch, calls = sampling._sample_batch, list[int]()

    def failing(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return sample_batch(*args, **named)

    monkeypatch.setattr(sampling, "_sample_batch", failing)
    with FakeJudge(delay=0.2) as judge:
        with pytest.raises(RuntimeError, match="out of luck"):
            run_stage(judged(tmp_path, pipeline, judge, at_once=1))
        time.sleep(0.5)
        seen = judge.seen.num_requests
        time.sleep(0.5)
        assert judge.seen.num_requests == seen
