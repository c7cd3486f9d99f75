"""A run survives when the PostgreSQL beneath Prefect and MLflow ends and is started again; only stages are fake."""

import os
import re
import signal
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from deploy.servers.lifecycle import read_settings
from tests.deploy.conftest import Place, Servers, rows_of
from tests.support.real_runs import wait_for
from vantage.attempts.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def rows_on(servers: Servers) -> list[tuple[str, str, int, float]]:
    """Return ``rows_of`` what MLflow keeps in PostgreSQL."""
    with psycopg.connect(f"{read_settings(servers.folder).server_url}/vantage_mlflow") as database:
        found = database.execute(
            "SELECT name, key, step, value FROM metrics JOIN runs USING (run_uuid) "
            "WHERE key NOT LIKE 'system/%' AND key NOT LIKE '%seconds%'"
        ).fetchall()
    return [(re.sub("-[0-9a-f]{6}$", "", name), key, step, value) for name, key, step, value in found]


def end_postgresql(servers: Servers) -> None:
    """End PostgreSQL as a crash does, without waiting for its clients. The next start recovers from its log."""
    [postgres] = servers.processes()["postgres"]
    os.kill(postgres, signal.SIGQUIT)
    wait_for(lambda: not servers.processes()["postgres"])


def test_a_run_goes_on_while_its_database_is_away(
    servers: Servers, tmp_path: Path, whole: Place, expected: dict[str, str]
) -> None:
    """PostgreSQL ends twice, and is back during the run and after its end. Nothing is made twice, and MLflow has each
    row once.
    """
    variables, _ = servers.up()
    place = Place(tmp_path, variables, servers.folder)
    place.workspace.mkdir(parents=True)
    (place.workspace / "seconds.txt").write_text("0.5")
    run = place.begin("run", str(place.recipe))

    def wait_for_start(stage: str) -> None:
        wait_for(lambda: any(f"{stage} started" in line for line in place.events()))

    wait_for_start("sft")
    wait_for(lambda: place.has_checkpoint("sft"))
    end_postgresql(servers)
    wait_for_start("reward")
    servers.up()
    wait_for_start("value")
    end_postgresql(servers)
    (place.workspace / "seconds.txt").write_text("0")
    printed, _ = run.communicate(timeout=400)
    assert run.returncode == ExitCode.UNAVAILABLE, printed
    assert "the run has ended all the same (completed)" in printed
    assert "Traceback" not in printed
    assert place.digests() == expected
    first = str(place.record()["run_id"])

    servers.up()
    place.vantage("run", str(place.recipe))  # sends what the first one could not
    started = [line.split()[0] for line in place.events() if " started " in line]
    assert len(started) == len(set(started)), started
    audited = place.vantage("audit", first)
    assert "wrong" not in audited, audited
    of_first = [row for row in rows_on(servers) if not row[0].startswith("0002-")]
    assert Counter(of_first) == Counter(rows_of(whole))
