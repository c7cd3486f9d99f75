"""The end of a run shows what came out, where to look and what to do next, once each, on terminals of 80 and 160 columns."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from vantage.runs.console import SafeConsole
from vantage.runs.record import RunRecord, StageRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.shown_result import show_result

FOLDER = f"/home/somebody/projects/arithmetic/.vantage/store/objects/{'c0ffee' * 10}"
COMMAND = "vantage export 0001-fake-abcdef FOLDER --workspace /home/somebody/projects/arithmetic/.vantage"
STEPS = [
    "value did not pass explained_variance >= 0.3. What can be done:",
    "  1. train it otherwise: stages.value.epochs=2. model, sft are reused; value, policy run again:",
    f"      {COMMAND.replace('export', 'run')}",
]


def shown(recipe_file: Path, width: int, stages: dict[str, StageRecord]) -> str:
    """Return what a terminal of this width gets."""
    record = RunRecord(
        run_id="0001-fake-abcdef",
        number=1,
        recipe_digest="0" * 64,
        recipe=load_resolved(str(recipe_file))[0],
        source=str(recipe_file),
        overrides=(),
        started="2026-01-01 00:00:00",
        status="gate_closed",
        stages=stages,
    )
    printed = io.StringIO()
    console: Console = SafeConsole(file=printed, width=width, force_terminal=True, color_system=None)
    show_result(
        console,
        record,
        pages={"report": f"{FOLDER}/report.html"},
        models={"sft": Path(FOLDER)},
        commands={"export": COMMAND},
        next_steps=STEPS,
    )
    return printed.getvalue()


@pytest.fixture
def stages() -> dict[str, StageRecord]:
    done = StageRecord(status="completed", seconds=1.5, digest="d" * 64, metrics={"train_rows": 91.0})
    return {
        "model": done,
        "data.demonstrations": done.model_copy(update={"status": "reused", "seconds": 0.0}),
        "data.preferences": StageRecord(status="failed", reason="row 7 has no prompt", exit_code=65),
        "sft": done.model_copy(update={"metrics": {"test_nll": 0.25}}),
        "value": done.model_copy(update={"status": "gate_closed"}),
    }


@pytest.mark.parametrize("width", [80, 160])
def test_paths_and_commands_are_whole_and_begin_a_line_of_their_own_where_they_must(
    recipe_file: Path, stages: dict[str, StageRecord], width: int
) -> None:
    lines = shown(recipe_file, width, stages).splitlines()
    for text in (f"{FOLDER}/report.html", FOLDER, COMMAND):
        [line] = [line for line in lines if line.endswith(text)]
        assert len(line) <= width or line.strip() == text
    assert STEPS[-1] in lines
    prose = [line for line in lines if not {"/home", "vantage"} & set(re.findall(r"/home|vantage", line))]
    assert all(len(line) <= width for line in prose)


def test_it_ends_with_outcomes_then_places_then_next_steps(
    recipe_file: Path, stages: dict[str, StageRecord]
) -> None:
    """The last lines have the outcomes, then the places, then the next steps."""
    told = shown(recipe_file, 160, stages)
    places = [
        told.index(text)
        for text in ("run 0001-fake-abcdef gate closed", "where to look", "what to do next", STEPS[0])
    ]
    assert places == sorted(places)
    assert told.splitlines()[-1] == STEPS[-1]


def test_inputs_have_one_row_and_one_that_failed_has_its_own(
    recipe_file: Path, stages: dict[str, StageRecord]
) -> None:
    rows = [line.split() for line in shown(recipe_file, 160, stages).splitlines()]
    assert ["inputs", "ready", "model,", "data.demonstrations", "1.5"] in rows
    assert ["data.preferences", "failed"] in rows
    told = shown(recipe_file, 160, stages)
    assert "train_rows" not in told.partition("value ")[0], "what the stage's own line has already"
    all_made = {**stages, "data.demonstrations": stages["model"]}
    assert ["inputs", "completed", "model,", "data.demonstrations", "3.0"] in [
        line.split() for line in shown(recipe_file, 160, all_made).splitlines()
    ]
