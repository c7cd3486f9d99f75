"""With ``--until`` and ``--only`` a part of a recipe runs, and the whole recipe later reuses what it made."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.orchestrated import events
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import RUN_STAGE

pytestmark = pytest.mark.slow


@pytest.fixture
def vantage(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, prefect_url: str
) -> Any:
    """Run a command on the recipe with fake stages in place; returns its result."""
    import vantage.flows.execution as execution

    real = execution.execute
    monkeypatch.setattr(
        execution,
        "execute",
        lambda *values, **named: real(*values, **named, stage_function="tests.support.fake_work.run_stage"),
    )
    assert RUN_STAGE

    def call(command: str, *options: str) -> Any:
        return CliRunner().invoke(
            app, [command, str(recipe_file), "--workspace", str(workspace.root), *options]
        )

    return call


def started(workspace: Workspace) -> list[str]:
    """Return the steps that were computed, in their order."""
    return [line.split()[0] for line in events(workspace) if "started" in line]


def test_the_whole_reuses_what_a_part_has_made(vantage: Any, workspace: Workspace) -> None:
    planned = json.loads(vantage("plan", "--until", "reward", "--json").stdout)
    assert [step["name"] for step in planned["steps"]] == [
        *("model", "data.demonstrations", "data.preferences", "sft", "reward"),
    ]
    done = vantage("run", "--until", "reward")
    assert done.exit_code == 0, done.output
    [part] = read_runs(workspace)
    assert (part.status, part.part) == ("completed", "until reward")
    assert list(part.stages) == [step["name"] for step in planned["steps"]]
    assert f"{part.run_id} · until reward" in done.output
    computed = started(workspace)

    refused = vantage("run", "--only", "policy")
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert "data.prompts, value would have to be computed before; use --until policy" in refused.stderr
    assert len(read_runs(workspace)) == 1, "it was refused before there was a run"

    alone = vantage("run", "--only", "reward", "--set", "stages.reward.epochs=3")
    assert alone.exit_code == 0, alone.output
    assert len(started(workspace)) == len(computed) + 1, "the stage alone"

    whole = vantage("run")
    assert whole.exit_code == 0, whole.output
    newest = read_runs(workspace)[0]
    assert newest.part is None
    assert {name: newest.stages[name].status for name in part.stages} == dict.fromkeys(part.stages, "reused")
    assert {name: newest.stages[name].digest for name in part.stages} == {
        name: stage.digest for name, stage in part.stages.items()
    }
    assert newest.stages["policy"].status == "completed"


def test_what_is_no_part_is_refused(vantage: Any, workspace: Workspace) -> None:
    for options, message in (
        (("--until", "nothing"), "--until=nothing is none of the recipe's stages: sft,"),
        (("--until", "sft", "--only", "sft"), "exclude each other"),
    ):
        for command in ("plan", "run"):
            refused = vantage(command, *options)
            assert refused.exit_code == ExitCode.BAD_INPUT
            assert message in refused.stderr
    assert not workspace.root.exists()
