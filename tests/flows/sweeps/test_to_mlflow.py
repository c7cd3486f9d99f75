"""A failing MLflow server is asked once by a sweep, and does not delay it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vantage.flows.sweeps.to_mlflow import SweepLedger


@contextmanager
def failing_server() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server that cannot serve now, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def fail(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        do_GET = do_POST = fail

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_that_fails_is_asked_once_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow's client would ask eight times in four minutes, and make a second run where only an answer was lost."""
    environment = os.environ.copy()
    environment.pop("MLFLOW_HTTP_REQUEST_MAX_RETRIES", None)
    monkeypatch.setattr(os, "environ", environment)
    with failing_server() as (address, asked):
        environment["MLFLOW_TRACKING_URI"] = address
        SweepLedger(tmp_path, "tiny", "0001-sweep").record(tmp_path, [], [], status="RUNNING", note="")
    assert len(asked) == 1
    assert "the sweep could not be sent to MLflow" in caplog.text
