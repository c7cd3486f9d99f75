"""Runs that began when the built-in recipes lay in another folder are found, and so are their files."""

from pathlib import Path

import pytest

from vantage.attempts import former_recipes as subject
from vantage.attempts.jobs import work_of
from vantage.runs.run import acquire_run, next_run, recipe_digest
from vantage.runs.workspace import Workspace
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.work import ImportVerifier, PrepareData

RECIPE = """\
recipe: own
model: {source: "builtin:tiny"}
data:
  prompts: {source: rows.jsonl}
verifiers:
  right: {source: right.py}
stages:
  evaluation: {kind: evaluation, candidate: model, baseline: model, judge: {verifier: right}, prompts: prompts}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an installation of today: ``recipes`` lies in ``vantage``."""
    monkeypatch.setattr(subject, "package_folder", lambda: tmp_path / "vantage")
    for folder in (tmp_path / "recipes", tmp_path / "vantage" / "recipes"):
        folder.mkdir(parents=True)
        (folder / "own.yaml").write_text(RECIPE)
        (folder / "rows.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
        (folder / "right.py").write_text(
            "def verify(prompt, response, answer):\n    return response == answer\n"
        )
    return tmp_path


def recipe_in(folder: Path) -> ResolvedRecipe:
    return ResolvedRecipe.of(load_recipe(folder / "own.yaml"))


def test_an_unfinished_run_of_before_is_found_by_the_same_recipe_of_today(site: Path) -> None:
    before, today = recipe_in(site / "recipes"), recipe_in(site / "vantage" / "recipes")
    assert recipe_digest(before) != recipe_digest(today)
    workspace = Workspace(site / "workspace")
    with acquire_run(workspace, before, source="own") as begun:
        run_id = begun.record.run_id
    assert next_run(workspace, today)[0] == before
    with acquire_run(workspace, today, source="own") as again:
        assert again.record.run_id == run_id
        again.update(status="completed")
    with acquire_run(workspace, today, source="own") as new:
        assert (new.record.run_id != run_id, new.record.recipe) == (True, today)


def test_its_files_are_read_where_they_are_now(site: Path) -> None:
    """The files of a former recipe are read in their present folder."""
    before = recipe_in(site / "recipes")

    def sources() -> list[str]:
        data, verifier = work_of(before, "data.prompts"), work_of(before, "verifiers.right")
        assert isinstance(data, PrepareData)
        assert isinstance(verifier, ImportVerifier)
        return [data.data.source, verifier.verifier.source]

    assert sources() == [str(site / "recipes" / name) for name in ("rows.jsonl", "right.py")]
    for file in list((site / "recipes").iterdir()):
        file.unlink()
    now = site / "vantage" / "recipes"
    assert sources() == [str(now / name) for name in ("rows.jsonl", "right.py")]
    (now / "right.py").unlink()
    assert sources()[1] == str(now / "right.py"), "a file that is nowhere is missed where it should be"
