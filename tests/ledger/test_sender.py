"""Records are sent in the background while servers are down, come, go and lose answers; the next run sends what is left."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.ledger.small_run import (
    JOURNAL_CURVE,
    RECIPE,
    artifact,
    client_of,
    curve,
    record_run,
    refused,
    runs_of,
    snapshot,
    tell_reuse,
    tell_run,
    tell_stage,
)
from tests.support.fork_server import WITH_PREFECT
from tests.support.ports import own_port
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.sender import Sender
from vantage.ledger.tracking import MLFLOW_ENVIRONMENT, set_up_client
from vantage.schemas.records.artifacts import PolicyCheckpoint
from vantage.storage.sealed_folders import seal


def test_what_one_run_could_not_send_the_next_one_sends_before_its_own(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger("http://someone:s3cret@127.0.0.1:9", workspace, "tiny") as ledger:
        tell_run(ledger, "0001-tiny-aaaaaa")
        assert not ledger.flush()
        assert ledger.mlflow_run_id() is None
        assert ledger.where() == "http://127.0.0.1:9/"
    assert caplog.text.count("MLflow (http://127.0.0.1:9) cannot be reached; the run goes on") == 1
    assert "s3cret" not in caplog.text
    assert not any(
        b"s3cret" in path.read_bytes() for path in (workspace / "runs").rglob("*") if path.is_file()
    )

    def tell(ledger: Ledger, run_id: str) -> None:
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_reuse(ledger, "sft")

    record_run(workspace, "0002-tiny-bbbbbb", tell)
    client = client_of(workspace)
    made = runs_of(client, "0001-tiny-aaaaaa")
    assert curve(client, made["sft"], "loss") == JOURNAL_CURVE
    reused = runs_of(client, "0002-tiny-bbbbbb")["sft"]
    assert reused.data.tags["vantage.reused_from"] == made["sft"].info.run_id


def test_a_server_that_is_down_is_warned_of_before_a_flush_returns(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may end right after a flush, and its thread with it."""
    sender = Sender("http://127.0.0.1:9", workspace)
    warnings: list[str] = []

    def begin_with_the_flush() -> None:
        while not sender._flushes_requested:
            time.sleep(0.01)
        set_up_client()

    class SlowHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.5)
            warnings.append(record.getMessage())

    monkeypatch.setattr("vantage.ledger.sender.set_up_client", begin_with_the_flush)
    monkeypatch.setattr(logging.getLogger("vantage.ledger.sender"), "handlers", [SlowHandler()])
    assert not sender.flush(60)
    assert len(warnings) == 1
    assert "cannot be reached" in warnings[0]
    sender.close(0)


@pytest.mark.slow
def test_an_outbox_that_another_process_sends_is_waited_for_and_no_outage(
    workspace: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that begins sends the outboxes of all others, also of those that still go on."""
    monkeypatch.setattr("vantage.ledger.to_mlflow.delivery._LOCK_WAIT_SECONDS", 0.1)
    folder = workspace / "runs" / "0001-tiny-aaaaaa" / "ledger"
    sending = "import fcntl, sys; fcntl.flock(lock := open(sys.argv[1], 'a'), fcntl.LOCK_EX); print('sends', flush=True); input()"
    with Ledger(None, workspace, "tiny") as ledger:
        tell_run(ledger, "0001-tiny-aaaaaa")
        assert ledger.flush()
        other = subprocess.Popen(
            [sys.executable, "-c", sending, str(folder / "sending.lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "sends\n"
        tell_stage(ledger, "evaluation", attempt=2)
        asked = threading.Timer(2.0, other.communicate, args=["\n"])
        asked.start()
        started = time.monotonic()
        assert ledger.flush()
        assert time.monotonic() - started > 1.5
        asked.join()
    assert "cannot be reached" not in caplog.text
    sent = runs_of(client_of(workspace), "0001-tiny-aaaaaa")["evaluation"]
    assert sent.data.tags["vantage.attempt"] == "2"


def test_a_report_is_not_waited_for_where_mlflow_has_just_not_answered(
    workspace: Path,
) -> None:
    """The run has waited once for a server that is down; the report is sent by the next run."""
    file = workspace / "report.html"
    file.write_text("the report")
    ledger = Ledger("http://127.0.0.1:9", workspace, "tiny")
    tell_run(ledger, "0001-tiny-aaaaaa")
    assert not ledger.flush()
    asked = ledger._sender._flushes_requested
    ledger.log_report(file)
    assert not ledger.close()
    assert ledger._sender._flushes_requested == asked
    record_run(workspace, "0002-tiny-bbbbbb")
    client = client_of(workspace)
    parent = runs_of(client, "0001-tiny-aaaaaa")[""]
    assert [each.path for each in client.list_artifacts(parent.info.run_id)] == ["report.html"]


@pytest.mark.slow
def test_a_database_that_was_lost_is_written_again(workspace: Path, database: Path) -> None:
    record_run(workspace, "0001-tiny-aaaaaa")
    expected = snapshot(client_of(workspace), "0001-tiny-aaaaaa")
    (workspace / "mlflow.db").unlink()
    shutil.copy(database, workspace / "mlflow.db")
    assert Ledger(None, workspace, "tiny").flush()
    assert snapshot(client_of(workspace), "0001-tiny-aaaaaa") == expected


@contextmanager
def mlflow_server(folder: Path, port: int, *, seconds: float = 90.0) -> Iterator[None]:
    """Yield a real server on loopback, ended with everything that it started."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("ab") as log:
        process = WITH_PREFECT.popen(
            command,
            cwd=folder,
            env={**os.environ, **MLFLOW_ENVIRONMENT},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        give_up = time.monotonic() + seconds
        while not answers(port):
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < give_up, (folder / "server.log").read_text()
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def losing_proxy(port: int, to_port: int) -> Iterator[list[str]]:
    """Pass requests on, and lose the first two answers of every kind of write; yields the paths that it lost."""
    lost: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server = HTTPConnection("127.0.0.1", to_port, timeout=30)
            server.request(self.command, self.path, body, dict(self.headers.items()))
            answer = server.getresponse()
            content = answer.read()
            server.close()
            kind = self.path.partition("/artifacts/")[0]  # one kind for all files that are uploaded
            if self.command != "GET" and "search" not in kind and lost.count(kind) < 2:
                lost.append(kind)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = pass_on

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        proxy.shutdown()
        proxy.server_close()


@pytest.mark.slow
def test_a_server_that_is_down_comes_goes_and_loses_answers_ends_up_with_everything_once(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    port, proxy_port = own_port(), own_port()
    run_id = "0001-tiny-aaaaaa"
    with Ledger(f"http://127.0.0.1:{proxy_port}", workspace, "tiny") as ledger:
        # 1. The server is down at the start: records are kept, not sent, and nothing is raised
        ledger.open_run(run_id, "tiny", RECIPE)
        tell_stage(ledger, "model")
        assert not ledger.flush()

        with mlflow_server(workspace, port):
            # 2. The server is there, but the connection loses answers
            with losing_proxy(proxy_port, port) as lost:
                for _ in range(100):
                    if ledger.flush():
                        break
                assert ledger.flush()
                assert any(path.endswith("runs/create") for path in lost)
            page = ledger.where("model")

        # 3. The server is away while the next stage trains
        tell_stage(ledger, "sft")
        assert not ledger.flush()

        # 4. The server is back: it gets what waited, and a publication
        model = workspace / "model"
        model.mkdir()
        (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (model / "tokenizer_config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"weights")
        with mlflow_server(workspace, port), losing_proxy(proxy_port, port) as lost:
            published = artifact(PolicyCheckpoint, "policy", {}, digest=seal(model))
            key = published.stage_key
            ledger.open_stage("policy", kind="dpo", stage_key=key, attempt=1, params={}, inputs={})
            ledger.finish_stage("policy", "completed", artifact=published)
            ledger.publish("policy", published, model, "quickstart", alias="champion")
            ledger.finish_run("completed")
            for _ in range(100):
                if ledger.flush():
                    break
            assert ledger.flush()
            assert any(path.endswith("model-versions/create") for path in lost)
    assert refused(workspace) == []

    found = snapshot(client_of(workspace), run_id)
    models = {"model of model", "model of sft", "model of policy"}
    assert set(found) == {"", "model", "sft", "policy", *models}
    assert found["sft"]["curves"]["loss"] == JOURNAL_CURVE
    assert [value for _, _, value in found["sft"]["curves"]["test_nll"]] == [0.4]
    assert {found[stage]["status"] for stage in ("", "model", "sft")} == {"FINISHED"}
    assert found["sft"]["models"] == ["model of model"]
    (version,) = client_of(workspace).search_model_versions("name = 'quickstart'")
    assert version.tags["vantage.digest"] == published.digest
    champion = client_of(workspace).get_model_version_by_alias("quickstart", "champion")
    assert champion.version == version.version
    (weights,) = (workspace / "artifacts").rglob("model.safetensors")
    assert weights.read_bytes() == b"weights"
    model_run = runs_of(client_of(workspace), run_id)["model"]
    assert page == (
        f"http://127.0.0.1:{proxy_port}/#/experiments/{model_run.info.experiment_id}"
        f"/runs/{model_run.info.run_id}?workflowType=machine_learning"
    )


def test_an_error_that_says_nothing_is_one_like_any_other(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(*_: Any, **__: Any) -> None:
        raise TimeoutError

    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0001-tiny-aaaaaa", "tiny", RECIPE)
        with monkeypatch.context() as broken:
            broken.setattr("vantage.ledger.to_mlflow.server.Server.__init__", silent)
            assert not ledger.flush(5.0)
        assert ledger.flush()
    assert "cannot be reached; the run goes on" in caplog.text
    [said] = [record.getMessage() for record in caplog.records if record.name == "vantage.ledger.sender"]
    assert said.endswith("TimeoutError")
