"""A recipe names no address of a message, only environment variables that hold one."""

import pytest

from tests.support.every import every
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.notify import Notify

TEXT = """\
recipe: x
model: {source: "builtin:tiny"}
data: {demonstrations: {source: "builtin:arithmetic/demonstrations"}}
stages: {sft: {kind: sft, data: demonstrations}}
"""


def test_variables_are_named() -> None:
    """``notify`` names environment variables."""
    recipe = parse_recipe(TEXT + "notify: {urls: [SLACK_URL, mail], on: [failed]}\n")
    assert recipe.notify == Notify(urls=("SLACK_URL", "mail"), on=("failed",))
    assert Notify(urls=("A",)).on == ("gate_closed", "failed", "waiting_approval", "ended")


def test_a_recipe_without_messages_has_the_json_that_it_had() -> None:
    assert "notify" not in parse_recipe(TEXT).model_dump(mode="json")
    assert "reused" not in parse_recipe(TEXT + "notify: {urls: [A]}\n").model_dump(mode="json")["notify"]


@every(
    "written",
    [
        "{urls: ['slack://hush-hush/x']}",
        "{urls: [SLACK_URL, 'json://me:hush-hush@host']}",
        "{urls: 'slack://hush-hush/x'}",
        "{urls: [[hush-hush]]}",
        "'slack://hush-hush/x'",
        "['slack://hush-hush/x']",
        "{urls: {a: hush-hush}}",
    ],
)
def test_an_address_is_refused_and_not_repeated(written: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_recipe(TEXT + f"notify: {written}\n")
    assert "hush-hush" not in str(refused.value)
    assert "notify" in str(refused.value)


def test_the_remedy_is_told() -> None:
    with pytest.raises(RecipeError, match=r"put each address into a variable.*urls: \[SLACK_URL\]"):
        parse_recipe(TEXT + "notify: {urls: ['slack://x']}\n")


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(RecipeError, match="'finished' is not known"):
        parse_recipe(TEXT + "notify: {urls: [A], on: [finished]}\n")
