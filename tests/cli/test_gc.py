"""`vantage gc` works as a user calls it."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.flows.test_garbage_collection import make, stage_of, write_run
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.gc import _seconds
from vantage.cli.main import app
from vantage.runs.workspace import Workspace
from vantage.storage.removed import find_removed
from vantage.storage.store import Store


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path)
    store = Store(workspace.store)
    write_run(workspace, 1, stages=stage_of(make(store, 1, 1, {})))
    write_run(workspace, 2, stages=stage_of(make(store, 2, 2, {})))
    return workspace


def gc(workspace: Workspace, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["gc", "--workspace", str(workspace.root), *options])
    return result.exit_code, result.output


def test_a_dry_run_says_what_goes_and_how_many_bytes(workspace: Workspace) -> None:
    size = sum(path.stat().st_size for path in next((workspace.store / "objects").iterdir()).iterdir())
    code, output = gc(workspace, "--dry-run", "--keep-last", "1")
    assert code == 0
    assert "0001-quickstart-000001" in output
    assert f"3 would be removed, {size:,} bytes" in output
    assert len(Store(workspace.store).stage_keys()) == 2
    code, output = gc(workspace, "--keep-last", "1")
    assert f"3 removed, {size:,} bytes" in output
    assert len(Store(workspace.store).stage_keys()) == 1
    assert "0 removed, 0 bytes" in gc(workspace, "--keep-last", "1")[1]


def test_json_is_one_value(workspace: Workspace) -> None:
    code, output = gc(workspace, "--keep-last", "0", "--json")
    found = json.loads(output)
    assert code == 0
    assert [each["kind"] for each in found["removed"]] == ["run", "run", "ref", "ref", "object", "object"]
    assert found["bytes"] == sum(each["num_bytes"] for each in found["removed"])
    assert found["in_use"] == found["unsent"] == []


def test_what_is_removed_is_still_known(workspace: Workspace) -> None:
    store = Store(workspace.store)
    [key] = [key for key in store.stage_keys() if (ref := store.find(key)) and ref.key_parts == {"n": 1}]
    ref = store.find(key)
    assert ref is not None
    _, output = gc(workspace, "--keep-last", "1", "--older-than", "0m")
    removal = find_removed(store, ref.artifact.digest)
    assert removal is not None
    assert removal.refs == (ref,)
    assert removal.why.endswith("needed it (vantage gc --keep-last 1 --older-than 0s)")
    assert " on " in removal.by
    assert datetime.fromisoformat(removal.when).tzinfo is not None
    size = sum(path.stat().st_size for path in (workspace.store / "removed").rglob("*.json"))
    assert f"kept of 1 removed artifact: manifest, metrics and refs, {size:,} bytes" in output
    assert json.loads(gc(workspace, "--json")[1])["records"] == {"artifacts": 1, "bytes": size}


@pytest.mark.parametrize("age", ["30", "d", "-1d", "30 days", "30days", "1w"])
def test_what_is_no_age_is_refused(workspace: Workspace, age: str) -> None:
    code, output = gc(workspace, f"--older-than={age}")
    assert code == ExitCode.BAD_INPUT
    assert f"--older-than='{age}' is no age; write days, hours or minutes, such as 30d, 12h or 45m" in output


@pytest.mark.parametrize(
    ("age", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("45m", 2_700), ("0.5h", 1_800), ("0m", 0)]
)
def test_an_age_is_counted_in_seconds(age: str, seconds: float) -> None:
    assert _seconds(age) == seconds


def test_a_young_run_stays_and_zero_age_is_any(workspace: Workspace) -> None:
    assert "0 removed" in gc(workspace, "--older-than", "1d")[1]
    assert "6 removed" in gc(workspace, "--older-than", "0m")[1]


def test_a_run_that_cannot_be_read_stops_it(workspace: Workspace) -> None:
    (workspace.folder("0001-quickstart-000001") / "run.json").write_text("{")
    code, output = gc(workspace)
    assert code == ExitCode.BAD_INPUT
    assert "nothing is removed" in output
    assert len(Store(workspace.store).stage_keys()) == 2
