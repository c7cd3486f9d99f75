"""The commands that an export's last lines and card print start the server and ask it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.ports import own_port
from tests.support.small_chat_run import WORD
from vantage.cli.main import app
from vantage.runs.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.needs("curl")]
PROMPT = "say it 71"


@contextmanager
def served(command: list[str], port: int) -> Iterator[None]:
    """Run a printed command on another port until the end of the block."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env={**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not _answers(port):
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "the server did not answer"
            time.sleep(0.2)
        yield
    finally:
        with suppress(ProcessLookupError):  # the server has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def test_the_cards_commands_start_the_server_and_get_the_models_answer(
    small_chat_run: Workspace, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    done = CliRunner().invoke(
        app, ["export", "run:latest", str(folder), "--workspace", small_chat_run.address]
    )
    assert done.exit_code == 0, done.output
    card = (folder / "README.md").read_text()
    serve = next(line for line in card.splitlines() if line.startswith("transformers serve"))
    ask = card[card.index("curl http://localhost:8000") :].split("\n\n")[0].replace("\\\n", " ")
    port = own_port()
    words = shlex.split(ask.replace("PROMPT", PROMPT).replace("localhost:8000", f"127.0.0.1:{port}"))
    with served(shlex.split(serve.partition("#")[0]), port):
        answers = [
            json.loads(subprocess.run(words, capture_output=True, check=True, timeout=120).stdout)["choices"]
            for _ in range(5)
        ]
    said = [choice["message"]["content"] for [choice] in answers]
    assert said.count(WORD) >= 3, f"they are sampled: {said}"
