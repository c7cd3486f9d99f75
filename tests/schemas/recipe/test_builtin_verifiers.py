"""The source of a built-in verifier selects its class; wrong settings are refused, and the right ones enter the key."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from vantage.attempts.jobs import steps_of
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.builtin_verifiers import (
    BUILTIN,
    COMPARING,
    RULES,
    AnyVerifier,
    CodeVerifier,
    NumberVerifier,
)
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.verifiers import EXACT_MATCH, Verifier
from vantage.schemas.recipe.work import ImportVerifier
from vantage.schemas.records.stage_key import differences, key_parts
from vantage.tasks.rewards.libraries import versions_of

READ: TypeAdapter[Verifier] = TypeAdapter(AnyVerifier)


def test_the_source_selects_the_class() -> None:
    assert type(READ.validate_python({"source": "builtin:number"})) is NumberVerifier
    assert type(READ.validate_python({"source": EXACT_MATCH, "extract": "(a)"})) is Verifier
    assert type(READ.validate_python({"source": "mine.py", "function": "check"})) is Verifier
    assert len({row.source for row in BUILTIN}) == len(BUILTIN)
    assert {
        EXACT_MATCH,
        *(f"builtin:{each}" for each in ("number", "math_verify", "code", "reasoning_gym")),
    } == COMPARING


def test_a_verifier_without_new_fields_is_written_as_before() -> None:
    assert READ.validate_python({"source": EXACT_MATCH}).model_dump() == {
        "source": EXACT_MATCH,
        "function": "verify",
        "extract": None,
    }
    work = ImportVerifier.model_validate({"verifier": {"source": "builtin:code"}})
    assert isinstance(work.verifier, CodeVerifier)
    assert work.model_dump(mode="json") == {
        "kind": "import_verifier",
        "verifier": {
            "source": "builtin:code",
            "function": "verify",
            "extract": None,
            "seconds": 5,
            "memory": 512,
            "disk": 16,
            "output": 2**20,
        },
    }
    assert ImportVerifier.model_validate(work.model_dump()) == work


def test_every_field_is_in_the_key() -> None:
    def parts(**fields: Any) -> dict[str, Any]:
        work = ImportVerifier.model_validate({"verifier": {"source": "builtin:code", **fields}})
        return key_parts(work, generation=Generation(), rewards={}, seed=None, inputs={}, extra={})

    fields: dict[str, Any] = {"seconds": 6, "memory": 600, "disk": 17, "output": 5, "isolation": "optional"}
    for field, value in fields.items():
        [difference] = differences(parts(), parts(**{field: value}))
        assert difference.startswith(f"configuration.verifier.{field}: ") and difference.endswith(
            f" → {value}"
        )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"source": "builtin:number", "function": "check"}, "builtin:number has no function=check; remove it"),
        ({"source": "builtin:number", "right": {"at_least": 1.0}}, "builtin:number returns right or wrong, and right is for scores"),
        ({"source": "builtin:regex", "pattern": "a", "extract": "(a)"}, "reads whole responses, and extract='(a)' would do nothing"),
        ({"source": "builtin:number", "extract": "a"}, "'a' has 0 groups; put one pair of parentheses around"),
        ({"source": "builtin:length"}, "at_least=0 and at_most=None accept every length"),
        ({"source": "builtin:length", "at_least": 3, "at_most": 2}, "at_most=2 is below at_least=3; no length is right"),
        ({"source": "builtin:format", "tags": ["a", "b", "a"]}, "tags has a twice; a response has each section once"),
        ({"source": "builtin:repetition", "at_most": 1.5}, "less than or equal to 1"),
        ({"source": "builtin:code", "isolation": "none"}, "'required' or 'optional'"),
        ({"source": "builtin:code", "seconds": 0}, "greater than or equal to 1"),
        ({"source": "builtin:number", "tolerance": 1.0}, "tolerance"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        READ.validate_python(fields)
    assert told in str(refused.value)


RECIPE = """
recipe: coded
model: {source: "builtin:tiny"}
data:
  tasks: {source: "builtin:arithmetic/prompts"}
verifiers:
  mine: {source: "SOURCE"}
rewards:
  main: {terms: [{verifier: mine}]}
stages:
  collected: {kind: rollout_collection, policy: model, reward: main, prompts: tasks}
"""


def test_a_misspelt_source_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        RecipeError, match=r"there is no built-in verifier 'builtin:numbr'; did you mean 'builtin:number'\?"
    ):
        parse_recipe(RECIPE.replace("SOURCE", "builtin:numbr"))


def test_prompts_that_are_known_to_have_no_answers_are_refused() -> None:
    with pytest.raises(
        RecipeError, match="'mine' compares with answers, and data.tasks, which collected reads, has none"
    ):
        parse_recipe(RECIPE.replace("SOURCE", "builtin:math_verify"))


def test_versions_of_libraries_are_in_the_key() -> None:
    recipe = parse_recipe(RECIPE.replace('"SOURCE"', '"builtin:regex", pattern: a'))
    step = steps_of(ResolvedRecipe.of(recipe))["verifiers.mine"]
    assert set(step.key_parts({"prompts.0": "0" * 64})["extra"]["libraries"]) == {"google-re2"}
    recipe = parse_recipe(RECIPE.replace('"SOURCE"', '"builtin:length", at_most: 3'))
    assert (
        "libraries"
        not in steps_of(ResolvedRecipe.of(recipe))["verifiers.mine"].key_parts({"prompts.0": "0" * 64})[
            "extra"
        ]
    )


def test_the_revision_of_our_own_rules_is_in_the_key_from_the_second_on() -> None:
    found = {
        row.source: versions_of(row.verifier.model_construct(source=row.source), name="verifiers.mine")
        for row in BUILTIN
    }
    revised = {"builtin:number": "2", "builtin:math_verify": "2", "builtin:code": "2"}
    assert {source: versions[RULES] for source, versions in found.items() if RULES in versions} == revised
    assert found["builtin:length"] == {}, "the keys of others stay as they were"
