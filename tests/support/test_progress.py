"""Long runs of tests print lines in place of dots, and each failure at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.progress import LINES, MANY, progress_line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.support.progress import Progress

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
"""


def printed(folder: Path, tests: str, *options: str) -> str:
    """Return what pytest prints for these tests in a folder of their own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_many.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", "-q"]
    ended = subprocess.run(
        [*command, *options, str(folder)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    return ended.stdout


def test_many_tests_print_a_line_for_each_twentieth_and_a_failure_at_once(tmp_path: Path) -> None:
    tests = f"""
import pytest

@pytest.mark.parametrize("number", range({MANY}))
def test_one(number):
    assert number != {MANY // 2}, "the one in the middle"
"""
    for options in ((), ("--numprocesses", "2")):
        lines = printed(tmp_path, tests, *options).splitlines()
        shares = [number for number, line in enumerate(lines) if f"% of {MANY} tests after" in line]
        assert len(shares) == LINES
        [failure] = [number for number, line in enumerate(lines) if "failed in its call" in line]
        assert any("the one in the middle" in line for line in lines[failure : shares[-2]])
        assert not any(line.startswith("...") for line in lines)


def test_few_tests_print_their_dots(tmp_path: Path) -> None:
    found = printed(tmp_path, "def test_one():\n    pass\n\ndef test_two():\n    pass\n")
    assert ".." in found and "tests after" not in found


def test_a_line_names_the_share_the_seconds_and_the_processor() -> None:
    line = progress_line(3250, 13000, 605.4, {"idle": 0.034, "steal": 0.2})
    assert line == "25 % of 13,000 tests after 605 s (processor: idle 3 %, steal 20 %)"
