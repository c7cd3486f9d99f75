"""Break the code on purpose, one line at a time, and see whether the tests notice.

    python tests/mutations/mutations.py              every mutation of the lists beside this file
    python tests/mutations/mutations.py 'store/*'    those whose name matches
    python tests/mutations/mutations.py --list

Each is applied to a copy of the tree, never to the tree itself, and the tests that its list names for it run there until
one fails. A mutation that no test notices is a hole in the tests: the script ends with 1 and names it. So it does for
one that no longer applies (its text has to stand in its file exactly once) or that stops the code from being imported.
First the same tests run on an unchanged copy, and have to pass.
"""

import argparse
import ast
import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parent
SECONDS = 600
"""The most that one mutation's tests may take; a mutation that hangs them is noticed too."""
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"


@dataclass(frozen=True)
class Mutation:
    """One change that makes the code wrong."""

    name: str
    """``list/file/what-goes-wrong``."""
    file: str
    old: str
    """Stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest; one of these tests has to fail."""


def load(folder: Path = LISTS) -> list[Mutation]:
    """Every mutation of every ``*.yaml``.

    A list names groups of tests, then for each file of the project what to change in it: the name says what goes wrong.
    """
    found = []
    for path in sorted(folder.glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for file, changes in content["mutations"].items():
            for name, change in changes.items():
                tests = [test for group in change["tests"].split() for test in content["tests"][group]]
                found.append(
                    Mutation(
                        f"{path.stem}/{Path(file).stem}/{name}",
                        file,
                        change["old"],
                        change["new"],
                        tuple(tests),
                    )
                )
    return found


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The text of the file with the mutation.

    Raises:
        ValueError: it does not apply, or changes nothing but how the code is written.
    """
    text = (root / mutation.file).read_text(encoding="utf-8")
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.name}: its text stands {count} times in {mutation.file}, not once")
    changed = text.replace(mutation.old, mutation.new)
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
        raise ValueError(f"{mutation.name}: the code of {mutation.file} is the same with it")
    return changed


def copy_tree(target: Path) -> None:
    """Every file that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name, follow_symlinks=False)  # links are packages


def warm_up() -> None:
    """Load what every test needs and no mutation touches, once: the tests run in forks of this process."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    import hypothesis  # noqa: F401
    import pandera.pyarrow  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # the editable installation leads back to the tree itself
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, LISTS)]


def run_tests(folder: Path, tests: Sequence[str], log: Path) -> int:
    """pytest's exit code for the tests in a copy of the tree, in a process of its own; killed by time: −1."""
    process = os.fork()
    if not process:
        code = 99
        try:
            code = _in_the_copy(folder, tests, log)
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -1


def _in_the_copy(folder: Path, tests: Sequence[str], log: Path) -> int:
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "PYTEST_DEBUG_TEMPROOT": str(folder.parent)}
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    import pytest

    import vantage

    assert Path(vantage.__path__[0]).is_relative_to(folder), vantage.__path__
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


@dataclass(frozen=True)
class Tried:
    """What became of a mutation."""

    outcome: str
    seconds: float
    told: str
    """The test that noticed it, or the end of what pytest wrote."""


def try_mutation(mutation: Mutation | None, tests: Sequence[str], original: Path) -> Tried:
    """Run the tests on a copy of ``original`` with the mutation; None: without any."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        folder = Path(temporary).resolve() / "tree"
        shutil.copytree(original, folder, symlinks=True)  # a link's target would be code without the mutation
        if mutation is not None:
            try:
                (folder / mutation.file).write_text(mutated(mutation, original), encoding="utf-8")
            except (ValueError, SyntaxError) as error:
                return Tried(BROKEN, 0.0, str(error))
        log = Path(temporary) / "log"
        code = run_tests(folder, tests, log)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    # 1: a test failed; −1: it hung; all else but 0 says that the tests never ran
    outcome = {0: SURVIVED, 1: KILLED, -1: KILLED}.get(code, BROKEN)
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in lines if line.startswith("FAILED ")]
    end = {KILLED: [], SURVIVED: lines[-1:], BROKEN: lines[-12:]}[outcome]
    told = "\n".join([*failed, *end])
    return Tried(outcome, time.monotonic() - start, told or f"nothing after {SECONDS} s")


def run_all(mutations: Sequence[Mutation], *, jobs: int) -> int:
    """Exit code: 0 where every mutation is killed."""
    warm_up()
    left: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        original = Path(temporary).resolve()
        copy_tree(original)  # once: who goes on working on the tree changes nothing here
        tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
        without = try_mutation(None, tests, original)
        if without.outcome != SURVIVED:
            print(f"the tests fail without any mutation:\n{without.told}", file=sys.stderr)
            return 1
        with ThreadPoolExecutor(jobs) as workers:
            tried = workers.map(lambda mutation: try_mutation(mutation, mutation.tests, original), mutations)
            for mutation, each in zip(mutations, tried, strict=True):
                print(f"{each.outcome:8} {each.seconds:5.0f} s  {mutation.name}  {each.told}", flush=True)
                if each.outcome != KILLED:
                    left.append(mutation.name)
    print(f"{len(mutations) - len(left)} of {len(mutations)} mutations killed")
    return 1 if left else 0


def selected(mutations: Iterable[Mutation], patterns: Sequence[str]) -> list[Mutation]:
    """Those whose name matches a pattern; without patterns, all."""
    return [m for m in mutations if not patterns or any(fnmatch.fnmatch(m.name, each) for each in patterns)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*", metavar="NAME", help="names or patterns such as 'updates/*'")
    parser.add_argument("--jobs", type=int, default=1, help="mutations tried side by side")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    options = parser.parse_args(arguments)
    mutations = selected(load(), options.patterns)
    if options.list:
        for mutation in mutations:
            print(f"{mutation.name}  ({mutation.file}; {' '.join(mutation.tests)})")
        return 0
    if not mutations:
        print("no mutation has such a name; --list shows them", file=sys.stderr)
        return 1
    return run_all(mutations, jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
