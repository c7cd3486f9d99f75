"""Each check finds something that is really wrong."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from vantage.attempts.identity.package import package_folder
from vantage.runs import findings
from vantage.runs.findings import (
    Finding,
    _bucket,
    _processes,
    _runs,
    _servers,
    _sqlite,
    _storage,
    run_checks,
)
from vantage.runs.workspace import Workspace
from vantage.tasks.rewards import sandbox


@pytest.fixture
def healthy_server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_healthy_machine_is_found_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    findings = list(run_checks(Workspace(tmp_path / "workspace")))
    assert [finding for finding in findings if finding.verdict == "broken"] == []
    assert {"python", "torch", "packages", "workspace", "sqlite", "processes", "machine"} <= {
        finding.subject for finding in findings
    }


def test_folders_that_are_called_like_our_packages_are_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    [packages] = [each for each in run_checks(Workspace(tmp_path)) if each.subject == "packages"]
    assert packages == Finding("packages", "fine", str(package_folder()))


def test_a_workspace_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    [finding] = _storage(Workspace(tmp_path / "file"))
    assert finding.verdict == "broken"
    assert "use --workspace DIR" in finding.message
    assert _sqlite(Workspace(tmp_path / "nowhere")).verdict == "broken"


def test_a_damaged_run_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "0001-fake-0a1b2c"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")
    [finding] = _runs(Workspace(tmp_path))
    assert (finding.verdict, "0001-fake-0a1b2c" in finding.message) == ("warning", True)


def test_configured_servers_are_asked(healthy_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PREFECT_API_URL", f"{healthy_server}/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{healthy_server}/nothing")
    prefect, mlflow = _servers()
    assert prefect == Finding("Prefect", "fine", "PREFECT_API_URL answers (200)")
    assert mlflow.verdict == "broken"
    assert "start that server, or unset it" in mlflow.message


def test_children_that_cannot_load_our_packages_are_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vantage").mkdir()
    (tmp_path / "vantage" / "__init__.py").write_text("raise RuntimeError('not ours')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = _processes()
    assert finding.verdict == "broken"
    assert "not ours" in finding.message


def test_a_machine_that_does_not_isolate_programs_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def isolation() -> Finding:
        [found] = [each for each in run_checks(Workspace(tmp_path)) if each.subject == "isolation"]
        return found

    assert isolation() == Finding(
        "isolation", "fine", "programs in responses run in namespaces and a filter of system calls"
    )
    monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "a test forbids it")
    assert isolation() == Finding(
        "isolation", "warning", "builtin:code is refused here (a test forbids it); see docs/verifiers.md"
    )


def test_destinations_beside_mlflow_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "VANTAGE_TENSORBOARD", "OPENLINEAGE_URL"):
        monkeypatch.delenv(name, raising=False)

    def found() -> list[Finding]:
        return [each for each in _servers() if each.subject == "destinations"]

    assert found() == []
    monkeypatch.setenv("VANTAGE_TENSORBOARD", str(tmp_path))
    monkeypatch.setenv("OPENLINEAGE_URL", "http://ada:hunter22@host:5000")
    named = f"VANTAGE_TENSORBOARD={tmp_path}, OPENLINEAGE_URL=http://host:5000"
    assert found() == [Finding("destinations", "fine", named)]
    monkeypatch.setenv("OPENLINEAGE_URL", "host:5000")
    assert [(each.verdict, "is no address of a server" in each.message) for each in found()] == [
        ("broken", True)
    ]


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_bucket_is_tried_and_left_as_it_was(
    is_strict: bool, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    workspace = Workspace.at(bucket)
    remote = workspace.storage.remote
    before = [each["path"] for chunk in obstore.list(remote) for each in chunk]
    if not is_strict:
        monkeypatch.setattr(
            findings, "replace_record", lambda remote, path, data, version: obstore.put(remote, path, data)
        )
    found = _bucket(workspace)
    assert [each["path"] for chunk in obstore.list(remote) for each in chunk] == before
    if is_strict:
        assert found == Finding("bucket", "fine", workspace.address)
    else:
        assert found.verdict == "broken" and "takes stale writes" in found.message
