"""Numbers that a database turns into integers which no JSON reader takes are refused when new, and read when recorded."""

import json
from typing import Any

from tests.support.every import every
from vantage.schemas.loading.json_schema import recipe_schema
from vantage.schemas.loading.validation import validated_recipe

RECIPE: dict[str, Any] = {
    "recipe": "large",
    "model": {"source": "builtin:tiny"},
    "data": {"d": {"source": "builtin:arithmetic/demonstrations"}, "p": {"source": "builtin:arithmetic/prompts"}},
    "rewards": {"main": {"terms": [{"verifier": "arithmetic", "weight": 1.0}]}},
    "stages": {
        "sft": {"kind": "sft", "data": "d", "learning_rate": 1e-3, "gate": {"metric": "test_nll", "at_most": 1.0}},
        "policy": {
            "kind": "policy_optimization", "init": "sft", "reward": "main", "prompts": "p", "algorithm": {"preset": "grpo"},
        },
    },
}  # fmt: skip

NUMBERS = [
    ("stages", "sft", "learning_rate"),
    ("stages", "sft", "gate", "at_most"),
    ("stages", "sft", "resources", "hang_seconds"),
    ("rewards", "main", "terms", 0, "weight"),
    ("stages", "policy", "algorithm", "dual_clip"),
    ("stages", "policy", "algorithm", "kl_coef"),
    ("generation", "temperature"),
]


def with_number(path: tuple[Any, ...], value: float) -> dict[str, Any]:
    recipe = json.loads(json.dumps(RECIPE))
    place = recipe
    for part in path[:-1]:
        place = place[part] if isinstance(place, list) else place.setdefault(part, {})
    place[path[-1]] = value
    return recipe


@every("path", NUMBERS)
@every("value", [1e30, 10**13, 1.1e12])
def test_a_new_one_is_refused_with_its_field(path: tuple[Any, ...], value: float) -> None:
    recipe, problems = validated_recipe(with_number(path, value))
    assert recipe is None
    texts = [str(each) for each in problems if each.path[-1] == path[-1]]
    assert len(texts) == 1, problems
    assert "must be between -1e+12 and 1e+12" in texts[0] or path[-1] == "temperature"


@every("path", NUMBERS[:-1])
def test_one_within_the_bound_is_not(path: tuple[Any, ...]) -> None:
    _, problems = validated_recipe(with_number(path, 1e12))
    assert [each for each in problems if each.path[-1] == path[-1]] == []


def test_a_recorded_one_is_read() -> None:
    """Records of versions without the bound are read, resumed and audited."""
    recipe, problems = validated_recipe(RECIPE)
    assert recipe is not None, problems
    recorded = recipe.model_dump(mode="json")
    recorded["stages"]["sft"]["learning_rate"] = 1e30
    again = type(recipe).model_validate_json(json.dumps(recorded))
    assert again.stages["sft"].learning_rate == 1e30


def test_the_schema_that_editors_read_has_the_bound() -> None:
    """Every number without an own maximum has it."""

    def numbers(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, list):
            return [found for each in node for found in numbers(each)]
        if not isinstance(node, dict):
            return []
        own = [node] if node.get("type") == "number" else []
        return own + [found for each in node.values() for found in numbers(each)]

    found = numbers(recipe_schema())
    assert len(found) > 30
    assert [each for each in found if not {"maximum", "exclusiveMaximum"} & set(each)] == []
