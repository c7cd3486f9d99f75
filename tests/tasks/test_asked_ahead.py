"""Judges and verifiers are asked about a rollout that is sampled ahead while the one before trains; the results are the same."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_judge_server import FakeJudge
from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.test_ahead import CASES, value_in
from tests.tasks.test_presets_run import curve, job_of
from tests.tasks.test_scored_meanwhile import job_in as verified_job_in
from tests.tasks.test_scored_meanwhile import lines
from vantage.ledger.journal import read
from vantage.schemas.metric_names import OF_SERVERS
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.served_scores import JudgeServer
from vantage.schemas.recipe.terms import JudgeTerm, VerifierTerm
from vantage.schemas.records.job import StageJob
from vantage.tasks import policy_optimization, value_pretraining
from vantage.tasks.rewards.answer_file import write_sorted
from vantage.tasks.rewards.asking import JudgeUnavailable
from vantage.tasks.rollout import ahead, rollouts
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import ANSWERS, JOURNAL

Contents = Callable[[Path], dict[str, bytes]]
ITERATIONS = 3
PATIENCE = 60.0


@pytest.fixture
def judge() -> Iterator[FakeJudge]:
    with FakeJudge() as served:
        yield served


def judged(folder: Path, pipeline: Any, judge: FakeJudge, *, seconds: float = 0.0, **fields: Any) -> StageJob:
    """Return a job of three iterations of GRPO that sample ahead, scored by a judge and by a verifier that notes each
    call in ``asked.txt``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    verifier = verified_job_in(folder, pipeline, seconds=seconds).inputs["reward.main.0"]
    terms = (
        JudgeTerm(judge=JudgeServer(url=f"{judge.url}/v1", model="m", **fields)),
        VerifierTerm(verifier="mine"),
    )
    work = {"rollout": {"ahead": 1}, "iterations": ITERATIONS, "learning_rate": 2e-3, "checkpoint_every": 1}
    work |= {"validate_every": 9}
    case = replace(CASES["grpo"], work=work, reward=Reward(terms=terms))
    job = job_of(case, pipeline, folder / "policy")
    inputs = {role: path for role, path in job.inputs.items() if not role.startswith("reward")}
    return job.model_copy(update={"inputs": inputs | {"reward.main.1": verifier}})


def only_when_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody asked before the responses are taken."""
    monkeypatch.setattr(rollouts, "scored_meanwhile", lambda *_: None)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so(), "it would wait in vain"


def sorted_answers(job: StageJob) -> bytes:
    target = job.scratch / "sorted"
    write_sorted(job.scratch / ANSWERS, target)
    return target.read_bytes()


def curves_but_of_servers(job: StageJob) -> list[dict[str, float]]:
    return [{name: each for name, each in step.items() if name not in OF_SERVERS} for step in curve(job)]


class Counted:
    """Counts the questions to the judge and to the verifier that each scoring of responses has asked."""

    def __init__(self, judge: FakeJudge, asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._judge, self._asked = judge, asked
        self.of_scorings: list[tuple[int, int]] = []
        score = rollouts.score

        def counted(*args: Any, **named: Any) -> Any:
            before = self.now()
            found = score(*args, **named)
            self.of_scorings.append((self.now()[0] - before[0], self.now()[1] - before[1]))
            return found

        monkeypatch.setattr(rollouts, "score", counted)

    def now(self) -> tuple[int, int]:
        return self._judge.seen.num_requests, lines(self._asked)


def test_everything_is_asked_while_the_rollout_before_trains(
    pipeline: Any, tmp_path: Path, judge: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update is held up until all questions about the next rollout are answered: when that is taken, none is left."""
    with FakeJudge() as other, monkeypatch.context() as patched:
        only_when_taken(patched)
        plain = judged(tmp_path / "plain", pipeline, other)
        counted = Counted(other, tmp_path / "plain" / "asked.txt", patched)
        expected = run_stage(plain)
    # validation, three rollouts, validation, test
    each = counted.of_scorings
    assert len(each) == 6 and min(min(counts) for counts in each[:4]) > 0

    job = judged(tmp_path / "beside", pipeline, judge)
    counted = Counted(judge, tmp_path / "beside" / "asked.txt", monkeypatch)
    at_first = counted.now()
    update, num_updates = policy_optimization.update, 0

    def held_up(*args: Any, **named: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        num_scored = 1 + min(num_updates + 1, ITERATIONS)
        for place, what in enumerate(("judge", "verifier")):
            wanted = at_first[place] + sum(counts[place] for counts in each[:num_scored])
            until(lambda place=place, wanted=wanted: counted.now()[place] >= wanted)  # type: ignore[misc]
            assert counted.now()[place] == wanted, what
        return update(*args, **named)

    monkeypatch.setattr(policy_optimization, "update", held_up)
    assert run_stage(job) == expected
    assert counted.of_scorings == [each[0], each[1], (0, 0), (0, 0), *each[4:]]
    assert curve(job) == curve(plain)
    assert [step["judge_asked"] for step in curves_of(job)] == [
        step["judge_asked"] for step in curves_of(plain)
    ]
    assert sorted_answers(job) == sorted_answers(plain)
    assert "listening beside" not in {each.name for each in threading.enumerate()}


def curves_of(job: StageJob) -> list[dict[str, float]]:
    return [entry.metrics for entry in read(job.scratch / JOURNAL)]


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["judges", "training"])
def test_which_is_slower_changes_no_bit_and_nothing_is_asked_twice(
    slow: str, pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation after each update asks the judge and the verifier too; 30 % of the requests fail."""
    work = {"validate_every": 1}
    with FakeJudge() as other, monkeypatch.context() as patched:
        only_when_taken(patched)
        plain = changed(judged(tmp_path / "plain", pipeline, other), work)
        expected = run_stage(plain)
    update = policy_optimization.update

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.3)
        return update(*args, **named)

    if slow == "training":
        monkeypatch.setattr(policy_optimization, "update", slowly)
    with FakeJudge(delay=0.05 if slow == "judges" else 0.0) as judge:
        judge.faults.share = 0.3
        job = changed(
            judged(tmp_path / slow, pipeline, judge, seconds=0.02 if slow == "judges" else 0.0, at_once=3),
            work,
        )
        assert run_stage(job) == expected
    assert contents(job.output) == contents(plain.output)
    assert curve(job) == curve(plain)
    assert sorted_answers(job) == sorted_answers(plain)
    assert set(judge.seen.questions.values()) <= {1, 2}, "two is a late answer, which was asked again"
    assert judge.seen.most_at_once <= 3
    assert lines(tmp_path / slow / "asked.txt") == lines(tmp_path / "plain" / "asked.txt")


def changed(job: StageJob, work: dict[str, Any]) -> StageJob:
    return job.model_copy(update={"work": job.work.model_copy(update=work)})


@pytest.mark.slow
def test_a_judge_that_fails_beside_the_training_ends_the_stage_where_its_scores_are_needed(
    pipeline: Any, tmp_path: Path, judge: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second update is completed. When the judge is back, the stage goes on as if nothing had been."""
    with FakeJudge() as other:
        plain = judged(tmp_path / "plain", pipeline, other)
        expected = run_stage(plain)
    job = judged(tmp_path / "dead", pipeline, judge, patience_seconds=1.0)
    begin_next, began = policy_optimization.begin_next, list[float]()

    def begun(*args: Any, iteration: int) -> None:
        if iteration == 1:
            judge.stop()
            began.append(time.monotonic())
        begin_next(*args, iteration=iteration)

    with monkeypatch.context() as patched:
        patched.setattr(policy_optimization, "begin_next", begun)
        with pytest.raises(JudgeUnavailable, match="does not answer"):
            run_stage(job)
    assert len(curves_of(job)) == 2
    assert not {"listening beside", "sampling ahead"} & {each.name for each in threading.enumerate()}
    judge.start()
    assert run_stage(job) == expected
    assert curves_but_of_servers(job) == curves_but_of_servers(plain)
    assert sorted_answers(job) == sorted_answers(plain)
    assert set(judge.seen.questions.values()) == {1}


def test_what_is_asked_in_vain_is_none_of_the_stages_answers(
    pipeline: Any, tmp_path: Path, judge: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience ends a critic's training while the judge answers about the next rollout: how many of them had come is chance."""

    def job_in(name: str, judge: FakeJudge) -> StageJob:
        job = value_in(tmp_path / name, pipeline, ahead=1, learning_rate=1e-12, patience=1, iterations=9)
        terms = (JudgeTerm(judge=JudgeServer(url=f"{judge.url}/v1", model="m")),)
        inputs = {role: path for role, path in job.inputs.items() if not role.startswith("reward")}
        return job.model_copy(update={"rewards": {"main": Reward(terms=terms)}, "inputs": inputs})

    with FakeJudge() as other, monkeypatch.context() as patched:
        only_when_taken(patched)
        plain = job_in("plain", other)
        expected = run_stage(plain)
    regress = value_pretraining.regress

    def held_up(*args: Any, **named: Any) -> Any:
        time.sleep(1.0)
        return regress(*args, **named)

    monkeypatch.setattr(value_pretraining, "regress", held_up)
    job = job_in("beside", judge)
    assert run_stage(job) == expected
    assert judge.seen.num_requests > other.seen.num_requests, "about a rollout that nobody took"
    assert sorted_answers(job) == sorted_answers(plain)
    assert "listening beside" not in {each.name for each in threading.enumerate()}


def test_the_listener_that_fails_is_a_fault_of_the_stage(
    pipeline: Any, tmp_path: Path, judge: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(ahead.ListeningBeside):
        def __init__(self, listener: Any) -> None:
            def fails(*_: Any) -> None:
                raise RuntimeError("deaf")

            super().__init__(replace(listener, codec=type("Codec", (), {"response_texts": fails})()))

    monkeypatch.setattr(ahead, "ListeningBeside", Failing)
    with pytest.raises(RuntimeError, match="deaf"):
        run_stage(judged(tmp_path, pipeline, judge))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_a_killed_stage_ends_with_the_same_bytes(
    step: int,
    pipeline: Any,
    tmp_path: Path,
    judge: FakeJudge,
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Questions about responses that a checkpoint gave back are asked when they are taken, and none twice but those under way at the kill."""
    same_bytes_after_a_kill(
        run_stage,
        lambda folder: judged(folder, pipeline, judge, at_once=2),
        tmp_path,
        step=step,
        contents=contents,
        monkeypatch=monkeypatch,
    )
    whole, cut = (judged(tmp_path / name, pipeline, judge, at_once=2) for name in ("whole", "cut"))
    assert sorted_answers(cut) == sorted_answers(whole)
    times = Counter(judge.seen.questions.values())
    assert times.keys() <= {2, 3}, "once for each of the two stages"
    assert times[3] <= 2, "two requests are under way at once"
