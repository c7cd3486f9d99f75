"""``make servers`` starts a server again when its own settings have changed, and never for the caller's shell."""

from pathlib import Path

import pytest

from deploy.servers.lifecycle import _server
from deploy.servers.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(postgres_folder=tmp_path, ports={"postgres": 5433, "prefect": 4200, "mlflow": 5000})


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
@pytest.mark.parametrize("variable", ["PATH", "HOME", "LANG", "TMPDIR", "TZ"])
def test_the_shell_of_a_call_is_no_setting(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variable: str
) -> None:
    monkeypatch.setenv(variable, "/one")
    first = _server(settings, name, tmp_path)
    monkeypatch.setenv(variable, "/other")
    second = _server(settings, name, tmp_path)
    monkeypatch.delenv(variable)
    assert first.mark == second.mark == _server(settings, name, tmp_path).mark
    assert (first.environment[variable], second.environment[variable]) == ("/one", "/other"), (
        "it is handed on"
    )


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_a_port_a_login_and_an_address_are_settings(settings: Settings, tmp_path: Path, name: str) -> None:
    changed = [
        settings.model_copy(update={"ports": {**settings.ports, name: 4999}}),
        settings.model_copy(update={f"{name}_password": "another"}),
        settings.model_copy(update={"postgres_password": "another"}),
        settings.model_copy(update={"public": {name: f"https://{name}.example.org"}}),
    ]
    marks = {_server(each, name, tmp_path).mark for each in (settings, *changed)}
    assert len(marks) == 1 + len(changed)
