"""``vantage ui`` shows a workspace's own records, and ends the servers that it started."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixtures import ROOT
from tests.support.fork_server import WITH_PREFECT
from tests.support.real_runs import run_recipe, wait_for
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import GROUPS, app
from vantage.runs.workspace import Workspace


def test_every_command_has_one_heading() -> None:
    listed = [command.__name__ for commands in GROUPS.values() for command in commands]
    assert sorted(listed) == sorted(set(listed))
    assert {each.rich_help_panel for each in (*app.registered_commands, *app.registered_groups)} == set(
        GROUPS
    )
    assert all(len(commands) < 10 for commands in GROUPS.values())


def start(workspace: Path, popen: "Callable[..., subprocess.Popen[str]]") -> "subprocess.Popen[str]":
    named = {"PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in named}
    return popen(
        [sys.executable, "-m", "vantage", "ui", "--workspace", str(workspace)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def asked(address: str, content: dict[str, Any]) -> Any:
    """Return a server's answer to a POST of JSON."""
    request = urllib.request.Request(
        address, json.dumps(content).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5)
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_both_pages_show_the_run_until_ctrl_c(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    workspace = Workspace(tmp_path / "workspace")
    record, _ = run_recipe(workspace, recipe_file)
    process = start(workspace.root, WITH_PREFECT.popen)
    try:
        assert process.stdout is not None
        pages = dict(process.stdout.readline().split() for _ in range(3))
        assert list(pages) == ["MLflow", "Prefect", "compare"]
        compared = pages.pop("compare")
        assert all(re.fullmatch(r"http://127[.]0[.]0[.]1:\d+", address) for address in pages.values())
        found = asked(f"{pages['MLflow']}/ajax-api/2.0/mlflow/experiments/search", {"max_results": 10})
        assert "fake" in [each["name"].rpartition("/")[2] for each in found["experiments"]]
        of_recipe = [each["experiment_id"] for each in found["experiments"] if each["name"].endswith("fake")]
        assert compared.startswith(f"{pages['MLflow']}/#/experiments/{of_recipe[0]}/runs?")
        flow_runs = asked(f"{pages['Prefect']}/api/flow_runs/filter", {})
        assert [each["id"] for each in flow_runs] == list(record.prefect_flow_run_ids)
        assert answers(pages["Prefect"]), "the page itself"
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
        wait_for(lambda: not any(map(answers, pages.values())), 30)
    finally:
        process.kill()


def test_a_workspace_without_runs_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path / "workspace", subprocess.Popen)
    _, said = process.communicate(timeout=120)
    assert process.returncode == ExitCode.BAD_INPUT
    assert "no run is recorded in" in said
    assert not (tmp_path / "workspace").exists()
