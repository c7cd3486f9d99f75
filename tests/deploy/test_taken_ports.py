"""A server still starts if another process takes its port between the check of the port and the server's start."""

import http.server
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.servers import lifecycle
from deploy.servers.failure import ServersFailure
from deploy.servers.processes import Server, stop
from deploy.servers.settings import LOOPBACK, Settings
from tests.support.ports import own_port

SERVER = """
import base64, http.server, sys
login = "Basic " + base64.b64encode(("vantage:" + sys.argv[2]).encode()).decode()
class Asks(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers.get("Authorization") == login else 401)
        self.end_headers()
http.server.HTTPServer.allow_reuse_address = False
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Asks).serve_forever()
"""


class Refuses(http.server.BaseHTTPRequestHandler):
    """Another's server, which accepts no login of ours."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def strangers_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer((LOOPBACK, 0), Refuses) as another:
        threading.Thread(target=another.serve_forever, daemon=True).start()
        yield another.server_address[1]
        another.shutdown()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Yield settings whose servers are the small one above."""

    def small(settings: Settings, name: str, folder: Path, *_: object) -> Server:
        command = [sys.executable, "-c", SERVER, str(settings.ports[name]), settings.prefect_password]
        return Server(name, command, {}, folder, folder / "log")

    monkeypatch.setattr(lifecycle, "_server", small)
    yield Settings(postgres_folder=tmp_path / "postgres")
    stop(tmp_path, "prefect")


def looks_free_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([True])
    is_free = lifecycle.is_free
    monkeypatch.setattr(lifecycle, "is_free", lambda port: next(looks, None) or is_free(port))


def test_a_server_whose_port_is_taken_while_it_starts_gets_another(
    settings: Settings, tmp_path: Path, strangers_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ports["prefect"] = strangers_port
    looks_free_once(monkeypatch)
    lifecycle._start(settings, "prefect", tmp_path)
    lifecycle._wait_until_ready(settings, "prefect", tmp_path)
    assert settings.ports["prefect"] != strangers_port
    assert Settings.model_validate_json((tmp_path / "settings.json").read_text()).ports == settings.ports
    with socket.create_connection((LOOPBACK, settings.ports["prefect"]), timeout=5):
        pass


def test_a_server_that_ends_on_a_free_port_is_a_failure_with_its_log(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Server(
        "prefect", [sys.executable, "-c", "raise SystemExit('no')"], {}, tmp_path, tmp_path / "log"
    )
    monkeypatch.setattr(lifecycle, "_server", lambda *_: broken)
    settings.ports["prefect"] = own_port()
    lifecycle._start(settings, "prefect", tmp_path)
    with pytest.raises(ServersFailure, match="the prefect server did not start: no"):
        lifecycle._wait_until_ready(settings, "prefect", tmp_path)
