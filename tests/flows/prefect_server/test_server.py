"""A real Prefect server, started once for the module, does what we ask of it; a stand-in is used where only our own code matters."""

import http.client
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from vantage.flows.prefect_server import server as servers
from vantage.flows.prefect_server.server import (
    PrefectServer,
    ServerUnavailable,
    configured_url,
    is_healthy,
    prefect_server,
    start,
)

ROOT = Path(__file__).parents[3]

STAND_IN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
try:
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
except OSError:
    sys.exit("Port is already in use.")
server.serve_forever()
"""


def stand_in(home: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Answer like a server that is well, and end with the standard input, as the real one does."""
    (home / "stand_in.py").write_text(STAND_IN)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "vantage.flows.prefect_server.tied_process", "stand_in", str(port)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{home}"},
        )


def asked(port: int, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Return the answer to a request with these headers and no others."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    if answer.status != 101:
        answer.read()
    connection.close()
    return answer


def tables_of(database: Path) -> list[Any]:
    """Return all tables and indices, and the version."""
    with closing(sqlite3.connect(database)) as connection:
        return [
            connection.execute(query).fetchall()
            for query in (
                "SELECT type, name, sql FROM sqlite_master ORDER BY type, name",
                "SELECT * FROM alembic_version",
            )
        ]


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the server of the machine that runs the tests, and the profile of its user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.delenv("PREFECT_PROFILE", raising=False)
        servers._set_environment({"PREFECT_HOME": str(tmp_path_factory.mktemp("prefect-home"))})
        yield
    servers._set_environment({"PREFECT_HOME": None})


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the machine look like one where no server has run before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VANTAGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    server = start(tmp_path_factory.mktemp("workspace"))
    server.wait_ready()
    yield server
    server.stop()


@pytest.mark.slow
class TestOwnServer:
    def test_is_what_prefect_in_this_process_now_talks_to(self, running: PrefectServer) -> None:
        import prefect
        from prefect.settings import get_current_settings

        @prefect.task
        def double(number: int) -> int:
            return 2 * number

        @prefect.flow(name="vantage-test")
        def doubled() -> int:
            return double(21)

        assert doubled() == 42
        assert get_current_settings().api.url == running.wait_ready()
        with prefect.get_client(sync_client=True) as client:
            assert [run.state_name for run in client.read_flow_runs()] == ["Completed"]

    def test_keeps_its_database_and_log_in_the_workspace(self, running: PrefectServer) -> None:
        assert (running.workspace / "prefect" / "prefect.db").stat().st_size > 0
        assert running.log.parent == running.home and running.log.exists()

    def test_keeps_all_that_it_writes_for_its_owner_alone(self, running: PrefectServer) -> None:
        written = [
            path for path in running.home.rglob("*") if path.is_file() and path.name != "starting.lock"
        ]
        assert {"prefect.db", "server.log"} <= {path.name for path in written}
        assert {
            path.name: path.stat().st_mode & 0o077 for path in written if path.stat().st_mode & 0o077
        } == {}

    def test_in_the_next_workspace_has_the_same_tables_without_making_them(
        self, running: PrefectServer, tmp_path: Path
    ) -> None:
        before = servers._set_environment({"PREFECT_API_URL": None})
        try:
            with prefect_server(tmp_path):
                first, second = (
                    tables_of(home / "prefect.db") for home in (running.home, tmp_path / "prefect")
                )
        finally:
            servers._set_environment(before)
        assert first == second

    def test_writes_no_types_of_blocks_and_does_not_note_that_it_had(self, running: PrefectServer) -> None:
        """Our server registers no block types, and leaves no note that they are registered. So a server that somebody starts by hand on this database registers them."""
        with closing(sqlite3.connect(running.home / "prefect.db")) as connection:
            assert connection.execute("SELECT count(*) FROM block_type").fetchone() == (0,)
        assert not (running.home / "memo_store.toml").exists()

    def test_listens_on_loopback_alone(self, running: PrefectServer) -> None:
        """Our own Prefect server listens on loopback alone."""
        assert running._process is not None
        listening = [
            connection.laddr.ip
            for connection in psutil.Process(running._process.pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]

    def test_tells_nobody(self, running: PrefectServer) -> None:
        """Prefect's analytics are switched off in our own server."""
        with urllib.request.urlopen(f"{running.wait_ready()}/admin/settings") as answer:
            assert re.search(r'"analytics_enabled":\s*false', answer.read().decode())

    def test_has_web_pages_that_know_where_it_is(self, running: PrefectServer) -> None:
        url = running.wait_ready()
        with urllib.request.urlopen(url.replace("/api", "/ui-settings")) as answer:
            assert f'"api_url":"{url}"' in answer.read().decode()

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Host": "127.0.0.1:PORT"}, 200),
            ({"Host": "LOCALHOST:PORT"}, 200),
            ({"Host": "127.0.0.1:PORT", "Origin": "http://127.0.0.1:PORT"}, 200),
            ({"Host": "localhost:PORT", "Origin": "http://localhost:PORT"}, 200),
            # a name of somebody else's that points here (DNS rebinding)
            ({"Host": "attacker.example:PORT"}, 421),
            ({"Host": "attacker.example:PORT", "Origin": "http://attacker.example:PORT"}, 421),
            ({"Host": "127.0.0.1"}, 421),
            ({"Host": "127.0.0.1:1"}, 421),
            ({"Host": "127.0.0.1:PORT.attacker.example"}, 421),
            ({"Host": "user@127.0.0.1:PORT"}, 421),
            ({"Host": ""}, 421),
            ({}, 400),  # uvicorn itself
            # a page of somebody else's
            ({"Host": "127.0.0.1:PORT", "Origin": "http://attacker.example"}, 403),
            ({"Host": "127.0.0.1:PORT", "Origin": "http://127.0.0.1:1"}, 403),
            ({"Host": "127.0.0.1:PORT", "Origin": "https://127.0.0.1:PORT"}, 403),
            ({"Host": "127.0.0.1:PORT", "Origin": "null"}, 403),
        ],
    )
    @pytest.mark.parametrize("path", ["/api/admin/version", "/", "/api/flow_runs/filter"])
    def test_answers_to_its_own_name_and_origin_alone(
        self, running: PrefectServer, headers: dict[str, str], status: int, path: str
    ) -> None:
        port = running.wait_ready().rpartition(":")[2].removesuffix("/api")
        answer = asked(
            int(port), path, {name: value.replace("PORT", port) for name, value in headers.items()}
        )
        assert answer.status == (405 if path.endswith("filter") and status == 200 else status)
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed in (None, f"http://127.0.0.1:{port}")
        assert status == 200 or allowed is None

    def test_opens_no_web_socket_to_somebody_elses_page(self, running: PrefectServer) -> None:
        port = running.wait_ready().rpartition(":")[2].removesuffix("/api")
        handshake = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        for host, origin, status in (
            (f"127.0.0.1:{port}", None, 101),
            (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", 101),
            (f"attacker.example:{port}", None, 403),
            (f"127.0.0.1:{port}", "http://attacker.example", 403),
        ):
            headers = {"Host": host, **({"Origin": origin} if origin else {}), **handshake}
            assert asked(int(port), "/api/events/in", headers).status == status, (host, origin)

    def test_dies_with_a_process_that_is_killed(self, running: PrefectServer) -> None:
        # The same workspace, whose database exists: two runs in it at once.
        script = (
            "import sys, time; from pathlib import Path; from vantage.flows.prefect_server.server import start\n"
            f"server = start(Path({str(running.workspace)!r}))\n"
            "print(server.wait_ready(), server._process.pid, flush=True)\n"
            "time.sleep(600)"
        )
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PREFECT_API_URL", "PREFECT_HOME")
        }
        starter = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**environment, "PREFECT_HOME": str(running.workspace / "no-profiles")},
        )
        try:
            assert starter.stdout is not None
            url, pid = starter.stdout.readline().split()
            assert is_healthy(url) and is_healthy(running.wait_ready()) and url != running.wait_ready()
            server = psutil.Process(int(pid))
        finally:
            starter.send_signal(signal.SIGKILL)
            starter.wait()

        psutil.wait_procs([server], timeout=15)
        assert not server.is_running()
        assert not is_healthy(url)


class TestStandIn:
    @pytest.fixture(autouse=True)
    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(servers, "_server_process", stand_in)
        before = servers._set_environment({"PREFECT_API_URL": None})
        yield
        servers._set_environment(before)

    def test_is_ended_and_the_environment_is_as_before(self, tmp_path: Path) -> None:
        before = dict(os.environ)

        with prefect_server(tmp_path) as url:
            assert os.environ["PREFECT_API_URL"] == url
            assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect")
            assert "127.0.0.1" in os.environ["NO_PROXY"].split(",")
            assert is_healthy(url)

        assert not is_healthy(url)
        assert dict(os.environ) == before

    @pytest.mark.slow
    def test_starts_in_the_background(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The server starts while the run goes on."""

        def slowly(home: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
            time.sleep(1.0)
            return stand_in(home, port, log)

        monkeypatch.setattr(servers, "_server_process", slowly)
        server = start(tmp_path)
        try:
            assert "PREFECT_API_URL" not in os.environ, "start() came back before there was a server"
            assert is_healthy(server.wait_ready())
        finally:
            server.stop()

    def test_may_be_stopped_before_it_is_ready(self, tmp_path: Path) -> None:
        server = start(tmp_path)
        server.stop()
        assert server._process is None

    def test_settings_that_prefect_refuses_are_told_where_the_server_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused() -> str | None:
            raise ValueError("max_retries: Input should be a valid integer")

        monkeypatch.setattr(servers, "configured_url", refused)
        server = start(tmp_path)
        with pytest.raises(ValueError, match="max_retries"):
            server.wait_ready()
        server.stop()
        assert not server.home.exists()

    def test_takes_another_port_when_the_first_was_taken_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import socket

        free = servers.free_port()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports = iter([taken.getsockname()[1], free])
            monkeypatch.setattr(servers, "free_port", lambda: next(ports))
            monkeypatch.setattr(servers, "is_healthy", lambda url: f":{free}/" in url)
            with prefect_server(tmp_path) as url:
                assert url == f"http://127.0.0.1:{free}/api"

    def test_that_does_not_come_up_is_reported_with_its_last_words(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that does not come up is reported with the last lines of its log."""

        def broken(home: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return subprocess.Popen(
                    [sys.executable, "-c", "import sys; sys.exit('the database is from the future')"],
                    stdin=subprocess.PIPE,
                    stderr=output,
                )

        monkeypatch.setattr(servers, "_server_process", broken)
        with (
            pytest.raises(
                ServerUnavailable, match=r"did not come up: the database is from the future .*server\.log"
            ),
            prefect_server(tmp_path),
        ):
            raise AssertionError("unreachable")


class TestConfiguredServer:
    @pytest.mark.slow
    def test_is_used_and_left_running(
        self, running: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = running.wait_ready()
        monkeypatch.setenv("PREFECT_API_URL", url)

        server = start(tmp_path)
        assert server.wait_ready() == url
        server.stop()

        assert not server.ours
        assert is_healthy(url)
        assert list(tmp_path.iterdir()) == []

    def test_that_does_not_answer_is_refused_by_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A configured server that does not answer is refused with its address."""
        monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
        monkeypatch.setattr(servers, "ANSWER_SECONDS", 0.5)

        with (
            pytest.raises(
                ServerUnavailable, match=r"PREFECT_API_URL=http://127\.0\.0\.1:1/api does not answer .*unset"
            ),
            prefect_server(tmp_path),
        ):
            raise AssertionError("unreachable")

    @pytest.mark.slow
    def test_may_be_named_by_a_profile(self, tmp_path: Path) -> None:
        (tmp_path / "profiles.toml").write_text(
            'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://10.0.0.7:4200/api"\n'
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}

        found = subprocess.run(
            [
                sys.executable,
                "-c",
                "from vantage.flows.prefect_server.server import configured_url; print(configured_url())",
            ],
            env={**environment, "PREFECT_HOME": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )

        assert found.stdout.strip() == "http://10.0.0.7:4200/api"

    def test_of_the_environment_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PREFECT_API_URL", "http://10.0.0.8:4200/api")
        assert configured_url() == "http://10.0.0.8:4200/api"
