"""The lists of mutations still fit the code, and the script tells a mutation that is noticed from one that is not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations.mutations import (
    LISTS,
    ROOT,
    Mutation,
    load,
    mutated,
    selected,
)

ALL = load()


def test_there_are_enough_and_none_hides_another() -> None:
    """YAML keeps the last of two equal names, so the entries are counted as text too."""
    written = sum(path.read_text().count("\n      old: ") for path in LISTS.glob("*.yaml"))
    assert len(ALL) == len({mutation.name for mutation in ALL}) == written >= 300


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_it_still_applies(mutation: Mutation) -> None:
    """Its text stands once in its file, and what it makes of it is other code; its tests are there."""
    mutated(mutation)
    for test in mutation.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).exists()
        assert not function or f"def {function}(" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [("no such text", "", "0 times"), ("import", "", "times"), ("# a comment\n", "# another\n", "the same")],
)
def test_one_that_does_not_apply_is_refused(old: str, new: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("# a comment\nimport a\nimport b\n")
    with pytest.raises(ValueError, match=reason):
        mutated(Mutation("list/name", "code.py", old, new, ()), tmp_path)


def test_names_are_chosen_by_patterns() -> None:
    assert selected(ALL, []) == ALL
    assert {m.name.split("/")[0] for m in selected(ALL, ["algorithms/*"])} == {"algorithms"}
    assert selected(ALL, ["no/such"]) == []


SMALL_LIST = """
tests: {all: [tests/test_small.py]}
mutations:
  small.py:
    noticed: {old: "doubled = 2", new: "doubled = 3", tests: all}
    unnoticed: {old: "unused = 1", new: "unused = 2", tests: all}
    not-importable: {old: "import math", new: "import no_such_module", tests: all}
    gone: {old: "no such text", new: "", tests: all}
"""


def test_the_script_tells_what_is_noticed_from_what_is_not(tmp_path: Path) -> None:
    """On a tree of one module and one test, which stays as it is."""
    script = tmp_path / "tests/mutations/mutations.py"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests/mutations/mutations.py", script)
    (script.parent / "small.yaml").write_text(SMALL_LIST)
    (tmp_path / "vantage").mkdir()
    (tmp_path / "vantage/__init__.py").touch()
    code = "import math\n\ndoubled = 2\nunused = 1\n"
    (tmp_path / "small.py").write_text(code)
    test = "import small\n\ndef test_small():\n    assert small.doubled == 2\n"
    (tmp_path / "tests/test_small.py").write_text(test)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    outcomes = {line.split()[3]: line.split()[0] for line in ran.stdout.splitlines() if " small/" in line}
    assert outcomes == {
        "small/small/noticed": "killed",
        "small/small/unnoticed": "SURVIVED",
        "small/small/not-importable": "BROKEN",
        "small/small/gone": "BROKEN",
    }, ran.stdout + ran.stderr
    assert ran.returncode == 1
    assert "small/small/noticed  tests/test_small.py::test_small\n" in ran.stdout
    assert "1 of 4 mutations killed" in ran.stdout
