"""Digests of code that the tests write themselves, in a package of their own."""

import ast
import gc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.attempts import provenance as subject
from flows.attempts.provenance import code_digest, drift, module_digests, provenance
from schemas.kinds import KINDS
from schemas.recipe.terms import TERMS

MODULE = '''
"""What it does."""
from made_up import inner

def double(x):
    """Twice."""
    return 2 * x  # a comment
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "stage.py").write_text(MODULE)
    (folder / "inner.py").write_text("LIMIT = 3\n")
    (folder / "unrelated.py").write_text("LIMIT = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(subject, "PACKAGES", ("made_up",))
    return folder


def digest() -> str:
    forget_what_was_read()
    return code_digest("made_up.stage")


def forget_what_was_read() -> None:
    subject._read.cache_clear()
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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_work_has_a_provenance(kind: str) -> None:
    made_with = provenance(kind, threads=2, world_size=1)
    assert made_with["threads"] == "2"
    assert made_with["torch"].startswith("2.")
    assert len(made_with["code"]) == 64


def test_a_row_of_the_table_of_kinds_is_no_code_of_another_kind() -> None:
    """A revision that is raised, and a kind that is added, change it."""
    for kind in KINDS.values():
        digests = module_digests(kind.module)
        assert "schemas.kinds" not in digests
        assert {kind.module, "schemas.records.job", "schemas.frozen"} <= digests.keys()


def test_what_scores_a_term_is_code_of_every_stage_that_scores() -> None:
    scoring = {name for name, kind in KINDS.items() if "tasks.rewards.scoring" in module_digests(kind.module)}
    assert scoring >= {"value_pretraining", "policy_optimization", "best_of_n", "evaluation"}
    for kind in scoring:
        assert {term.module for term in TERMS} <= module_digests(KINDS[kind].module).keys()


def test_drift_says_what_was_and_what_is(package: Path) -> None:
    assert drift({"torch": "2.11.0", "threads": "2"}, {"torch": "2.13.0", "threads": "2"}) == [
        "torch: 2.11.0 → 2.13.0"
    ]
    assert drift({"code": "a" * 64}, {"code": "b" * 64}) == ["code: aaaaaaaaaaaa → bbbbbbbbbbbb"]
    assert drift({}, {"device": "cpu"}) == ["device: unknown → cpu"]
    assert drift({"resumed_across": "…", "device": "cpu"}, {"device": "cpu"}) == []


def test_the_gpu_is_the_one_that_the_driver_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path / "gpus" / "0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   7\n")
    monkeypatch.setattr(subject, "NVIDIA", tmp_path)
    assert provenance("sft", threads=1, world_size=1)["device"] == "NVIDIA H200"
    monkeypatch.setenv("VANTAGE_CUDA_GRAPHS", "0")
    assert provenance("sft", threads=1, world_size=1)["device"] == "NVIDIA H200 without CUDA graphs"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert provenance("sft", threads=1, world_size=1)["device"] == "cpu"


@pytest.fixture
def threads_that_switch_while_trees_are_built() -> Iterator[None]:
    """What lets CPython 3.11 go wrong: other threads get their turn in the middle of a garbage collection."""
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


@pytest.mark.usefixtures("threads_that_switch_while_trees_are_built")
def test_stages_that_begin_together_read_the_code_together() -> None:
    modules = [kind.module for kind in KINDS.values()]
    with ThreadPoolExecutor(len(modules)) as threads:
        together = list(threads.map(code_digest, modules))
    forget_what_was_read()
    assert together == [code_digest(module) for module in modules]


def test_nothing_that_it_describes_is_loaded() -> None:
    code = (
        "import sys; from flows.attempts.provenance import provenance; provenance('policy_optimization', threads=1, world_size=1); "
        "print({'torch', 'transformers', 'datasets', 'pyarrow', 'tasks.policy_optimization'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


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
