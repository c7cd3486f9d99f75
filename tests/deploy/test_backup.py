"""A backup is made in the middle of a pipeline; then everything is destroyed and restored, and the pipeline goes on."""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from tests.deploy.conftest import Place, Servers, rows_of
from tests.support.real_runs import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def interrupted_and_restored(
    place: Place,
    *,
    early: Callable[[], None] = lambda: None,
    destroy_servers: Callable[[], None] = lambda: None,
    before_restore: Callable[[], None] = lambda: None,
) -> None:
    """Save while ``reward`` runs, kill the run, destroy all, restore. ``early`` is called while ``sft`` runs."""
    place.workspace.mkdir(parents=True)
    (place.workspace / "seconds.txt").write_text("0.5")
    run = place.begin("run", str(place.recipe))
    wait_for(lambda: any("sft started" in line for line in place.events()))
    wait_for(lambda: place.has_checkpoint("sft"))
    # reward takes eight seconds after its checkpoint: it must not end before it is saved
    (place.workspace / "seconds.txt").write_text("1.0")
    early()
    wait_for(lambda: any("reward started" in line for line in place.events()))
    wait_for(lambda: place.has_checkpoint("reward"))
    saved = place.backs_up("save", "--to", str(place.backup), *place.stores)
    assert saved.returncode == 0, saved.stderr
    assert run.poll() is None, "the run goes on while it is saved"
    wait_for(lambda: any("value started" in line for line in place.events()))  # MLflow is ahead of the backup
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    destroy_servers()
    shutil.rmtree(place.workspace)
    before_restore()
    restored = place.backs_up("restore", "--from", str(place.backup), *place.stores)
    assert restored.returncode == 0, restored.stderr
    assert "value started" not in " ".join(place.events()), "the workspace is that of the backup"


def check_goes_on(place: Place, expected: dict[str, str]) -> None:
    """Check that the restored run ends with the digests of one that was never interrupted, and that its audit passes."""
    (place.workspace / "seconds.txt").write_text("0")
    run_id = str(place.record()["run_id"])
    place.vantage("resume", run_id)
    assert place.digests() == expected
    started = Counter(line.split()[0] for line in place.events() if " started " in line)
    assert started["sft"] == 1, "what was complete is not made again"
    assert started["reward"] == 2, "what was under way goes on"
    printed = place.vantage("audit", run_id)
    assert "wrong" not in printed, printed


def test_a_workspace_with_its_own_databases_of_which_mlflows_is_much_older(
    tmp_path: Path, expected: dict[str, str], whole: Place
) -> None:
    place = Place(tmp_path, {}, None)
    older = tmp_path / "older"

    def save_early() -> None:
        saved = place.backs_up("save", "--to", str(older), *place.stores)
        assert saved.returncode == 0, saved.stderr

    def as_if_the_backup_took_long() -> None:
        shutil.copy(older / "workspace" / "mlflow.db", place.backup / "workspace" / "mlflow.db")

    interrupted_and_restored(place, early=save_early, before_restore=as_if_the_backup_took_long)
    restored = rows_of(place)
    assert not [row for row in restored if "reward" in row[0]], "it knows nothing of the later stage"
    check_goes_on(place, expected)
    assert len(restored) < len(rows_of(place)), "it was sent what it lacked"
    assert rows_of(place) == rows_of(whole), "nothing is missing, and no row is there twice"


def test_servers_with_postgresql(servers: Servers, tmp_path: Path, expected: dict[str, str]) -> None:
    """A backup of servers with PostgreSQL can be restored, and the pipeline goes on."""
    variables, _ = servers.up()
    place = Place(tmp_path, variables, servers.folder)

    def destroy() -> None:
        servers.down("--delete")
        assert not servers.folder.exists()

    interrupted_and_restored(place, destroy_servers=destroy)
    again, _ = servers.up()
    assert {**again, "PREFECT_API_URL": "", "MLFLOW_TRACKING_URI": ""} == {
        **variables,
        "PREFECT_API_URL": "",
        "MLFLOW_TRACKING_URI": "",
    }, "the logins are those of before"
    place.environment.update(again)
    login = tuple(again["PREFECT_API_AUTH_STRING"].split(":"))
    flow_runs = requests.post(
        f"{again['PREFECT_API_URL']}/flow_runs/filter", json={}, auth=login, timeout=30
    ).json()
    assert any(each["name"].startswith("0001-fake-") for each in flow_runs), "Prefect knows the run of before"
    check_goes_on(place, expected)
    second = place.backs_up("restore", "--from", str(place.backup), *place.stores)
    assert second.returncode == 69
    assert f"--servers={servers.folder} is not empty; move it away" in second.stderr


# What is refused, and leaves nothing


def test_what_cannot_be_saved_leaves_no_folder(tmp_path: Path) -> None:
    place = Place(tmp_path, {}, None)
    nothing = place.backs_up("save", "--to", str(place.backup), "--workspace", str(tmp_path / "none"))
    assert (nothing.returncode, nothing.stderr) == (
        69,
        f"{tmp_path / 'none'} is no workspace: it has no folder runs\n",
    )
    (place.workspace / "runs").mkdir(parents=True)
    (place.workspace / "mlflow.db").write_text("no database")
    broken = place.backs_up("save", "--to", str(place.backup), *place.stores)
    assert broken.returncode == 69
    assert f"{place.workspace / 'mlflow.db'} cannot be saved: file is not a database" in broken.stderr
    assert [*(tmp_path / "backups").iterdir()] == []


def test_a_folder_without_its_index_is_no_backup(tmp_path: Path) -> None:
    place = Place(tmp_path, {}, None)
    (place.workspace / "runs").mkdir(parents=True)
    assert place.backs_up("save", "--to", str(place.backup), *place.stores).returncode == 0
    with_servers = place.backs_up("restore", "--from", str(place.backup), "--servers", str(tmp_path / "s"))
    assert with_servers.stderr == f"{place.backup} was saved without --servers; leave it out\n"
    (place.backup / "backup.json").unlink()
    refused = place.backs_up("restore", "--from", str(place.backup), "--workspace", str(tmp_path / "new"))
    assert refused.returncode == 69
    assert "backup.json is missing, which is written when all is saved" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_a_second_backup_links_the_artifacts_of_the_first(tmp_path: Path) -> None:
    place = Place(tmp_path, {}, None)
    (place.workspace / "runs").mkdir(parents=True)
    weights = place.workspace / "store" / "objects" / "abc" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    for name in ("1", "2"):
        saved = place.backs_up("save", "--to", str(tmp_path / "backups" / name), *place.stores)
        assert saved.returncode == 0, saved.stderr
    first, second = (
        tmp_path / "backups" / name / "workspace" / weights.relative_to(place.workspace)
        for name in ("1", "2")
    )
    assert first.stat().st_ino == second.stat().st_ino != weights.stat().st_ino
    assert second.read_bytes() == b"weights"
