"""Digests of code are right, on code that the tests write into a package of their own."""

import ast
import gc
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vantage.attempts import code_digest as subject
from vantage.attempts.code_digest import code_digest, module_digests
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.terms import TERMS

MODULE = '''
"""What it does."""
from vantage.made_up import inner

def double(x):
    """Twice."""
    return 2 * x  # a comment

async def later(x):
    """Some time."""
    return x

class Number:
    """A count."""
    value = 1
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "stage.py").write_text(MODULE)
    (folder / "inner.py").write_text("LIMIT = 3\n")
    (folder / "unrelated.py").write_text("LIMIT = 4\n")
    monkeypatch.setattr(subject, "package_folder", lambda: tmp_path)
    monkeypatch.setattr(subject, "PACKAGES", ("made_up",))
    monkeypatch.setattr(subject, "_PREFIXED", re.compile(r"\bvantage\.(?=made_up\b)"))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that caches what was read, apart from that of other tests."""
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "derived"


def digest() -> str:
    forget_what_was_read()
    return code_digest("vantage.made_up.stage")


def forget_what_was_read() -> None:
    subject.code_digest.cache_clear()
    subject._read.cache_clear()
    subject._kept.cache_clear()
    subject._source.cache_clear()


@pytest.fixture(autouse=True)
def _forget_digests() -> object:
    yield
    forget_what_was_read()


@pytest.mark.parametrize(
    "old, new",
    [
        ("Twice.", "Two times."),
        ("What it does.", "Other words."),
        ("Some time.", "At another time."),
        ("A count.", "How many."),
        ("  # a comment", ""),
        ("return 2 * x", "return (2\n        * x)"),
    ],
)
def test_words_and_layout_do_not_change_the_digest(package: Path, old: str, new: str) -> None:
    before = digest()
    assert old in MODULE
    (package / "stage.py").write_text(MODULE.replace(old, new))
    assert digest() == before


def test_a_changed_number_changes_it(package: Path) -> None:
    before = digest()
    (package / "stage.py").write_text(MODULE.replace("2 * x", "3 * x"))
    assert digest() != before


def test_a_changed_module_that_is_imported_changes_it_and_no_other(package: Path) -> None:
    before = digest()
    (package / "unrelated.py").write_text("LIMIT = 5\n")
    assert digest() == before
    (package / "inner.py").write_text("LIMIT = 5\n")
    assert digest() != before


@pytest.mark.slow
def test_a_row_of_the_table_of_kinds_is_no_code_of_another_kind() -> None:
    """A revision that is raised, and a kind that is added, change it."""
    for kind in KINDS.values():
        digests = module_digests(kind.module)
        assert "schemas.kinds" not in digests
        names = {kind.module.removeprefix("vantage."), "schemas.records.job", "schemas.frozen"}
        assert names <= digests.keys()


@pytest.mark.slow
def test_what_scores_a_term_is_code_of_every_stage_that_scores() -> None:
    scoring = {name for name, kind in KINDS.items() if "tasks.rewards.scoring" in module_digests(kind.module)}
    assert scoring >= {"value_pretraining", "policy_optimization", "best_of_n", "evaluation"}
    for kind in scoring:
        scorers = {term.module.removeprefix("vantage.") for term in TERMS}
        assert scorers <= module_digests(KINDS[kind].module).keys()


def test_code_without_the_prefix_has_the_digest_that_it_had(package: Path) -> None:
    """A module's names, in its imports and in its strings, were ``schemas.x`` before they were ``vantage.schemas.x``."""
    trees = {
        "made_up.stage": MODULE.replace("from vantage.", "from ")
        .replace('"""What it does."""', "")
        .replace('"""Twice."""', "")
        .replace('"""Some time."""', "")
        .replace('"""A count."""', ""),
        "made_up.inner": "LIMIT = 3\n",
        "made_up": "",
    }
    lines = []
    for name in sorted(trees):
        reader = subject._TreeReader()
        text = reader.dump(ast.parse(trees[name]))
        lines.append(f"{name} {hashlib.sha256(text.encode()).hexdigest()}")
    assert digest() == hashlib.sha256("\n".join(lines).encode()).hexdigest()
    before = digest()
    (package / "stage.py").write_text(MODULE + "\nNAME = 'vantage.made_up.inner.LIMIT'\n")
    prefixed = digest()
    (package / "stage.py").write_text(MODULE + "\nNAME = 'made_up.inner.LIMIT'\n")
    assert digest() == prefixed != before
    (package / "stage.py").write_text(MODULE + "\nNAME = 'vantage.other.inner.LIMIT'\n")
    assert digest() != prefixed


@pytest.mark.parametrize(
    "module", ["vantage.flows.pipeline", "tasks.sft", "vantage.tasks.no_such_stage", "json"]
)
def test_a_digest_of_no_code_is_an_error(module: str) -> None:
    with pytest.raises(ValueError, match="there is no code to digest"):
        code_digest(module)


@pytest.fixture
def threads_that_switch_while_trees_are_built() -> Iterator[None]:
    """Make CPython 3.11 go wrong: other threads get their turn in the middle of a garbage collection."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()

    def take_turns(*_: object) -> None:
        sum(range(50))

    sys.setswitchinterval(1e-6)
    gc.set_threshold(7)
    gc.callbacks.append(take_turns)
    yield
    gc.callbacks.remove(take_turns)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_that_switch_while_trees_are_built")
def test_stages_that_begin_together_read_the_code_together() -> None:
    modules = [kind.module for kind in KINDS.values()]
    with ThreadPoolExecutor(len(modules)) as threads:
        together = list(threads.map(code_digest, modules))
    forget_what_was_read()
    assert together == [code_digest(module) for module in modules]


def test_a_library_that_parses_at_the_same_time_does_not_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11's counter of depths is one for all threads."""
    parse, failures = ast.parse, [SystemError("AST constructor recursion depth mismatch")] * 3

    def beside_another(source: bytes) -> ast.Module:
        if failures:
            raise failures.pop()
        return parse(source)

    monkeypatch.setattr(subject.ast, "parse", beside_another)
    assert ast.dump(subject._parsed(b"a = 1")) == ast.dump(parse("a = 1"))
    assert not failures


@pytest.mark.usefixtures("package")
def test_what_a_process_has_read_the_next_does_not_parse(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = digest()
    monkeypatch.setattr(subject, "_parsed", _no_parser)
    assert digest() == first
    [kept] = cache.iterdir()
    kept.unlink()
    with pytest.raises(AssertionError, match="parsed"):
        digest()


def test_what_is_kept_holds_for_the_same_bytes_alone(package: Path) -> None:
    before = digest()
    written = (package / "stage.py").stat()
    (package / "stage.py").write_text(MODULE.replace("2 * x", "3 * x"))
    os.utime(package / "stage.py", ns=(written.st_atime_ns, written.st_mtime_ns))
    assert digest() != before
    (package / "stage.py").write_text(MODULE)
    assert digest() == before


@pytest.mark.usefixtures("package")
def test_what_other_code_has_read_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest()
    later = tmp_path / "code_digest.py"
    later.write_bytes(Path(subject.__file__).read_bytes() + b"# it may read otherwise")
    monkeypatch.setattr(subject, "__file__", str(later))
    monkeypatch.setattr(subject, "_parsed", _no_parser)
    with pytest.raises(AssertionError, match="parsed"):
        digest()


def test_modules_that_are_gone_are_not_kept(package: Path, cache: Path) -> None:
    digest()
    [kept] = cache.iterdir()
    assert b"inner.py" in kept.read_bytes()
    (package / "inner.py").unlink()
    (package / "stage.py").write_text("LIMIT = 5\n")
    digest()
    assert b"inner.py" not in kept.read_bytes()


@pytest.mark.usefixtures("package")
def test_where_nothing_can_be_kept_the_digest_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest()
    (tmp_path / "file").touch()
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "file"))
    assert digest() == expected


def _no_parser(source: bytes) -> ast.Module:
    raise AssertionError(f"parsed {len(source)} bytes")


def test_what_checks_in_a_sandbox_is_code_of_every_stage_that_checks() -> None:
    """The sandbox is started as a process, and never imported, but is in the digest."""
    assert "tasks.rewards.sandbox_inside" in module_digests("vantage.tasks.rewards.sandbox")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("collects", [False, True])
def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        digest()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was_enabled else gc.disable)()
