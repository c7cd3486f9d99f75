"""Each error has a message with a remedy, an exit code and no traceback."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import typer
from obstore.exceptions import GenericError, NotFoundError, PermissionDeniedError
from typer.testing import CliRunner

from tests.support.fork_server import ROOT, WITH_PREFECT
from tests.support.slow import slow
from tests.support.stand_in import command_of
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.cli.output import explained, server_fault, workspace_at
from vantage.runs.workspace import RunError
from vantage.storage.records import BucketNotFound


@pytest.mark.parametrize("kind", [GenericError, NotFoundError, PermissionDeniedError, BucketNotFound])
def test_a_bucket_that_cannot_be_used_is_a_fault_of_the_storage(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, explained(verbose=False):
        raise kind("error sending request\n\nDebug source:\nGeneric { … }")
    assert ended.value.exit_code == ExitCode.STORAGE
    said = capsys.readouterr().err
    assert "cannot be used: error sending request; look at the bucket's address, its login" in said
    assert "Debug source" not in said


@pytest.mark.parametrize("command", [["worker", "--pool", "gpu", "--gpus", ""], ["deployments"]])
def test_a_prefect_server_that_does_not_answer_is_named(command: list[str]) -> None:
    done = WITH_PREFECT.run(
        command_of("vantage.cli.main", *command),
        env={**os.environ, "PREFECT_API_URL": "http://127.0.0.1:1/api"},
        timeout=120,
    )
    assert done.returncode == ExitCode.UNAVAILABLE, done.stderr
    assert "PREFECT_API_URL=http://127.0.0.1:1/api does not answer" in done.stderr
    assert "should not happen" not in done.stderr


class _Fails(BaseHTTPRequestHandler):
    """A server that answers each request as Prefect's does while its database is away."""

    def do_GET(self) -> None:
        if self.path.endswith("/health"):  # Prefect's asks neither the database nor for a login
            self._answer(200, b"true")
        elif self.headers.get("Authorization"):
            self._answer(401, b'{"exception_message":"Unauthorized"}')
        else:
            self._answer(500, b'{"exception_message":"Internal Server Error"}')

    do_POST = do_GET

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def failing_prefect() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Fails) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


_FAILS, _REFUSES = "fails (500 Internal Server Error)", "refuses this login (401 Unauthorized)"
_LOGIN = {"PREFECT_API_AUTH_STRING": "a:b"}


@pytest.mark.parametrize(
    ("command", "login", "said"),
    [
        (["deploy", "quickstart"], {}, _FAILS),
        (["doctor", "--json"], _LOGIN, _REFUSES),
        *slow((["worker", "--pool", "orders"], {}, _FAILS), (["deployments"], _LOGIN, _REFUSES)),
    ],
)
def test_a_prefect_server_that_fails_is_no_fault_of_ours(
    command: list[str], login: dict[str, str], said: str, failing_prefect: str, tmp_path: Path
) -> None:
    done = WITH_PREFECT.run(
        command_of("vantage.cli.main", *command),
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PREFECT_API_URL": failing_prefect,
            "PREFECT_CLIENT_MAX_RETRIES": "0",
            **login,
        },
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == ExitCode.UNAVAILABLE, done.stderr
    assert f"PREFECT_API_URL={failing_prefect} {said}" in done.stdout + done.stderr
    assert "should not happen" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PREFECT_LOGGING_LEVEL", "verbose", "Input should be 'DEBUG'"),
        ("PREFECT_CLIENT_CUSTOM_HEADERS", "junk", "it is no valid value"),
    ],
)
def test_settings_that_prefect_refuses_are_named_by_their_variable(
    name: str, value: str, reason: str
) -> None:
    code = (
        "from vantage.cli.output import explained\n"
        "with explained(False):\n"
        "    from prefect.settings import get_current_settings; get_current_settings()\n"
    )
    others = {key: each for key, each in os.environ.items() if not key.startswith("PREFECT_")}
    allowed = {"PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL"}  # it ends like PREFECT_LOGGING_LEVEL
    done = subprocess.run(
        [sys.executable, "-c", code], env={**others, **allowed, name: value}, capture_output=True, text=True
    )
    assert f"vantage: Prefect refuses {name}='{value}': {reason}" in done.stderr
    assert "INTERNAL_LEVEL" not in done.stderr


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("folder", "folder: Is a directory; name a file"),
        (
            "none/deep.yaml",
            "none/deep.yaml: No such file or directory; correct the path, or make its folder first",
        ),
        ("rows.jsonl/x", "rows.jsonl/x: Not a directory; name a path without a file in place of a folder"),
        ("/dev/full", "No space left on device; make room, and run the same command again"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.jsonl").write_text("")
    done = CliRunner().invoke(
        app, ["deploy", "quickstart", "--workspace", str(tmp_path / "ws"), "--write", place]
    )
    assert done.exit_code == (ExitCode.STORAGE if place == "/dev/full" else ExitCode.BAD_INPUT)
    assert done.stderr.splitlines()[-1] == f"vantage: {said}"


@pytest.mark.parametrize("name", [b"a\xff", "a", 3, None])
def test_every_error_of_the_system_has_a_remedy(
    name: str | bytes | int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in errno.errorcode:
        if isinstance(OSError(number, ""), ConnectionError | TimeoutError):
            continue  # an error of a server, not of a file
        with pytest.raises(typer.Exit) as ended, explained(verbose=False):
            raise OSError(number, os.strerror(number), name)
        said = capsys.readouterr().err
        assert ended.value.exit_code != ExitCode.INTERNAL
        assert "Errno" not in said and len(said.splitlines()) == 1
        assert ";" in said or "cannot be a file's path" in said


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (OSError(errno.EIO, "Input/output error"), ExitCode.STORAGE),
        (OSError(errno.EMFILE, "Too many open files"), ExitCode.STORAGE),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300), ExitCode.BAD_INPUT),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a"), ExitCode.BAD_INPUT),
        (ValueError("seed=x is no number; give one"), ExitCode.BAD_INPUT),
        (ZeroDivisionError("division by zero"), ExitCode.INTERNAL),
        (typer.Exit(7), 7),
    ],
)
def test_an_error_has_its_exit_code_and_no_traceback(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, explained(verbose=False):
        raise error
    said = capsys.readouterr().err
    assert (ended.value.exit_code, "Traceback" in said) == (code, False)
    assert ("this should not happen" in said) == (code == ExitCode.INTERNAL)
    assert len(said) < 300, "a long path is cut in its middle"


def test_a_traceback_is_shown_to_who_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), explained(verbose=True):
        raise ZeroDivisionError
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "says"), [(401, True), (403, True), (404, False), (503, True)])
def test_what_prefect_refuses_is_no_fault_of_ours(
    status: int, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://ada:secret@here/api")
    request = httpx.Request("GET", "http://here/api")
    error = httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))
    said = server_fault(error)
    assert (said is not None) == says
    if said is not None:
        assert str(status) in said and "secret" not in said


def test_a_file_is_no_workspace(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="is a file; name another"):
        workspace_at(str(tmp_path / "file"))
    with pytest.raises(ValueError, match="--workspace=s3:team names no bucket"):
        workspace_at("s3:team")
    assert workspace_at(str(tmp_path / "new")).root == tmp_path / "new"
    assert not (tmp_path / "new").exists()
