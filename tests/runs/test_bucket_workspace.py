"""Several machines see, resume and take over the same runs of a workspace in a bucket."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from obstore.exceptions import PermissionDeniedError

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.flows.shown_plan import ledger_warnings
from vantage.runs.bucket_records import BucketRecords
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run, acquire_run_by_id, dead_runs, is_active, read_runs
from vantage.runs.run_ids import run_ids
from vantage.runs.status import run_state
from vantage.runs.workspace import RunError, Workspace
from vantage.storage.leases import RemoteLeases

pytestmark = pytest.mark.usefixtures("unsent")

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 2.0

Machine = Callable[[], Workspace]


@pytest.fixture
def machine(bucket: str, tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return the workspace as one more machine sees it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    monkeypatch.setattr("vantage.storage.leases.LEASE_SECONDS", LEASE_SECONDS)
    numbers = iter(range(9))

    def opened() -> Workspace:
        monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / f"machine-{next(numbers)}"))
        return Workspace.at(bucket)

    return opened


@pytest.mark.slow
def test_a_run_goes_on_on_another_machine_and_makes_what_a_folder_makes(
    machine: Machine, recipe_file: Path, workspace: Workspace
) -> None:
    here = machine()
    with orchestrated(here, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="value")
    [begun] = read_runs(here)

    there = machine()
    assert there.root != here.root
    [seen] = read_runs(there)
    assert seen == begun
    with orchestrated(there, recipe_file) as orchestrator:
        assert orchestrator.run.record.run_id == begun.run_id
        ended = attempt_all(orchestrator)
        orchestrator.end()
    assert ended["sft"].status == "reused"
    assert ended["policy"].status == "completed"

    with orchestrated(workspace, recipe_file) as orchestrator:
        expected = attempt_all(orchestrator)
    assert {step: stage.digest for step, stage in ended.items()} == {
        step: stage.digest for step, stage in expected.items()
    }
    view = run_state(machine(), read_runs(there)[0], verify=True)
    assert (view.status, view.contradictions, view.damage) == ("completed", (), {})


@pytest.mark.slow
def test_the_outbox_of_the_ledger_goes_along(machine: Machine, recipe_file: Path) -> None:
    here = machine()
    with orchestrated(here, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="sft")
    [record] = read_runs(here)
    outbox = Path("ledger") / "outbox.jsonl"
    told = (here.folder(record.run_id) / outbox).read_bytes()
    assert told.count(b"\n") > 3
    there = machine()
    with acquire_run_by_id(there, record.run_id) as run:
        assert (run.folder / outbox).read_bytes() == told


def test_a_run_that_lives_is_left_alone_and_another_begins(machine: Machine, recipe_file: Path) -> None:
    recipe, _ = load_resolved(str(recipe_file), [])
    here, there = machine(), machine()
    with acquire_run(here, recipe, source="fake") as run:
        assert is_active(there, run.record.run_id)
        with (
            pytest.raises(RunError, match="being driven by another process"),
            acquire_run_by_id(there, run.record.run_id),
        ):
            pass
        with acquire_run(there, recipe, source="fake") as other:
            assert other.record.run_id != run.record.run_id
            assert other.record.number == 2
    assert not is_active(there, run.record.run_id)
    assert run_ids(there) == run_ids(here)


def test_a_run_that_died_long_ago_is_shown_so_at_once_and_waited_for_only_where_that_is_unknown(
    machine: Machine, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _ = load_resolved(str(recipe_file), [])
    here, there = machine(), machine()
    now = BucketRecords._now
    asked: list[str] = []

    def is_held(leases: RemoteLeases, path: str) -> bool:
        asked.append(path)
        return True

    with acquire_run(here, recipe, source="fake") as run:
        run_id, seconds = run.record.run_id, LEASE_SECONDS
        monkeypatch.setattr(RemoteLeases, "is_held", is_held)
        assert is_active(there, run_id)
        assert asked == [f"leases/{run_id}.json"]
        monkeypatch.setattr(
            BucketRecords, "_now", lambda self: now(self) + timedelta(seconds=2 * seconds + 5)
        )
        assert not is_active(there, run_id)
        assert len(asked) == 1, "the bucket's own clock says enough"

        def refused(self: BucketRecords) -> datetime:
            raise PermissionDeniedError("this key may only read")

        monkeypatch.setattr(BucketRecords, "_now", refused)
        assert is_active(there, run_id)
        assert len(asked) == 2


def test_a_killed_process_is_taken_over_when_its_lease_ends_and_may_write_no_more(
    machine: Machine, recipe_file: Path
) -> None:
    recipe, _ = load_resolved(str(recipe_file), [])
    there = machine()
    program = (
        "import time, vantage.storage.leases; vantage.storage.leases.LEASE_SECONDS = 2.0\n"
        "from vantage.runs.run import acquire_run; from vantage.runs.resolving import load_resolved\n"
        "from vantage.runs.workspace import Workspace; import sys\n"
        "with acquire_run(Workspace.at(sys.argv[1]), load_resolved(sys.argv[2])[0], source='fake') as run:\n"
        "    print(run.record.run_id, flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(there.uri), str(recipe_file)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        run_id = process.stdout.readline().strip()
        assert is_active(there, run_id)
        assert [dead.record.run_id for dead in dead_runs(there)] == []
        os.kill(process.pid, signal.SIGSTOP)  # a machine that hangs, and comes back
        with acquire_run(there, recipe, source="fake") as run:
            assert run.record.run_id == run_id
            stale = machine()
            run.update(status="failed")
            with pytest.raises(RunError, match="taken over by another process"):
                stale.records.write(run.record.model_copy(update={"status": "running"}))
    finally:
        process.kill()
        process.communicate()


def test_a_record_that_cannot_be_read_is_told(machine: Machine, recipe_file: Path) -> None:
    import obstore

    from vantage.runs.run import damaged_runs
    from vantage.storage.bucket import open_bucket

    recipe, _ = load_resolved(str(recipe_file), [])
    here = machine()
    with acquire_run(here, recipe, source="fake") as run:
        pass
    path = f"{run.record.run_id}/run.json"
    obstore.put(open_bucket(f"{here.uri}/runs"), path, b"{")
    [told] = damaged_runs(machine())
    assert run.record.run_id in told
    assert "cannot be read" in told


def test_a_ledger_that_other_machines_do_not_see_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    [warning] = ledger_warnings(Workspace.at("s3://team/rlhf"))
    assert warning.startswith(
        "MLFLOW_TRACKING_URI is not set: MLflow's records of this run are on this machine alone"
    )
    assert ledger_warnings(Workspace.at(tmp_path)) == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert ledger_warnings(Workspace.at("s3://team/rlhf")) == []


def test_a_bucket_that_is_not_there_is_to_be_created_first(machine: Machine, recipe_file: Path) -> None:
    machine()
    absent = Workspace.at("s3://no-such-bucket/runs")
    with (
        pytest.raises(RunError, match=r"workspace s3://no-such-bucket/runs: .*; create the bucket first"),
        orchestrated(absent, recipe_file),
    ):
        pass


def test_an_address_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="write s3://BUCKET/PREFIX"):
        read_runs(Workspace.at("ftp://host/runs"))
