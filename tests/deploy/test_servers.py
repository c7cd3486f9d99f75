"""``make servers`` works with a real PostgreSQL, Prefect and MLflow, which all tests of this file share."""

import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import psutil
import pytest
import requests

from tests.deploy.conftest import ROOT, Servers
from tests.support.fixtures import RECIPE
from tests.support.fork_server import WITH_PREFECT
from tests.support.real_runs import wait_for

pytestmark = pytest.mark.slow

ENDED = "postgres does not run"


def statuses(variables: dict[str, str]) -> dict[str, list[int]]:
    """Return each server's HTTP statuses without a login, with a wrong login, and with the printed login."""
    prefect_user, _, prefect_password = variables["PREFECT_API_AUTH_STRING"].partition(":")
    asked = {
        f"{variables['PREFECT_API_URL']}/flows/paginate": (prefect_user, prefect_password),
        f"{variables['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments/search?max_results=5": (
            variables["MLFLOW_TRACKING_USERNAME"],
            variables["MLFLOW_TRACKING_PASSWORD"],
        ),
    }
    return {
        name: [
            requests.request(
                method, url, json={} if method == "POST" else None, auth=auth, timeout=30
            ).status_code
            for auth in (None, ("vantage", "wrong"), login)
        ]
        for (name, method), (url, login) in zip(
            (("prefect", "POST"), ("mlflow", "GET")), asked.items(), strict=True
        )
    }


BOTH_ASK = {"prefect": [401, 401, 200], "mlflow": [401, 401, 200]}


def test_both_ask_for_the_printed_login_and_listen_on_loopback_only(servers: Servers) -> None:
    variables, _ = servers.up()
    assert set(variables) == {
        "PREFECT_API_URL",
        "PREFECT_API_AUTH_STRING",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
    }
    assert statuses(variables) == BOTH_ASK
    pids = servers.processes()
    assert {name for name, found in pids.items() if found} == {"postgres", "prefect", "mlflow"}
    listening = {
        name: {
            each.laddr.ip
            for pid in found
            for each in psutil.Process(pid).net_connections(kind="inet")
            if each.status == psutil.CONN_LISTEN
        }
        for name, found in pids.items()
    }
    assert listening == {name: {"127.0.0.1"} for name in pids}


def test_passwords_stand_in_private_files_and_in_no_command_line_or_log(servers: Servers) -> None:
    variables, messages = servers.up()
    passwords = [
        variables["PREFECT_API_AUTH_STRING"].partition(":")[2],
        variables["MLFLOW_TRACKING_PASSWORD"],
    ]
    assert len({*passwords}) == 2
    assert all(len(each) >= 24 and each not in messages for each in passwords)
    holders = [
        path
        for path in servers.folder.iterdir()
        if path.is_file() and any(each in path.read_text() for each in passwords)
    ]
    assert {path.name for path in holders} == {"environment", "settings.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in servers.folder.glob("*.*")} == {0o600}
    assert stat.S_IMODE((servers.folder / "environment").stat().st_mode) == 0o600
    assert (servers.folder / "environment").read_text() == "".join(
        f"export {name}={value}\n" for name, value in variables.items()
    )
    secrets = [*passwords, json.loads((servers.folder / "settings.json").read_text())["postgres_password"]]
    lines = [
        " ".join(psutil.Process(pid).cmdline()) for found in servers.processes().values() for pid in found
    ]
    assert not [line for line in lines if any(each in line for each in secrets)]


def test_a_second_call_changes_nothing(servers: Servers) -> None:
    first, _ = servers.up()
    before = servers.processes()
    again, messages = servers.up()
    assert (again, servers.processes()) == (first, before)
    assert "PostgreSQL runs already" in messages


def test_a_call_from_another_shell_changes_nothing(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, _ = servers.up()
    before = servers.processes()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("LANG", "TMPDIR", "TZ"):
        monkeypatch.setenv(
            name, str(tmp_path) if name == "TMPDIR" else "C.UTF-8" if name == "LANG" else "UTC"
        )
    assert (servers.up()[0], servers.processes()) == (first, before)


def test_a_run_of_a_recipe_is_recorded_by_both(servers: Servers, tmp_path: Path) -> None:
    variables, _ = servers.up()
    recipe = tmp_path / "fake.yaml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "tests.support.fake_vantage", "run", str(recipe)]
    done = WITH_PREFECT.run(
        [*command, "--workspace", str(tmp_path / "workspace")],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluation" in done.stdout
    prefect_login = tuple(variables["PREFECT_API_AUTH_STRING"].split(":"))
    flow_runs = requests.post(
        f"{variables['PREFECT_API_URL']}/flow_runs/filter", json={}, auth=prefect_login, timeout=30
    ).json()
    assert ["completed" for each in flow_runs if each["name"].startswith("0001-fake-")] == ["completed"]
    assert [each["state_name"] for each in flow_runs] == ["Completed"]
    mlflow_login = (variables["MLFLOW_TRACKING_USERNAME"], variables["MLFLOW_TRACKING_PASSWORD"])
    experiments = requests.get(
        f"{variables['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments/search?max_results=50",
        auth=mlflow_login,
        timeout=30,
    ).json()["experiments"]
    assert any("fake" in each["name"] for each in experiments)
    printed = done.stdout + done.stderr
    assert not [each for each in (prefect_login[1], mlflow_login[1]) if each in printed]


@pytest.mark.parametrize("killed", [("postgres",), ("prefect", "mlflow")])
def test_those_that_were_killed_are_started_again_with_what_they_kept(
    servers: Servers, killed: tuple[str, ...]
) -> None:
    """Servers that were killed are started again with their data."""
    variables, _ = servers.up()
    before = servers.processes()
    url, login = variables["PREFECT_API_URL"], tuple(variables["PREFECT_API_AUTH_STRING"].split(":"))
    name = f"before-{killed[0]}"
    made = requests.post(f"{url}/flows/", json={"name": name}, auth=login, timeout=30)
    assert made.status_code == 201
    for server in killed:  # kill its main process; the call has to stop the processes that it leaves behind
        os.kill(min(before[server]), signal.SIGKILL)
    again, _ = servers.up()
    assert again == variables
    assert statuses(again) == BOTH_ASK
    after = servers.processes()
    assert [not before[server] & after[server] for server in before] == [
        server in killed for server in before
    ]
    assert requests.get(f"{url}/flows/name/{name}", auth=login, timeout=30).json()["id"] == made.json()["id"]


def test_a_taken_port_and_a_call_killed_half_way(servers: Servers) -> None:
    variables, _ = servers.up()
    port = int(variables["PREFECT_API_URL"].rpartition(":")[2].partition("/")[0])
    servers.down()
    assert servers.processes() == {"postgres": set(), "prefect": set(), "mlflow": set()}
    assert ENDED in servers.down()
    with socket.socket() as another:
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        another.bind(("127.0.0.1", port))
        another.listen()
        call = servers.start()
        wait_for(lambda: servers.processes()["prefect"])
        call.kill()
        call.communicate()
        again, _ = servers.up()
    assert str(port) not in again["PREFECT_API_URL"]
    assert {name: value for name, value in again.items() if name != "PREFECT_API_URL"} == {
        name: value for name, value in variables.items() if name != "PREFECT_API_URL"
    }
    assert statuses(again) == BOTH_ASK
    assert len(servers.processes()["prefect"]) == 1
