"""Whatever the loader is given, it ends soon, with a recipe or with its own list of problems."""

import time
from pathlib import Path

import pytest

from tests.schemas.hostile import (
    OVERRIDES,
    PATHS,
    TEXTS,
    WHOLE,
    lay_out,
    refuses,
)
from tests.support.every import every
from vantage.schemas.loading.recipe_file import load_recipe, parse_recipe
from vantage.schemas.sweep import load_sweep

pytestmark = pytest.mark.slow

SECONDS = 10.0
"""Longest time for one text of the greatest size, on a slow machine that does other things too."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with the odd files that the cases name."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_that_the_cases_damage_loads() -> None:
    assert parse_recipe(WHOLE).recipe == "x"


@every("case", TEXTS)
def test_no_text_escapes(here: Path, case: str) -> None:
    """Each hostile text is refused by a list of problems, never by another error."""
    data, said = TEXTS[case]
    (here / "x.yaml").write_bytes(data)
    assert said in refuses(lambda: load_recipe("x.yaml"))


@every("case", TEXTS)
def test_no_text_escapes_as_a_sweep(here: Path, case: str) -> None:
    (here / "x.yaml").write_bytes(TEXTS[case][0])
    refuses(lambda: load_sweep("x.yaml"))


@every("case", TEXTS)
def test_no_text_escapes_as_the_recipe_of_a_sweep(here: Path, case: str) -> None:
    data, said = TEXTS[case]
    (here / "x.yaml").write_bytes(data)
    (here / "sweep.yaml").write_text(
        "{sweep: a, recipe: x.yaml, seeds: [1], reseeds: [s], baseline: a, "
        "measure: {stage: s, metric: test_nll}, arms: {a: {}, b: {stages.s.epochs: 2}}}"
    )
    assert said in refuses(lambda: load_sweep("sweep.yaml"))


@every("override", OVERRIDES)
def test_no_override_escapes(here: Path, override: str) -> None:
    """Each hostile override is refused by a list of problems, never by another error."""
    assert OVERRIDES[override] in refuses(lambda: parse_recipe(WHOLE + "publish: []\n", overrides=[override]))


@every("path", PATHS)
def test_no_path_escapes(here: Path, path: str) -> None:
    """Each hostile path is refused by a list of problems, never by another error."""
    assert PATHS[path] in refuses(lambda: load_recipe(path))
    assert PATHS[path] in refuses(lambda: load_sweep(path))


def test_a_file_that_may_not_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate what a user who is not root sees: `open` fails, or already `stat` does."""
    (here / "x.yaml").write_text(WHOLE)

    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("os.open", denied)
        assert "cannot be read: Permission denied" in refuses(lambda: load_recipe("x.yaml"))
    with monkeypatch.context() as patched:
        patched.setattr("os.stat", denied)
        assert "cannot be looked up (Permission denied)" in refuses(lambda: load_recipe("x.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "a: *b\n" * 40_000,
        "".join(f"k{i}: 1\n" for i in range(30_000)),
        WHOLE + "publish: [" + "{stage: s, registered_model: x}, " * 7_000 + "]",
        WHOLE + "publish: [" + "{stage: sx, after: q}, " * 10_000 + "]",
        WHOLE + "rewards: {r: {terms: [" + "{model: nobody}, " * 14_000 + "]}}",
        "recipe: x\nstages:\n" + "".join(f"  s{i}: {{kind: sft, data: d{i}}}\n" for i in range(200)),
        "a: " + "b " * 130_000,
        "- " * 19 + "[" + "1," * 100_000 + "]",
        '"' + "\\x41" * 60_000 + '": 1',
    ],
    ids=["aliases", "unknown fields", "publications", "wrong publications", "terms", "stages", "words", "items", "escapes"],
)  # fmt: skip
def test_a_text_of_the_greatest_size_is_refused_soon(text: str) -> None:
    started = time.process_time()
    refuses(lambda: parse_recipe(text))
    assert time.process_time() - started < SECONDS
