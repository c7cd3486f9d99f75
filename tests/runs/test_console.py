"""The console prints the right lines, on a terminal and where there is none."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from vantage.runs.console import (
    STYLES,
    PipeSafeConsole,
    Screen,
    duration,
    facts_of,
    headline_of,
    open_console,
    show_run,
    show_table,
)
from vantage.runs.plan_table import show_plan
from vantage.runs.planning import PlannedStep
from vantage.runs.record import RunRecord, RunStatus, StageRecord, StageStatus
from vantage.runs.resolving import load_resolved
from vantage.runs.shown_result import show_result
from vantage.runs.status import RunState
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.verdicts import check_gate
from vantage.tasks.training.progress import StageProgress


def plain() -> tuple[Screen, io.StringIO]:
    printed = io.StringIO()
    return Screen(Console(file=printed, width=120)), printed


def report(step: int, **changes: object) -> StageProgress:
    told = {
        "phase": "running",
        "step": step,
        "total": 400,
        "metrics": {"loss": 0.6123},
        "started": 0.0,
        "updated": 1.0,
    }
    return StageProgress.model_validate({**told, **changes})


def test_every_status_and_action_has_a_colour() -> None:
    statuses = {*StageStatus.__args__, *RunStatus.__args__}  # type: ignore[attr-defined]
    assert statuses | {"reuse", "resume", "run", "wait", "interrupted"} <= set(STYLES)


def test_the_facts_of_a_running_stage() -> None:
    told = facts_of(report(120, tokens_per_second=21034.4, seconds_left=252.0))
    assert told == "120/400  4 min left  loss 0.6123  21,034 tokens/s"
    chosen = report(3, headline="score", metrics={"loss": 1.0, "score": None})
    assert facts_of(chosen) == "3/400  score undefined"


def test_a_running_stage_shows_what_it_does_within_its_step() -> None:
    sampling = report(
        3, phase="sampling", phase_done=120, phase_total=256, phase_note="token 37 of 72", metrics={}
    )
    assert facts_of(sampling) == "3/400  sampling 120/256, token 37 of 72"
    assert facts_of(report(3, phase="updating", phase_done=1, phase_total=8)) == (
        "3/400  updating 1/8  loss 0.6123"
    )
    assert facts_of(report(0, total=0, phase="loading", metrics={})) == "loading"


@pytest.mark.parametrize(
    "seconds, said",
    [(4.4, "4 s"), (89, "89 s"), (91, "2 min"), (3 * 3600 + 20 * 60, "3 h 20 min"), (89.4 * 60, "89 min")],
)
def test_a_length_of_time_is_told_in_two_figures(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_bar_of_slow_iterations_tells_time_left_at_any_width() -> None:
    """An iteration takes 45 s. The time column of rich would show nothing, since it forgets steps after 30 s."""
    for width in (80, 160):
        printed = io.StringIO()
        screen = Screen(Console(file=printed, width=width, force_terminal=True))
        with screen.live():
            screen.started("policy", 1)
            slow = report(
                3,
                total=14,
                phase="sampling",
                phase_done=120,
                phase_total=256,
                phase_note="token 37 of 72",
                seconds_left=495.0,
                tokens_per_second=5000.0,
            )
            screen.progressed("policy", slow)
            screen._bars.refresh()
        assert "3/14  8 min left  sampling 120/256, token 37 of" in printed.getvalue()
        lines = [
            re.sub("\x1b[^a-zA-Z]*[a-zA-Z]", "", line) for line in re.split("[\\r\\n]", printed.getvalue())
        ]
        assert max(map(len, lines)) <= width


def test_the_headline_is_what_the_gates_ask_for() -> None:
    verdict = check_gate(Gate(metric="pair_accuracy", at_least=0.75), {"pair_accuracy": 0.8125, "bias": 3.0})
    gated = StageRecord(metrics={"bias": 3.0, "pair_accuracy": 0.8125}, verdicts=(verdict,))
    assert headline_of(gated) == "pair_accuracy 0.8125"
    assert headline_of(StageRecord(metrics={"train_rows": 19210.0})) == "train_rows 19,210"


def test_a_stage_without_a_terminal_is_said_in_lines() -> None:
    screen, printed = plain()
    with screen.live():
        screen.started("sft", 1)
        screen.progressed("sft", report(1))
        screen.ended(
            "sft", StageRecord(status="completed", digest="a" * 64, metrics={"test_nll": 0.5}, seconds=57.3)
        )
        screen.started("policy", 2)
    lines = printed.getvalue().splitlines()
    assert lines[0] == "  sft: started"
    assert lines[1].split() == ["✓", "sft", "completed", "test_nll", "0.5", "57.3", "s"]
    assert lines[2] == "  policy: started, attempt 2"
    assert "\x1b" not in printed.getvalue()


def test_the_same_facts_are_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vantage.runs.console.PLAIN_LINE_SECONDS", 0.0)
    screen, printed = plain()
    screen.started("sft", 1)
    for step in (1, 1, 2, 2):
        screen.progressed("sft", report(step))
    assert printed.getvalue().splitlines() == [
        "  sft: started",
        "  sft: 1/400  loss 0.6123",
        "  sft: 2/400  loss 0.6123",
    ]


def test_a_terminal_shows_a_bar_that_goes_when_the_stage_ends() -> None:
    printed = io.StringIO()
    screen = Screen(Console(file=printed, width=120, force_terminal=True))
    with screen.live():
        screen.started("sft", 1)
        screen.progressed("sft", report(100, tokens_per_second=5000.0))
        screen._bars.refresh()
        assert "100/400" in printed.getvalue()
        assert "5,000 tokens/s" in printed.getvalue()
        screen.ended("sft", StageRecord(status="completed", digest="a" * 64))
        assert not screen._bars.tasks


def test_a_verdict_is_green_or_red() -> None:
    printed = io.StringIO()
    screen = Screen(Console(file=printed, width=120, force_terminal=True, color_system="standard"))
    for measured, colour in ((0.2, "\x1b[31m"), (0.4, "\x1b[32m")):
        verdict = check_gate(
            Gate(metric="explained_variance", at_least=0.3), {"explained_variance": measured}
        )
        screen.ended("value", StageRecord(status="completed", verdicts=(verdict,)))
        assert f"{colour}explained_variance {measured:.3f} >= 0.3" in printed.getvalue()


def test_a_plan_says_each_reason_and_every_drift() -> None:
    printed = io.StringIO()
    steps = [
        PlannedStep("sft", "sft", "reuse", reasons=("made by run 7",), drift=("torch: 2.11.0 → 2.13.0",)),
        PlannedStep("reward", "reward_model", "resume", reasons=("attempt 1 was interrupted",), at_step=50),
    ]
    show_plan(Console(file=printed, width=120), steps, heading="quickstart", warnings=["stages.policy: odd"])
    text = printed.getvalue()
    assert text.startswith("quickstart\n")
    assert "drift: torch: 2.11.0 → 2.13.0" in text
    assert "resume at 50" in text
    assert "warning: stages.policy: odd" in text


def test_text_of_a_model_is_never_taken_for_markup() -> None:
    screen, printed = plain()
    screen.samples(
        [{"prompt": "[red]1+1?[/red]", "baseline": "[/]", "candidate": "2", "candidate_judgement": 1.0}]
    )
    assert "[red]1+1?[/red]" in printed.getvalue()
    assert "[/]" in printed.getvalue()


@pytest.mark.parametrize(
    "name", ["[/x]", "[red]a[/red]", "[link=https://example.org]a", "a :bug: b", "\\[x]", "[", "[/]"]
)
def test_a_name_with_brackets_is_shown_as_it_is(name: str) -> None:
    """A deployment may have such a name; Rich would raise an error for the first one."""
    printed = io.StringIO()
    console = open_console(printed)
    show_table(console, [{"name": name, "pool": name}])
    console.print(f"kept: {name}", soft_wrap=True)
    table, line = printed.getvalue().rpartition("kept: ")[::2]
    assert table.count(f" {name} ") == 2
    assert line == f"{name}\n"


def test_what_was_left_out_and_warnings_stand_at_the_stages_end_at_the_runs_end_and_in_status(
    recipe_file: Path,
) -> None:
    stage = StageRecord(
        status="completed",
        metrics={"pair_accuracy": 0.8},
        left_out="137 prompts too long (52 %)",
        warnings=("52 % of the rows were left out",),
    )
    record = RunRecord(
        run_id="0001-small-abcdef",
        number=1,
        recipe_digest="0" * 64,
        recipe=load_resolved(recipe_file)[0],
        source="small.yaml",
        stages={"reward": stage},
        started="",
    )
    screen, printed = plain()
    screen.ended("reward", stage)
    lines = printed.getvalue().splitlines()
    assert lines[1:3] == [
        "      left out: 137 prompts too long (52 %)",
        "      warning: 52 % of the rows were left out",
    ]
    screen, printed = plain()
    show_result(screen.console, record, models={}, pages={}, commands={})
    assert "warning: reward: 52 % of the rows were left out" in printed.getvalue()
    screen, printed = plain()
    view = RunState(record, interrupted=False, progress={})
    show_run(screen.console, view)
    assert "reward: left out: 137 prompts too long (52 %)" in printed.getvalue()
    assert "warning: reward: 52 % of the rows were left out" in printed.getvalue()
    told = view.as_json()["stages"]["reward"]
    assert (told["left_out"], told["warnings"]) == (stage.left_out, list(stage.warnings))


def test_nothing_in_a_text_steers_the_terminal() -> None:
    """Only the console's own control codes reach the terminal; without these no control character is left."""
    attack = "x\x1b[2J\x1b]0;title\x07\x9b31m\r\u202eevil\x08"
    printed = io.StringIO()
    screen = Screen(open_console(printed))
    screen.say(attack)
    screen.samples([{"prompt": attack, "baseline": attack, "candidate": attack, "baseline_judgement": 1.0}])
    stage = StageRecord(status="failed", reason=attack, metrics={attack: 1.0})
    screen.ended(attack, stage)
    step = PlannedStep(attack, attack, "run", reasons=(attack,), drift=(attack,))
    show_plan(screen.console, [step], heading=attack, warnings=[attack])
    told = printed.getvalue()
    assert told.count("\\u001b[2J") >= 8
    assert {c for c in told if not c.isprintable()} == {"\n"}


def test_a_terminal_still_gets_our_own_colours() -> None:
    printed = io.StringIO()
    console = PipeSafeConsole(file=printed, force_terminal=True, color_system="standard", width=80)
    console.print(Text("fine\x1b[2J", style="green"))
    assert printed.getvalue() == "\x1b[32mfine\\u001b[2J\x1b[0m\n"


@pytest.mark.parametrize("shown", ["the end of a run", "its status"])
def test_the_line_of_a_failed_run_has_its_reason(shown: str, recipe_file: Path) -> None:
    stages = {
        "sft": StageRecord(status="completed"),
        "reward": StageRecord(status="blocked", reason="reads policy, which is failed"),
        "policy": StageRecord(status="failed", reason="row 7 has no prompt; remove it (a.log)", exit_code=65),
        "value": StageRecord(status="resumable", reason="stopped after step 4"),
    }
    record = RunRecord(
        run_id="0001-fake",
        number=1,
        recipe_digest="0" * 64,
        recipe=load_resolved(recipe_file)[0],
        source="fake.yaml",
        status="failed",
        stages=stages,
        started="now",
    )
    screen, printed = plain()
    if shown == "its status":
        show_run(screen.console, RunState(record, interrupted=False, progress={}))
    else:
        show_result(screen.console, record, models={}, pages={}, commands={})
    lines = printed.getvalue().splitlines()
    [number] = [number for number, line in enumerate(lines) if line.startswith("run 0001-fake failed")]
    assert lines[number] == (
        "run 0001-fake failed: policy failed: row 7 has no prompt; remove it (a.log); exit code 65"
    )
    assert lines[number + 1] == "  value resumable: stopped after step 4"
    assert number == 0 or shown != "its status"


def test_a_notice_is_printed_once_beside_the_firings() -> None:
    screen, printed = plain()
    for step in (0, 1):
        screen.progressed("policy", report(step, notices=("the judge may be wrong",)))
    screen.progressed("policy", report(2, notices=("the judge may be wrong",), firings=("guard loss",)))
    lines = printed.getvalue().splitlines()
    assert lines.count("  policy: the judge may be wrong") == 1
    assert lines.count("  policy: guard loss") == 1
