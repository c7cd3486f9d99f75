"""``sign:`` of a recipe names one place for a key, and changes nothing for recipes without it."""

import hashlib
from pathlib import Path

import pytest

from tests.support.every import every
from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.loading import plain_yaml
from vantage.schemas.loading.recipe_file import builtin_recipes, find_recipe, parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.recipe import Recipe

RECIPE = """\
recipe: small
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
stages:
  sft: {kind: sft, data: demonstrations}
"""


def refused(text: str, **options: object) -> str:
    with pytest.raises(RecipeError) as found:
        parse_recipe(RECIPE + text, **options)  # type: ignore[arg-type]
    return str(found.value)


def test_a_recipe_without_it_has_no_trace_of_it() -> None:
    plain = parse_recipe(RECIPE).model_dump(mode="json")
    assert "sign" not in plain
    text = canonical_json(plain)
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


DIGEST = "130eac05c727e907fdb0804c8e5cf3b322f408549e060e39d48bc624cc84e387"
"""Digest of the recipe above, by the version before ``sign:`` was there."""


@every("name", builtin_recipes())
def test_nor_has_any_recipe_that_comes_with_vantage(name: str) -> None:
    """So the digests of built-in recipes, by which runs are found, do not change."""
    plain = plain_yaml.read(find_recipe(name).read_text()).value
    if "sweep" not in plain:
        assert "sign" not in plain
        assert "sign" not in Recipe.model_validate(plain).model_dump(mode="json")


def test_paths_start_at_the_recipe_and_those_of_overrides_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (tmp_path / "key.pem", tmp_path / "here" / "key.pem"):
        path.touch()
    recipe = parse_recipe(RECIPE + "sign: {key: key.pem}", folder=tmp_path)
    assert recipe.sign is not None and recipe.sign.key == str(tmp_path / "key.pem")
    recipe = parse_recipe(RECIPE + "sign: {key: key.pem}", folder=tmp_path, overrides=["sign.key=key.pem"])
    assert recipe.sign is not None and recipe.sign.key == str(tmp_path / "here" / "key.pem")


def test_a_key_that_is_not_there_is_refused_with_the_remedy(tmp_path: Path) -> None:
    said = refused("sign: {key: nowhere.pem}", folder=tmp_path)
    assert f"sign.key: there is no file {tmp_path / 'nowhere.pem'}" in said
    assert "which `vantage keys new FILE` makes" in said
    parse_recipe(RECIPE + "sign: {key: nowhere.pem}", folder=tmp_path, needs_files=False)
    assert "sign.key: there is no file" in refused("sign: {key: .}", folder=tmp_path)
    assert "cannot be looked up" in refused(f"sign: {{key: {'x' * 300}}}", folder=tmp_path)


@pytest.mark.parametrize("text", ["{}", "{key: null}", "{key: key.pem, key_variable: KEY}"])
def test_it_names_exactly_one_place(text: str, tmp_path: Path) -> None:
    (tmp_path / "key.pem").touch()
    said = refused(f"sign: {text}", folder=tmp_path)
    assert "exactly one of key (a file) and key_variable (an environment variable) is needed" in said


@every(
    "text", ["key", "[a]", "{key: [a]}", "{key: 3}", "{key_variable: 'A B'}", "{password: x}", '{key: ""}']
)
def test_anything_else_is_refused(text: str) -> None:
    assert "sign" in refused(f"sign: {text}")
