"""Guards act on a loop as documented, and a kill at any step changes nothing of it."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tasks.kills import Killed
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning
from vantage.schemas.records.firings import EndedEarly, Watched
from vantage.schemas.records.job import StageJob
from vantage.tasks.training.attempt import Attempt, GuardFired
from vantage.tasks.training.progress import read_progress
from vantage.tasks.training.scratch import PROGRESS
from vantage.tasks.training.stage_state import NoState
from vantage.tasks.training.watched import ask_to_finish, asked_to_finish, read_watched

TOTAL = 12
Curve = Callable[[int], float]


def job_in(folder: Path, *guards: Guard | str, checkpoint_every: int = 3) -> StageJob:
    work = SupervisedFineTuning(
        kind="sft",
        data="d",
        learning_rate=1e-3,
        checkpoint_every=checkpoint_every,
        guards=guards[0] if guards == ("off",) else guards,  # type: ignore[arg-type]
    )
    return StageJob(
        run_id="0001-test",
        name="sft",
        attempt=1,
        stage_key="0" * 64,
        seed=5,
        work=work,
        generation=Generation(),
        scratch=folder,
        output=folder / "output",
    )


def loop(
    job: StageJob, curve: Curve, *, kill_in: int | None = None, keeps_best: bool = False
) -> tuple[Attempt[NoState], list[int], list[bool]]:
    """Return a loop whose ``loss`` is the curve; its weight counts the steps. Returns also the steps done, and which were due."""
    network = nn.Linear(1, 1)
    network.weight.data.fill_(0.0)
    steps, due = [], []
    with Attempt(
        job,
        total=TOTAL,
        modules={"network": network},
        optimizers={},
        state=NoState(),
        keeps_best=keeps_best,
    ) as attempt:
        if keeps_best and not attempt.best:
            attempt.best = {"weight": torch.zeros(1)}
        for step in attempt.remaining():
            if step == kill_in:
                raise Killed
            network.weight.data.add_(1.0)
            steps.append(step)
            due.append(attempt.is_due(100))
            attempt.finish_step({"loss": curve(step)}, num_tokens=1, headline="loss")
    assert network.weight.item() == attempt.step
    return attempt, steps, due


def rising_from(step: int) -> Curve:
    return lambda now: 1.0 if now < step else 10.0


def guard(action: str, *, over: int = 2) -> Guard:
    return Guard.model_validate({"metric": "loss", "above": 5.0, "over": over, "action": action})


def test_a_firing_has_the_values_that_its_guard_compared(tmp_path: Path) -> None:
    """A rise compares the newest two values with the two before them."""
    rises = Guard.model_validate({"metric": "loss", "rises_by": 5.0, "over": 2, "action": "warn"})
    loop(job_in(tmp_path, rises), lambda step: float([1, 2, 3, 4, 20][min(step, 4)]))
    [firing] = read_watched(tmp_path).firings
    assert (firing.step, firing.values) == (5, (2.0, 3.0, 4.0, 20.0))


def test_a_warning_changes_nothing_and_is_recorded_once_for_each_time_the_curve_leaves(
    tmp_path: Path,
) -> None:
    def curve(step: int) -> float:
        return 9.0 if step in (3, 4, 5, 8, 9) else 1.0

    job = job_in(tmp_path, guard("warn"))
    attempt, steps, _ = loop(job, curve)
    assert steps == list(range(TOTAL))
    assert attempt.step == TOTAL
    watched = read_watched(tmp_path)
    assert [(each.step, each.values) for each in watched.firings] == [(5, (9.0, 9.0)), (10, (9.0, 9.0))]
    assert watched.ended_early is None
    shown = read_progress(tmp_path / PROGRESS)
    assert shown is not None
    assert [text.split(";")[0] for text in shown.firings] == [
        "guard loss above 5, 2 reports in a row: fired after step 5 (9, 9)",
        "guard loss above 5, 2 reports in a row: fired after step 10 (9, 9)",
    ]


def test_no_more_than_five_firings_of_a_guard_are_kept(tmp_path: Path) -> None:
    loop(job_in(tmp_path, guard("warn", over=1)), lambda step: 9.0 if step % 2 else 1.0)
    assert [each.step for each in read_watched(tmp_path).firings] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("guards", [("off",), ()])
def test_without_a_firing_there_is_no_record(tmp_path: Path, guards: tuple[str, ...]) -> None:
    loop(job_in(tmp_path, *guards), lambda step: 1.0)
    assert read_watched(tmp_path) == Watched()
    assert not (tmp_path / "watched.json").exists()


def test_off_means_that_not_even_the_defaults_look(tmp_path: Path) -> None:
    def exploding(step: int) -> float:
        return 10.0**step

    loop(job_in(tmp_path / "off", "off"), exploding)
    assert read_watched(tmp_path / "off") == Watched()


def test_a_stop_saves_the_step_and_holds_for_the_next_attempt_too(tmp_path: Path) -> None:
    job = job_in(tmp_path, guard("stop"))
    for _ in range(2):
        with pytest.raises(GuardFired, match=r"guard loss above 5, 2 reports in a row: fired after step 6"):
            loop(job, rising_from(4))
        assert [each.step for each in read_watched(tmp_path).firings] == [6]
    network = nn.Linear(1, 1)
    with Attempt(job, total=TOTAL, modules={"network": network}, optimizers={}, state=NoState()) as attempt:
        assert (attempt.step, network.weight.item()) == (6, 6.0)


def test_a_loop_that_measures_no_best_finishes_at_once(tmp_path: Path) -> None:
    attempt, steps, _ = loop(job_in(tmp_path, guard("finish")), rising_from(4))
    assert steps == [0, 1, 2, 3, 4, 5]
    assert read_watched(tmp_path).ended_early == EndedEarly(step=6, total=TOTAL, by="guard", reason="loss")
    assert attempt.step == 6


def test_a_loop_that_keeps_the_best_does_one_more_step_which_is_due(tmp_path: Path) -> None:
    _, steps, due = loop(job_in(tmp_path, guard("finish")), rising_from(4), keeps_best=True)
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    assert due == [False] * 6 + [True]
    ended = read_watched(tmp_path).ended_early
    assert str(ended) == "finished at 7 of 12 by guard loss"


def test_to_restore_the_best_nothing_more_is_measured(tmp_path: Path) -> None:
    _, steps, due = loop(job_in(tmp_path, guard("restore_best")), rising_from(4), keeps_best=True)
    assert steps == [0, 1, 2, 3, 4, 5]
    assert not any(due)


def test_a_guard_that_fires_at_the_last_step_ends_nothing_early(tmp_path: Path) -> None:
    loop(job_in(tmp_path, guard("finish")), rising_from(TOTAL - 2))
    watched = read_watched(tmp_path)
    assert [each.step for each in watched.firings] == [TOTAL]
    assert watched.ended_early is None


def test_the_policy_is_frozen_as_long_as_the_newest_report_is_outside(tmp_path: Path) -> None:
    job = job_in(tmp_path, guard("freeze_policy"))
    frozen = []
    with Attempt(job, total=8, modules={}, optimizers={}, state=NoState()) as attempt:
        for step in attempt.remaining():
            frozen.append(attempt.policy_is_frozen)
            loss = 9.0 if step in (1, 2, 3) else 1.0
            attempt.finish_step({"loss": loss}, num_tokens=1, headline="loss")
    assert frozen == [False, False, False, True, True, False, False, False]


@pytest.mark.parametrize("action", ["warn", "stop", "finish", "restore_best"])
@pytest.mark.parametrize("keeps_best", [False, True])
@pytest.mark.parametrize("kill_in", range(TOTAL))
def test_killed_in_any_step_the_guards_see_and_do_the_same(
    tmp_path: Path, action: str, keeps_best: bool, kill_in: int
) -> None:
    def ended(folder: Path) -> tuple[object, int]:
        try:
            attempt, _, _ = loop(job_in(folder, guard(action)), rising_from(4), keeps_best=keeps_best)
        except GuardFired as error:
            return str(error), 0
        return read_watched(folder), attempt.step

    whole = ended(tmp_path / "whole")
    with suppress(Killed, GuardFired):
        loop(job_in(tmp_path / "cut", guard(action)), rising_from(4), kill_in=kill_in, keeps_best=keeps_best)
    assert ended(tmp_path / "cut") == whole


@pytest.mark.parametrize("kill_in", [None, 5, 6, 7, 8])
@pytest.mark.parametrize("keeps_best", [False, True])
def test_a_person_ends_the_loop_after_the_next_step(
    tmp_path: Path, keeps_best: bool, kill_in: int | None
) -> None:
    """The request comes in step 5; where the best is kept, the step after it is the last, and is measured."""
    job = job_in(tmp_path, checkpoint_every=1)

    def asking(step: int) -> float:
        if step == 5:
            ask_to_finish(tmp_path, run_id=job.run_id, reason="good enough")
        return 1.0

    for killed in [kill_in, None]:
        try:
            attempt, _, due = loop(job, asking, kill_in=killed, keeps_best=keeps_best)
        except Killed:
            continue
    last = 7 if keeps_best else 6
    assert attempt.step == last
    assert str(read_watched(tmp_path).ended_early) == f"finished at {last} of 12 by hand (good enough)"
    if keeps_best and due:
        assert due[-1]


@pytest.mark.parametrize("action", ["finish", "restore_best"])
def test_what_a_person_ended_is_not_a_guards_end_if_one_fires_in_the_last_step(
    tmp_path: Path, action: str
) -> None:
    """A person asks in step 5, so step 6 is the last and is measured. The guard fires there: by itself, it ends the stage one
    step later (``finish``), or after step 6 without a measurement. So another run must not take the artifact for its own."""

    def asking(step: int) -> float:
        if step == 4:
            ask_to_finish(tmp_path / "hand", run_id=job.run_id, reason="good enough")
        return rising_from(4)(step)

    job = job_in(tmp_path / "hand", guard(action))
    _, steps, due = loop(job, asking, keeps_best=True)
    assert (len(steps), due[-1]) == (6, True)
    watched = read_watched(tmp_path / "hand")
    assert [each.step for each in watched.firings] == [6]
    assert str(watched.ended_early) == "finished at 6 of 12 by hand (good enough)"
    _, alone, measured = loop(job_in(tmp_path / "alone", guard(action)), rising_from(4), keeps_best=True)
    assert (len(alone), measured[-1]) == ((7, True) if action == "finish" else (6, False))


@pytest.mark.parametrize("first", ["finish", "restore_best"])
def test_the_mark_names_the_guard_that_ended_the_stage(tmp_path: Path, first: str) -> None:
    """Two guards fire in one step. ``restore_best`` ends the stage at once, in whatever order they are written."""
    actions = {"finish": "loss", "restore_best": "grad_norm"}
    guards = [
        Guard.model_validate({"metric": metric, "above": 5.0, "over": 2, "action": action})
        for action, metric in sorted(actions.items(), reverse=first != "finish")
    ]
    job = job_in(tmp_path, *guards)
    assert guards[0].action == first
    with Attempt(job, total=TOTAL, modules={}, optimizers={}, state=NoState(), keeps_best=True) as attempt:
        attempt.best = {"weight": torch.zeros(1)}
        for step in attempt.remaining():
            value = rising_from(4)(step)
            attempt.finish_step({"loss": value, "grad_norm": value}, num_tokens=1, headline="loss")
    watched = read_watched(tmp_path)
    assert [each.step for each in watched.firings] == [6, 6]
    assert str(watched.ended_early) == "finished at 6 of 12 by guard grad_norm"


@pytest.mark.parametrize("ending", ["finish", "restore_best", "freeze_policy"])
def test_a_guard_that_stops_overrules_those_that_end(tmp_path: Path, ending: str) -> None:
    job = job_in(tmp_path, guard(ending), guard("stop"))
    with pytest.raises(GuardFired, match=r"fired after step 6 .*; the stage was stopped$"):
        loop(job, rising_from(4), keeps_best=True)
    assert read_watched(tmp_path).ended_early is None


def test_a_request_to_finish_is_for_one_run(tmp_path: Path) -> None:
    ask_to_finish(tmp_path, run_id="0002-other", reason="")
    assert asked_to_finish(tmp_path, run_id="0001-test") is None
    assert asked_to_finish(tmp_path, run_id="0002-other") == ""
    _, steps, _ = loop(job_in(tmp_path), lambda step: 1.0)
    assert len(steps) == TOTAL


def test_reports_that_are_not_finite_are_none(tmp_path: Path) -> None:
    """A curve that is undefined in between is outside in four reports of four, not in the six steps."""
    job = job_in(tmp_path, Guard(metric="grad_norm", above=5.0, over=4))
    with Attempt(job, total=8, modules={}, optimizers={}, state=NoState()) as attempt:
        for step in attempt.remaining():
            norm = float("nan") if step in (1, 2) else 9.0
            attempt.finish_step({"loss": 1.0, "grad_norm": norm}, num_tokens=1, headline="loss")
    assert [each.step for each in read_watched(tmp_path).firings] == [6]
