"""The contents of run.json are checked against the artifacts: metrics as they are, verdicts computed again."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.runs.contradictions import _made_again, contradictions
from vantage.runs.run import read_run
from vantage.runs.status import run_state
from vantage.runs.view import Replaced
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.usefixtures("unsent")


@pytest.fixture
def finished(workspace: Workspace, recipe_file: Path) -> tuple[Workspace, str]:
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
    return workspace, orchestrator.run.record.run_id


def contradictions_of(workspace: Workspace, run_id: str) -> list[str]:
    record = read_run(workspace, run_id)
    view = run_state(workspace, record)
    assert view.as_json()["contradictions"] == list(view.contradictions) == contradictions(workspace, record)
    return contradictions(workspace, record)


def edit(workspace: Workspace, run_id: str, stage: str, *path: str | int, value: Any) -> None:
    file = workspace.folder(run_id) / "run.json"
    run = json.loads(file.read_bytes())
    place = run["stages"][stage]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    file.write_text(json.dumps(run))


def test_a_run_as_it_was_written_is_borne_out(finished: tuple[Workspace, str]) -> None:
    assert contradictions_of(*finished) == []


def test_an_edited_metric_is_named(finished: tuple[Workspace, str]) -> None:
    edit(*finished, "evaluation", "metrics", "accuracy_gain", value=0.9)
    assert contradictions_of(*finished) == [
        "evaluation: metrics.accuracy_gain is 0.9, metrics.json of the artifact says 0.1"
    ]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("passed", False, "“accuracy_gain 0.100 >= 0: CLOSED”, but the artifact says “accuracy_gain 0.100 >= 0: passed”"),
        ("measured", 0.9, "“accuracy_gain 0.900 >= 0: passed”, but the artifact says “accuracy_gain 0.100 >= 0: passed”"),
        ("threshold", -1.0, "“accuracy_gain 0.100 >= -1: passed”, but the artifact says"),
    ],
)  # fmt: skip
def test_an_edited_verdict_is_named(
    finished: tuple[Workspace, str], field: str, value: Any, said: str
) -> None:
    edit(*finished, "evaluation", "verdicts", 0, field, value=value)
    [found] = contradictions_of(*finished)
    assert found.startswith(f"evaluation: the verdict is recorded as {said}")


def test_a_verdict_that_was_taken_out_is_missed(finished: tuple[Workspace, str]) -> None:
    edit(*finished, "evaluation", "verdicts", value=[])
    assert contradictions_of(*finished) == ["evaluation: run.json has 0 verdicts, the recipe 1 gates"]


def test_a_pass_of_a_model_compared_with_itself_is_not_borne_out(
    workspace: Workspace, recipe_file: Path
) -> None:
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / "idle.txt").write_text("policy")
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
    run_id = orchestrator.run.record.run_id
    assert contradictions_of(workspace, run_id) == []
    edit(workspace, run_id, "evaluation", "verdicts", 0, "passed", value=True)
    assert len(contradictions_of(workspace, run_id)) == 1


def test_an_artifact_that_is_gone_or_edited_cannot_bear_anything_out(finished: tuple[Workspace, str]) -> None:
    workspace, run_id = finished
    digest = read_run(workspace, run_id).stages["reward"].digest
    file = workspace.store / "objects" / str(digest) / "metrics.json"
    file.chmod(0o644)
    file.write_text(file.read_text().replace("0.8", "0.9"))
    [found] = contradictions_of(workspace, run_id)
    assert found.startswith("reward: what was measured cannot be looked up: metrics.json: sha256 is")


def test_an_artifact_that_was_made_again_with_other_bits_says_nothing_of_the_run_before(
    finished: tuple[Workspace, str],
) -> None:
    workspace, run_id = finished
    stage = read_run(workspace, run_id).stages["reward"]
    ref = workspace.store / "refs" / f"{stage.stage_key}.json"
    ref.write_text(ref.read_text().replace(str(stage.digest), "f" * 64))
    shutil.rmtree(workspace.store / "objects" / str(stage.digest))
    assert contradictions_of(workspace, run_id) == []


def test_status_ends_with_the_code_of_damage_where_the_run_is_not_borne_out(
    finished: tuple[Workspace, str],
) -> None:
    workspace, run_id = finished
    arguments = ["status", run_id, "--workspace", str(workspace.root)]
    assert CliRunner().invoke(app, arguments).exit_code == ExitCode.OK
    edit(workspace, run_id, "evaluation", "metrics", "accuracy_gain", value=0.9)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == ExitCode.STORAGE
    assert "accuracy_gain is 0.9" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("is_there", "is_replaced", "expected"), [(True, True, False), (False, True, True), (False, False, False)]
)
def test_what_was_made_again_and_is_still_there_is_compared(
    is_there: bool, is_replaced: bool, expected: bool
) -> None:
    """Another run may have made other bits of it, and the store has both."""
    ref: Any = "the other one"
    found = Replaced("made again", ref) if is_replaced else ref
    place: Any = SimpleNamespace(storage=SimpleNamespace(has_object=lambda digest: is_there))
    run: Any = SimpleNamespace(ref=lambda step: found)
    assert _made_again(place, run, "sft", "d" * 64) is expected
