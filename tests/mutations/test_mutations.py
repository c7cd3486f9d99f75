"""The lists of mutations still fit the code, and the script tells a mutation that is noticed from one that is not."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mutations.mutations import (
    LISTS,
    ROOT,
    Mutation,
    load,
    mutated,
    names_fast_tests,
    selected,
    shard,
)

all_mutations = cache(load)
"""All mutations, read when the first test asks for them."""


def test_there_are_enough_and_none_hides_another() -> None:
    """YAML keeps the last of two equal names, so the entries are counted as text too."""
    written = sum(path.read_text().count("\n      old: ") for path in LISTS.glob("*.yaml"))
    assert len(all_mutations()) == len({mutation.name for mutation in all_mutations()}) == written >= 300


def test_each_still_applies() -> None:
    """The text of each mutation occurs once in its file, its replacement is other code, and its tests exist."""
    text_of = cache(lambda file: (ROOT / file).read_text())
    misses = []
    for mutation in all_mutations():
        try:
            mutated(mutation)
        except (ValueError, SyntaxError, OSError) as error:
            misses.append(f"{mutation.name}: {error}")
        for test in mutation.tests:
            file, _, case = test.partition("::")
            function = case.rpartition("::")[2].partition("[")[0]
            if not (ROOT / file).exists():
                misses.append(f"{mutation.name}: there is no {file}")
            elif function and f"def {function}(" not in text_of(file):
                misses.append(f"{mutation.name}: there is no {test}")
    assert not misses, "\n".join(misses)


def test_make_test_runs_a_test_of_nearly_every_mutation() -> None:
    only_slow = [mutation.name for mutation in all_mutations() if not names_fast_tests(mutation)]
    assert len(only_slow) <= 24, "\n".join(only_slow)


SLOW_AND_FAST = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_slow(number): ...

def test_fast(): ...

@pytest.mark.slow
class TestSlow:
    def test_of_a_slow_class(self): ...

class TestFast:
    def test_of_a_class(self): ...
"""


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (("tests/test_whole.py",), False),
        (("tests/test_whole.py::test_one",), False),
        (("tests/test_parts.py::test_slow",), False),
        (("tests/test_parts.py::test_fast",), True),
        (("tests/test_parts.py::TestSlow::test_of_a_slow_class",), False),
        (("tests/test_parts.py::TestFast::test_of_a_class",), True),
        (("tests/test_whole.py", "tests/test_parts.py"), True),
        (("tests",), True),
    ],
)
def test_the_tier_of_a_mutations_tests_is_read_from_their_marks(
    tests: tuple[str, ...], expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    marks = "pytestmark = [pytest.mark.timeout(9), pytest.mark.slow]"
    (tmp_path / "tests/test_whole.py").write_text(f"import pytest\n\n{marks}\n\ndef test_one(): ...\n")
    (tmp_path / "tests/test_parts.py").write_text(SLOW_AND_FAST)
    assert names_fast_tests(Mutation("list/name", "code.py", "", "", tests), tmp_path) is expected


def test_shards_share_the_mutations_out() -> None:
    parts = [shard(all_mutations(), f"{number}/7") for number in range(1, 8)]
    assert sorted(each.name for part in parts for each in part) == sorted(
        each.name for each in all_mutations()
    )
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--shard {text}: write i/n"):
        shard(all_mutations(), text)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("no such text", "", "0 times"),
        ("import", "", "times"),
        ("# a comment\n", "# another\n", "the same"),
        ("x = 1", "x = (\n        1)", "the same"),
        ("x = 1\n\n@d", "x = 1\n@d", "the same"),
    ],
)
def test_one_that_does_not_apply_is_refused(old: str, new: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "# a comment\nimport a\nimport b\ndef f():\n    x = 1\n\n@d\ndef g(): ...\n"
    )
    with pytest.raises(ValueError, match=reason):
        mutated(Mutation("list/name", "code.py", old, new, ()), tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import a", "import c"),
        ("x = 1", "x = 2"),
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = 1\n\n@d", "x = 1\n\n@e"),
        ("@d\n", ""),
        ("...", "pass"),
        ("g(): ...", "g(): ...\ny = 2"),
    ],
)
def test_one_that_changes_code_applies(old: str, new: str, tmp_path: Path) -> None:
    text = "# a comment\nimport a\nimport b\ndef f():\n    x = 1\n\n@d\ndef g(): ..."
    (tmp_path / "code.py").write_text(text)
    assert mutated(Mutation("list/name", "code.py", old, new, ()), tmp_path) == text.replace(old, new)


def test_names_are_chosen_by_patterns() -> None:
    assert selected(all_mutations(), []) == all_mutations()
    assert {m.name.split("/")[0] for m in selected(all_mutations(), ["algorithms/*"])} == {"algorithms"}
    assert selected(all_mutations(), ["no/such"]) == []


SMALL_LIST = """
tests: {all: [tests/test_small.py]}
mutations:
  small/code.py:
    noticed: {old: "doubled = 2", new: "doubled = 3", tests: all}
    unnoticed: {old: "unused = 1", new: "unused = 2", tests: all}
    not-importable: {old: "import math", new: "import no_such_module", tests: all}
    gone: {old: "no such text", new: "", tests: all}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a copy of the script in a tree of one test and one module, which is imported by a link as ours are."""
    script = tmp_path / "tests/mutations/mutations.py"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests/mutations/mutations.py", script)
    (script.parent / "small.yaml").write_text(SMALL_LIST)
    (tmp_path / "vantage").mkdir()
    (tmp_path / "vantage/__init__.py").touch()
    (tmp_path / "small").mkdir()
    (tmp_path / "vantage/small").symlink_to("../small")
    (tmp_path / "small/code.py").write_text("import math\n\ndoubled = 2\nunused = 1\n")
    test = "from vantage.small import code\n\ndef test_small():\n    assert code.doubled == 2\n"
    (tmp_path / "tests/test_small.py").write_text(test)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return script


def run_script(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), "--bare", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=script.parents[2], env=environment, capture_output=True, text=True)


def outcomes(ran: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {line.split()[3]: line.split()[0] for line in ran.stdout.splitlines() if " small/" in line}


@pytest.mark.slow
def test_the_script_tells_what_is_noticed_from_what_is_not(script: Path) -> None:
    ran = run_script(script)
    assert outcomes(ran) == {
        "small/code/noticed": "killed",
        "small/code/unnoticed": "SURVIVED",
        "small/code/not-importable": "BROKEN",
        "small/code/gone": "BROKEN",
    }, ran.stdout + ran.stderr
    assert ran.returncode == 1
    assert "small/code/noticed  tests/test_small.py::test_small\n" in ran.stdout
    assert "1 of 4 mutations killed" in ran.stdout


@pytest.mark.slow
def test_the_script_goes_on_where_a_file_of_results_ends(script: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "results.jsonl")
    first = run_script(script, "--results", file, "--shard", "1/2")
    assert set(outcomes(first)) == {"small/code/noticed", "small/code/not-importable"}
    rest = run_script(script, "--results", file)
    assert set(outcomes(rest)) == {"small/code/unnoticed", "small/code/gone"}
    assert "1 of 4 mutations killed" in rest.stdout
    changed = SMALL_LIST.replace("doubled = 3", "doubled = 4")
    (script.parent / "small.yaml").write_text(changed)
    assert set(outcomes(run_script(script, "--results", file))) == {"small/code/noticed"}, "another mutation"
    entries = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [each["name"].removeprefix("small/code/") for each in entries if "name" in each] == [
        *("noticed", "not-importable", "unnoticed", "gone", "noticed")
    ], "each once"
    passed = [each["passed"] for each in entries if "passed" in each]
    assert passed == [["tests/test_small.py::test_small"]], "tried once without a mutation"
    again = run_script(script, "--results", file, "--again")
    assert set(outcomes(again)) == {
        f"small/code/{name}" for name in ("noticed", "not-importable", "unnoticed", "gone")
    }


@pytest.mark.slow
def test_a_test_that_fails_without_a_mutation_kills_none(script: Path, tmp_path: Path) -> None:
    with (tmp_path / "tests/test_small.py").open("a") as test:
        test.write("\n\ndef test_that_always_fails():\n    assert False\n")
    ran = run_script(script)
    assert ran.returncode == 1
    assert outcomes(ran) == {
        "small/code/noticed": "killed",
        "small/code/unnoticed": "BROKEN",
        "small/code/not-importable": "BROKEN",
        "small/code/gone": "BROKEN",
    }, ran.stdout + ran.stderr
    assert "tests/test_small.py::test_that_always_fails fails without any mutation" in ran.stdout
    assert "1 of 4 mutations killed" in ran.stdout


ORDERED = """
import pytest

def test_first(): order("first")

@pytest.mark.slow
def test_slow(): order("slow")

def test_second(): order("second")

def test_killer(): order("killer")

def order(name):
    with open(__file__ + ".order", "a") as file:
        file.write(name + " ")
"""


def code_of(folder: Path, arguments: str) -> str:
    """Return, as text, the code of ``run_tests`` with these arguments after the folder, called in a process of its own."""
    (folder / "vantage").mkdir()
    (folder / "vantage/__init__.py").touch()
    code = f"import sys, pathlib; from mutations import run_tests; print(run_tests(pathlib.Path(sys.argv[1]), {arguments}).code)"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(LISTS)}
    command = [sys.executable, "-c", code, str(folder)]
    ran = subprocess.run(
        command, cwd=folder.parent, env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder for a tree."""
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


def test_the_test_that_killed_a_mutation_runs_first_and_slow_ones_last(folder: Path) -> None:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (folder / "test_ordered.py").write_text(ORDERED)
    assert code_of(folder, "['test_ordered.py'], 'test_ordered.py::test_killer'") == "0"
    assert (folder / "test_ordered.py.order").read_text() == "killer first second slow "


@pytest.mark.parametrize(
    ("does", "code"),
    [("os.kill(os.getpid(), signal.SIGHUP)", f"-{int(signal.SIGHUP)}"), ("time.sleep(600)", "None")],
)
def test_a_signal_that_ends_the_tests_is_told_from_a_hang(does: str, code: str, folder: Path) -> None:
    (folder / "test_it.py").write_text(f"import os, signal, time\n\ndef test_it():\n    {does}\n")
    assert code_of(folder, "['test_it.py'], seconds=3") == code
