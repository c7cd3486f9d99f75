import subprocess
import sys
from pathlib import Path

import pytest

from vantage.attempts.garbage import THRESHOLDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def tied(folder: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(code)
    return subprocess.Popen(
        [sys.executable, "-m", "vantage.flows.prefect_server.tied_process", "program", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{folder}"},
    )


def test_the_module_runs_as_the_main_program_with_its_arguments(tmp_path: Path) -> None:
    process = tied(tmp_path, "import sys; print(__name__, sys.argv[1:]); sys.exit(3)", "a", "--b")

    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.read() == "__main__ ['a', '--b']\n"
    assert process.wait(timeout=30) == 3
    process.stdin.close()


def test_it_looks_for_garbage_less_often(tmp_path: Path) -> None:
    """The tied process runs Python's garbage collection less often."""
    process = tied(tmp_path, "import gc; print(gc.get_threshold())")
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.read() == f"{THRESHOLDS}\n"
    process.stdin.close()
    process.wait(timeout=30)


def test_it_may_end_in_order_when_standard_input_closes(tmp_path: Path) -> None:
    process = tied(
        tmp_path,
        "import os, signal, sys, time\n"
        "def end(*_): os.write(1, b'in order'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)",
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"

    output, _ = process.communicate(timeout=30)  # closes its standard input

    assert output == "in order"
    assert process.returncode == 0


def test_it_ends_even_if_it_is_deaf_to_sigterm(tmp_path: Path) -> None:
    """The tied process ends when its input closes, also if it ignores SIGTERM."""
    process = tied(
        tmp_path,
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)",
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"

    process.communicate(timeout=30)

    assert process.returncode == 1
