"""Every server that Vantage's own code or files start is on loopback or behind a login, and has no dangerous switches."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.servers.mlflow_server import mlflow_server, write_auth_config
from deploy.servers.prefect_server import prefect_server
from deploy.servers.settings import Settings
from tests.support.packages import PACKAGES, ROOT
from vantage.flows.prefect_server import server as own_server
from vantage.ledger.tracking import DANGEROUS, MLFLOW_ENVIRONMENT

DEPLOY = ROOT / "deploy"


class Container:
    """A container of compose or Kubernetes: its command and its environment (values of secrets are ``None``)."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str | None]) -> None:
        self.name, self.command, self.environment = name, command, environment

    def __repr__(self) -> str:
        return self.name


def containers() -> Iterator[Container]:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        yield Container(f"compose {name}", service.get("command", []), service["environment"])
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            for each in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
                environment = {one["name"]: one.get("value") for one in each.get("env", [])}
                command = [str(word) for word in each.get("command", [])]
                yield Container(f"kubernetes {each['name']}", command, environment)


CONTAINERS = list(containers())
MLFLOW = [each for each in CONTAINERS if each.command[:2] == ["mlflow", "server"]]
PREFECT = [each for each in CONTAINERS if each.command[:3] == ["prefect", "server", "start"]]


def test_both_kinds_of_deployment_have_both_servers() -> None:
    assert len(MLFLOW) == len(PREFECT) == 2


@pytest.mark.parametrize("container", MLFLOW, ids=repr)
def test_an_mlflow_that_others_reach_asks_for_a_login_and_has_its_switches_off(container: Container) -> None:
    assert "--app-name=basic-auth" in container.command
    [hosts] = [word for word in container.command if word.startswith("--allowed-hosts=")]
    assert "*" not in hosts
    assert {container.environment[name] for name in DANGEROUS} == {"false"}
    assert "MLFLOW_FLASK_SERVER_SECRET_KEY" in container.environment
    assert "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE" not in container.environment


@pytest.mark.parametrize("container", PREFECT, ids=repr)
def test_a_prefect_that_others_reach_asks_for_a_login_and_answers_one_origin(container: Container) -> None:
    assert "PREFECT_SERVER_API_AUTH_STRING" in container.environment
    assert container.environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4200"


def test_whoever_listens_to_all_is_one_of_these() -> None:
    listens = re.compile(r"0\.0\.0\.0|\[::\]|--host[= ]\*")
    assert {each.name for each in CONTAINERS if listens.search(" ".join(each.command))} == {
        each.name for each in (*MLFLOW, *PREFECT)
    }
    for folder in (*PACKAGES, "deploy/servers"):
        named = [path for path in (ROOT / folder).rglob("*.py") if listens.search(path.read_text())]
        assert named == [], "no code of ours names every interface"
    assert not listens.search((ROOT / "Makefile").read_text())


def test_nothing_of_the_cluster_is_published_beyond_it() -> None:
    for path in (DEPLOY / "kubernetes").glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            assert document["kind"] not in ("Ingress", "Gateway", "HTTPRoute")
            if document["kind"] == "Service":
                assert document["spec"].get("type", "ClusterIP") == "ClusterIP", path.name
            text = yaml.safe_dump(document)
            assert not re.search(r"hostPort|hostNetwork|privileged: true|hostPath", text), path.name


def test_users_of_mlflow_may_only_read_what_is_not_theirs(tmp_path: Path) -> None:
    settings = Settings(postgres_folder=tmp_path)
    write_auth_config(settings, tmp_path)
    for text in (
        (DEPLOY / "configuration" / "mlflow_auth.ini").read_text(),
        (tmp_path / "mlflow_auth.ini").read_text(),
    ):
        assert "default_permission = READ" in text
        assert "admin_password" not in text


def test_make_servers_gives_each_install_passwords_of_its_own(tmp_path: Path) -> None:
    """The servers have the same switches and logins as the containers, on loopback, which
    ``tests/deploy/test_servers.py`` connects to.
    """
    first, second = Settings(postgres_folder=tmp_path), Settings(postgres_folder=tmp_path)
    passwords = [
        each
        for settings in (first, second)
        for each in (settings.prefect_password, settings.mlflow_password, settings.mlflow_secret_key)
    ]
    assert len(set(passwords)) == 6
    assert min(map(len, passwords)) >= 32
    mlflow = mlflow_server(first, tmp_path, dict.fromkeys(DANGEROUS, "true"))
    assert {mlflow.environment[name] for name in DANGEROUS} == {"false"}
    assert mlflow.command[mlflow.command.index("--host") + 1] == "127.0.0.1"
    assert mlflow.command[mlflow.command.index("--app-name") + 1] == "basic-auth"
    prefect = prefect_server(first, tmp_path, {})
    assert prefect.command[prefect.command.index("--host") + 1] == "127.0.0.1"
    assert first.prefect_password in prefect.environment["PREFECT_SERVER_API_AUTH_STRING"]
    assert prefect.environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4200"
    for each in (mlflow, prefect):
        assert not any(password in word for password in passwords for word in each.command)


def test_our_own_prefect_server_takes_no_setting_that_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user's environment says of a server's address and origins is not what ours is started with."""
    monkeypatch.setenv("PREFECT_SERVER_API_HOST", "0.0.0.0")
    monkeypatch.setenv("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "*")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ann:canary-of-a-client")
    started: dict[str, Any] = {}
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: started.update(command=command, **options)
    )
    own_server._server_process(tmp_path, 4321, tmp_path / "server.log")
    assert started["command"][started["command"].index("--host") + 1] == "127.0.0.1"
    assert started["env"]["PREFECT_SERVER_API_HOST"] == "127.0.0.1"
    assert started["env"]["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4321"
    assert "canary" not in repr(started["env"])
    assert started["umask"] == 0o077


@pytest.mark.slow
def test_mlflows_dangerous_switches_are_off_whatever_the_environment_says() -> None:
    code = (
        "from vantage.ledger.tracking import set_up_client; set_up_client()\n"
        "from mlflow import environment_variables as known\n"
        "print(known.MLFLOW_ALLOW_PICKLE_DESERIALIZATION.get(), known.MLFLOW_SERVER_ENABLE_JOB_EXECUTION.get())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **dict.fromkeys(DANGEROUS, "true"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"], "as MLflow itself reads them"
    assert {MLFLOW_ENVIRONMENT[name] for name in DANGEROUS} == {"false"}


def test_everything_that_imports_mlflow_turns_them_off_before() -> None:
    """Outside of ``vantage.ledger.to_mlflow``, the import of it is in a function that has called ``set_up_client`` before."""
    importing = re.compile(r"^\s+(?:from|import) (?:vantage\.ledger\.to_mlflow|mlflow)\b", re.MULTILINE)
    # a constant, and the description of a copy, whose module imports no MLflow
    allowed = {
        *("ledger/run_ledger.py", "review/exports/exporting.py", "review/audit/mlflow_descriptions.py"),
        # reads what `Evidence` has found; `Evidence` made the call that switches this off
        "review/audit/served.py",
    }
    unset = set()
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"if TYPE_CHECKING:\n(    .*\n|\n)+", "", path.read_text())
            found = importing.search(text)
            if found and "to_mlflow" not in path.parent.name:
                called = text.find("set_up_client()")
                if called < 0 or called > found.start():
                    unset.add(path.relative_to(ROOT).as_posix())
    assert unset <= allowed
