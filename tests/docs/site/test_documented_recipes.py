"""The recipes of the pages, and parts of recipes, have a recipe's form: each block of YAML is read, and each field is known."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.site.documented_commands import FENCE, ROOT, pages
from vantage.schemas.loading.field_errors import validated
from vantage.schemas.loading.plain_yaml import read
from vantage.schemas.loading.selections import with_selections
from vantage.schemas.problems import RecipeError
from vantage.schemas.publish_policy import PublishPolicy
from vantage.schemas.recipe.recipe import Recipe

KINDS = {
    "sft": "sft",
    "reward": "reward_model",
    "judges": "reward_model",
    "value": "value_pretraining",
    "policy": "policy_optimization",
    "evaluation": "evaluation",
}
"""Names of stages in the pages → their kinds, where a page shows only some fields of a stage."""
LEFT_OUT = (
    "is required",
    "no field '…'",
    "'9c1185a5c5e9…'",
    "\\u2026",
    "an ensemble combines two reward models or more",
)
"""Messages about what a page omits: required fields, placeholders, and the members of an ensemble, which the loader adds."""
ALTERNATIVES = "occurs twice"
NO_RECIPES = ("task", "sweep", "components")
"""Fields of a task of lm-eval, a sweep and Kubernetes, which have tests of their own."""
OWN_KINDS = ("length_count",)
"""Kinds that a page tells how to add."""


def blocks() -> list[tuple[str, str]]:
    """Return each block of YAML in the pages, with its page and its number there."""
    found = []
    for page in pages():
        shown = [block for language, block in FENCE.findall(page.read_text("utf-8")) if language == "yaml"]
        found += [(f"{page.relative_to(ROOT)}-{number}", block) for number, block in enumerate(shown, 1)]
    return found


BLOCKS = blocks()


def as_recipe(shown: Any) -> dict[str, Any]:
    """Return the recipe that a block shows a part of: whole fields of it, stages, fields of a stage, or terms of a reward."""
    if isinstance(shown, list):
        return {"rewards": {"main": {"terms": shown}}}
    if not set(shown) <= set(Recipe.model_fields):
        is_stages = all(
            isinstance(each, Mapping) and (name in KINDS or "kind" in each) for name, each in shown.items()
        )
        shown = {"stages": shown if is_stages else {"policy": shown}}
    stages = {
        name: {"kind": KINDS.get(name), **stage} if name in KINDS else stage
        for name, stage in shown.get("stages", {}).items()
        if isinstance(stage, Mapping)
    }
    plain = shown | ({"stages": stages} if stages else {})
    return dict(with_selections(plain).plain)


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in BLOCKS])
def test_each_block_is_read_and_its_fields_are_known(block: str) -> None:
    document = read(block)
    problems = [str(each) for each in document.problems if ALTERNATIVES not in each.message]
    shown = document.value
    if isinstance(shown, dict) and shown.keys() & {*NO_RECIPES}:
        assert not problems
        return
    if "aliases:" in block or "valid_from" in block:
        problems += map(str, validated(PublishPolicy, shown).problems)
    else:
        problems += map(str, validated(Recipe, as_recipe(shown)).problems)
    allowed = (*LEFT_OUT, *(f"'{kind}' is not a kind" for kind in OWN_KINDS))
    assert not [each for each in problems if not any(part in each for part in allowed)]


def test_a_wrong_block_is_found() -> None:
    """The checks find an unknown field of a stage, a text without quotes, and a value of the wrong type."""
    for block, said in {
        "policy: {iteration: 5}": "there is no field 'iteration' here",
        "rollout: {engine: vllm, server: 1}": "there is no field 'server' here",
        "stages: {sft: {batch_size: many}}": "batch_size",
    }.items():
        problems = [str(each) for each in validated(Recipe, as_recipe(read(block).value)).problems]
        assert any(said in each for each in problems if "is required" not in each), block
    with pytest.raises(RecipeError, match=r"without quotes holds \?"):
        read("criteria: {right: Is it right?}")


def test_most_pages_show_recipes() -> None:
    assert len(BLOCKS) > 50 and len({Path(name.rpartition("-")[0]) for name, _ in BLOCKS}) > 15
