"""Break the code on purpose, one line at a time, and see whether the tests notice.

    python tests/mutations/mutations.py              every mutation of the lists beside this file
    python tests/mutations/mutations.py 'store/*'    those whose name matches
    python tests/mutations/mutations.py --list
    python tests/mutations/mutations.py --results FILE --shard 1/8

With --results, outcomes are appended to a file as they become known, and a later call goes on after what the file
holds; an entry counts as long as the mutation is the same. outcomes.jsonl beside this file is such a file. --shard tries every eighth, from the first on. --fast runs only
the tests of ``make test``; --only-slow lists the mutations that name none of these.

Each is applied to a copy of the tree, never to the tree itself, and the tests that its list names for it run there until
one fails. A mutation that no test notices is a hole in the tests: the script ends with 1 and names it. So it does for
one that no longer applies (its text has to stand in its file exactly once) or that stops the code from being imported.
At the end, the tests that failed run together on an unchanged copy: a test that fails there too has noticed nothing.

The test that killed a mutation of this name in FILE runs first, and slow tests run last.
"""

import argparse
import ast
import bisect
import fnmatch
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parent
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C reads the lists in a tenth of the time."""
SECONDS = 600
"""The most that one mutation's tests may take; a mutation that hangs them is noticed too, if they end without it."""
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

    @property
    def digest(self) -> str:
        """Return the beginning of the sha256 of all fields: another text or another test makes another mutation."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def load(folder: Path = LISTS) -> list[Mutation]:
    """Return every mutation of every ``*.yaml``.

    A list names groups of tests, then for each file of the project what to change in it: the name says what goes wrong.
    """
    found = []
    for path in sorted(folder.glob("*.yaml")):
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)
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
    """Return the text of the file with the mutation.

    Raises:
        ValueError: it does not apply, or changes nothing but how the code is written.
    """
    text = (root / mutation.file).read_text(encoding="utf-8")
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.name}: its text stands {count} times in {mutation.file}, not once")
    first, last = _statements(text, mutation.old)
    part = "".join(text.splitlines(keepends=True)[first:last])
    changed = part.replace(mutation.old, mutation.new)
    if _is_same(ast.parse(changed), _parsed(part)):
        raise ValueError(f"{mutation.name}: the code of {mutation.file} is the same with it")
    return text.replace(mutation.old, mutation.new)


def _is_same(one: object, other: object) -> bool:
    """Return whether two syntax trees are equal, wherever their nodes stand; ``ast.dump`` takes ten times as long."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        return all(
            _is_same(getattr(one, name, None), getattr(other, name, None)) for name in type(one)._fields
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one == other


def _statements(text: str, old: str) -> tuple[int, int]:
    """Return the range of lines of the module's own statements that a part of its text belongs to: much less to parse."""
    begin = text.index(old)
    first, last = (text.count("\n", 0, place) for place in (begin, begin + len(old) - 1))
    starts = _starts(text)
    number = bisect.bisect_right(starts, first) - 1
    after = bisect.bisect_right(starts, last)
    return starts[max(number, 0)], starts[after] if after < len(starts) else text.count("\n") + 1


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _starts(text: str) -> list[int]:
    """Return the line at which each statement of a module begins, from 0; the first one begins with the file."""
    starts = [
        min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) - 1
        for node in ast.parse(text).body
    ]
    return [0, *starts[1:]]


def copy_tree(target: Path) -> None:
    """Copy every file that git knows or would add, and the bytecode of it that is there."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    names = [Path(name) for name in listed.split("\0") if name]
    caches = {name.parent / "__pycache__" for name in names if name.suffix == ".py"}
    bytecode = [path.relative_to(ROOT) for cache in caches for path in (ROOT / cache).glob("*.pyc")]
    for name in [*names, *bytecode]:
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            # with its time, which bytecode has too; the links are our packages
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


LIBRARIES = (
    "datasets",
    "hypothesis",
    "mlflow.pyfunc",
    "mlflow.store.tracking.dbmodels.models",
    "moto.server",
    "pandera.pyarrow",
    "peft",
    "prefect.server.schemas.actions",
    "pyarrow.parquet",
    "pydantic",
    "safetensors.torch",
    "scipy.stats",
    "sklearn.calibration",
    "transformers.models.llama.modeling_llama",
    "transformers.pipelines",
    "typer.testing",
)
"""Libraries that many tests load: together three seconds of a core for each mutation."""


def warm_up(*, with_libraries: bool) -> None:
    """Load what every test needs and no mutation touches, once: the tests run in forks of this process."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import pytest  # noqa: F401

    if with_libraries:
        for library in LIBRARIES:
            importlib.import_module(library)
        import torch

        torch.set_num_threads(1)
    # the editable installation leads back to the tree itself
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, LISTS)]


def _plugin(first: str, failures: Path) -> object:
    """Return a plugin of pytest that writes what fails, and sorts tests: in the order of the arguments, but ``first`` before
    all and slow ones last.
    """
    import pytest

    class Plugin:
        @pytest.hookimpl(tryfirst=True, wrapper=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
            place = {item: number for number, item in enumerate(items)}
            yield
            items.sort(
                key=lambda item: (
                    item.nodeid != first,
                    item.get_closest_marker("slow") is not None,
                    place[item],
                )
            )

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                with failures.open("a") as file:
                    file.write(json.dumps(report.nodeid) + "\n")

    return Plugin()


@dataclass(frozen=True)
class Ran:
    """One call of pytest."""

    code: int | None
    """pytest's exit code, or −N if signal N ended it; None: it ran out of time."""
    failed: tuple[str, ...]
    """The tests that failed."""
    end: str
    """The last lines that it wrote."""


def run_tests(folder: Path, arguments: Sequence[str], first: str = "", seconds: float = SECONDS) -> Ran:
    """Run pytest in a copy of the tree, in a process of its own.

    Args:
        first: the test that runs before the others.
        seconds: the most that it may take.
    """
    log, failures = folder.parent / "log", folder.parent / "failures"
    process = os.fork()
    if not process:
        code = 99
        try:
            code = _in_the_copy(folder, arguments, log, _plugin(first, failures))
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while not (done := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    if not done[0]:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    failed = failures.read_text().splitlines() if failures.exists() else []
    return Ran(
        os.waitstatus_to_exitcode(done[1]) if done[0] else None,
        tuple(dict.fromkeys(json.loads(line) for line in failed)),
        "\n".join(log.read_text(errors="replace").splitlines()[-12:] if log.exists() else []),
    )


def _in_the_copy(folder: Path, arguments: Sequence[str], log: Path, plugin: object) -> int:
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
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[plugin]))


@dataclass(frozen=True)
class Tried:
    """The result of trying a mutation."""

    outcome: str
    seconds: float
    tests: tuple[str, ...]
    """Tests that failed, and so noticed the mutation."""
    told: str = ""
    """Why no test noticed it."""


@contextmanager
def copied(original: Path) -> Iterator[Path]:
    """Yield a tree that shares its files with another, in a folder with room for logs."""
    # A process that a test has left may write bytecode while the folder is removed.
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary).resolve() / "tree"
        # No test writes into the tree. A symbolic link's target would be code without the mutation.
        shutil.copytree(original, folder, symlinks=True, copy_function=os.link)
        yield folder


def try_mutation(mutation: Mutation, options: Sequence[str], original: Path, first: str = "") -> Tried:
    """Run the tests on a tree like ``original`` but for the mutation, until one fails.

    Args:
        options: of pytest.
        first: the test that runs before the others.
    """
    start = time.monotonic()
    try:
        changed = mutated(mutation, original)
    except (ValueError, SyntaxError) as error:
        return Tried(BROKEN, 0.0, (), str(error))
    with copied(original) as folder:
        file = folder / mutation.file
        for shared in [file, *(file.parent / "__pycache__").glob(f"{file.stem}.*")]:
            shared.unlink()
        file.write_text(changed, encoding="utf-8")
        ran = run_tests(folder, ["-x", *options, *mutation.tests], first)
    seconds = round(time.monotonic() - start, 1)
    match ran.code:
        case 1:
            return Tried(KILLED, seconds, ran.failed)
        case None:
            return Tried(KILLED, seconds, (), f"nothing after {SECONDS} s")
        case int(code) if code < 0:
            return Tried(KILLED, seconds, (), f"signal {-code} ended the tests")
        case 0 | 5:  # 5: no test is in the chosen tier
            return Tried(SURVIVED, seconds, (), ran.end.rpartition("\n")[2])
        case _:
            return Tried(BROKEN, seconds, (), ran.end)


def failing(tests: Sequence[str], options: Sequence[str], original: Path) -> set[str]:
    """Return the arguments of pytest whose tests do not pass without a mutation. More than one are names of single tests."""
    if not tests:
        return set()
    with copied(original) as folder:
        ran = run_tests(folder, [*options, *tests], seconds=SECONDS + 20 * len(tests))
    if len(tests) == 1:
        return set() if ran.code == 0 else set(tests)
    if ran.code in {0, 1}:
        return set(ran.failed)
    # pytest runs none if one has another name now
    return {test for test in tests if failing([test], options, original)}


class Results:
    """Outcomes in a file of JSON Lines, appended in the order of the lists; without a file, they are kept in memory only.

    Args:
        tier: ``all`` or ``fast``, the tests that run. Entries of the other tier are not read.
    """

    def __init__(self, path: Path | None, tier: str) -> None:
        self._path = path
        self._tier = tier
        self.tried: dict[str, Tried] = {}
        """Digest of a mutation → its outcome."""
        self.killers: dict[str, str] = {}
        """Name of a mutation → the test that killed it last."""
        self.passed: set[str] = set()
        """Tests that pass without a mutation."""
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            entry = json.loads(line)
            if entry["tier"] != tier:
                continue
            if "passed" in entry:
                self.passed.update(entry["passed"])
            else:
                tried = Tried(
                    entry["outcome"], entry["seconds"], tuple(entry.get("tests", ())), entry.get("told", "")
                )
                self._keep(entry["name"], entry["digest"], tried)

    def _keep(self, name: str, digest: str, tried: Tried) -> None:
        self.tried[digest] = tried
        if tried.outcome == KILLED and tried.tests:
            self.killers[name] = tried.tests[0]

    def add(self, mutation: Mutation, tried: Tried) -> None:
        """Record an outcome."""
        self._keep(mutation.name, mutation.digest, tried)
        told = {name: value for name, value in asdict(tried).items() if value}
        self._append({"name": mutation.name, "digest": mutation.digest, "seconds": 0.0, **told})

    def add_passed(self, tests: set[str]) -> None:
        """Record that tests pass without a mutation."""
        self.passed |= tests
        if tests:
            self._append({"passed": sorted(tests)})

    def _append(self, entry: dict[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"tier": self._tier, **entry}) + "\n")


def run_all(
    mutations: Sequence[Mutation],
    *,
    jobs: int,
    results: Results,
    options: Sequence[str] = (),
    again: bool = False,
    bare: bool = False,
) -> int:
    """Try the mutations that have no result yet. Returns the exit code: 0 if every mutation is killed.

    Args:
        options: arguments of pytest that come before the tests.
        again: try the mutations that have a result too.
        bare: the tests need no library beside pytest.
    """
    warm_up(with_libraries=not bare)
    left = [each for each in mutations if again or each.digest not in results.tried]
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        original = Path(temporary).resolve()
        copy_tree(original)  # read once, so that later changes of the tree change nothing here

        def attempt(mutation: Mutation) -> Tried:
            return try_mutation(mutation, options, original, results.killers.get(mutation.name, ""))

        with ThreadPoolExecutor(jobs) as workers:
            for mutation, tried in zip(left, workers.map(attempt, left), strict=True):
                record(mutation, tried, results)
        check_killers(mutations, results, options, original)
    killed = [results.tried[each.digest].outcome for each in mutations].count(KILLED)
    print(f"{killed} of {len(mutations)} mutations killed")
    return 0 if killed == len(mutations) else 1


def record(mutation: Mutation, tried: Tried, results: Results) -> None:
    """Record and print an outcome."""
    results.add(mutation, tried)
    told = tried.told or " ".join(tried.tests)
    print(f"{tried.outcome:8} {tried.seconds:5.0f} s  {mutation.name}  {told}", flush=True)


def check_killers(
    mutations: Sequence[Mutation], results: Results, options: Sequence[str], original: Path
) -> None:
    """Take a mutation's outcome back where what failed, or hung, does so without a mutation too."""
    killed = {each: results.tried[each.digest] for each in mutations}
    killed = {each: tried for each, tried in killed.items() if tried.outcome == KILLED}
    new = {test for tried in killed.values() for test in tried.tests} - results.passed
    wrong = failing(sorted(new), options, original)
    results.add_passed(new - wrong)
    for mutation, tried in killed.items():
        alone = {
            test for test in mutation.tests if not tried.tests and failing([test], options, original)
        } | wrong.intersection(tried.tests)
        if alone:
            told = f"{' '.join(sorted(alone))} fails without any mutation"
            record(mutation, Tried(BROKEN, tried.seconds, tried.tests, told), results)


@cache
def fast_functions(path: Path) -> frozenset[str] | None:
    """Return the names of the file's tests that ``make test`` runs; None if the whole file is marked as slow."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "pytestmark"
            and _is_slow(node.value)
        ):
            return None
    slow_classes = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(map(_is_slow, node.decorator_list))
    ]
    in_slow_classes = {node for each in slow_classes for node in ast.walk(each)}
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test")
        and node not in in_slow_classes
        and not any(map(_is_slow, node.decorator_list))
    )


def _is_slow(marks: ast.expr) -> bool:
    return any(ast.unparse(each) == "pytest.mark.slow" for each in ast.walk(marks))


def names_fast_tests(mutation: Mutation, root: Path = ROOT) -> bool:
    """Return whether ``make test`` runs one of the mutation's tests."""
    for test in mutation.tests:
        name, _, case = test.partition("::")
        function, path = case.rpartition("::")[2].partition("[")[0], root / name
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            fast = fast_functions(file)
            if fast and (not function or function in fast):
                return True
    return False


def shard(mutations: Sequence[Mutation], text: str) -> list[Mutation]:
    """Return every n-th mutation, starting with the i-th, for the text ``i/n``.

    Raises:
        ValueError: it has another form, or i is not in 1 … n.
    """
    first, separator, count = text.partition("/")
    if not (separator and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise ValueError(f"--shard {text}: write i/n with 1 ≤ i ≤ n, such as 1/8")
    return list(mutations[int(first) - 1 :: int(count)])


def selected(mutations: Iterable[Mutation], patterns: Sequence[str]) -> list[Mutation]:
    """Return the mutations whose names match one of the patterns, or all of them without patterns."""
    return [m for m in mutations if not patterns or any(fnmatch.fnmatch(m.name, each) for each in patterns)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*", metavar="NAME", help="names or patterns such as 'updates/*'")
    parser.add_argument("--jobs", type=int, default=1, help="mutations tried side by side")
    parser.add_argument("--list", action="store_true", help="only print the mutations")
    parser.add_argument(
        "--only-slow", action="store_true", help="only print those that name no test of `make test`"
    )
    parser.add_argument("--fast", action="store_true", help="run only the tests of `make test`")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="append outcomes, and skip those it holds"
    )
    parser.add_argument("--again", action="store_true", help="try those too that FILE holds")
    parser.add_argument(
        "--shard", default="1/1", metavar="I/N", help="try every N-th mutation, from the I-th on"
    )
    parser.add_argument("--bare", action="store_true", help="for tests that need neither torch nor tables")
    options = parser.parse_args(arguments)
    try:
        mutations = shard(selected(load(), options.patterns), options.shard)
    except ValueError as error:
        parser.error(str(error))
    if options.only_slow:
        mutations = [mutation for mutation in mutations if not names_fast_tests(mutation)]
    if options.list or options.only_slow:
        for mutation in mutations:
            print(f"{mutation.name}  ({mutation.file}; {' '.join(mutation.tests)})")
        return 0
    if not mutations:
        print("no mutation has such a name; --list shows them", file=sys.stderr)
        return 1
    results = Results(options.results, "fast" if options.fast else "all")
    return run_all(
        mutations,
        jobs=options.jobs,
        results=results,
        options=["-m", "not slow"] if options.fast else [],
        again=options.again,
        bare=options.bare,
    )


if __name__ == "__main__":
    sys.exit(main())
