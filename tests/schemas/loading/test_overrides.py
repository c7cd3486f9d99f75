"""An override's value goes to its place in the recipe, and an override without a place is refused."""

from typing import Any

import pytest

from tests.support.every import every
from vantage.schemas.loading.overrides import apply_overrides, parse_override
from vantage.schemas.problems import RecipeError


def overridden(plain: Any, *texts: str) -> Any:
    changed, _, problems = apply_overrides(plain, [parse_override(text) for text in texts])
    assert problems == []
    return changed


def refusal(plain: Any, text: str) -> str:
    _, placed, problems = apply_overrides(plain, [parse_override(text)])
    assert placed == {}
    return "\n".join(str(problem) for problem in problems)


@every(
    ("written", "value"),
    [
        ("0.2", 0.2),
        ("1e-5", 1e-5),
        ("3", 3),
        ("ppo", "ppo"),
        ("null", None),
        ("", None),
        ("true", True),
        ("a=b", "a=b"),
        ("hub:org/name@main", "hub:org/name@main"),
        ("'{instruction}'", "{instruction}"),
        ("{preset: vapo, gamma: 0.9}", {"preset": "vapo", "gamma": 0.9}),
    ],
)
def test_values_are_yaml(written: str, value: object) -> None:
    """The value of an override is read as YAML."""
    override = parse_override(f"a.b={written}")
    assert (override.path, override.value) == (("a", "b"), value)


@every(
    ("text", "said"),
    [
        ("seed", "--set seed: is not an override; write KEY=VALUE, for example stages.policy.seed=3"),
        ("=3", "--set =3: is not an override; write KEY=VALUE, for example stages.policy.seed=3"),
        ("a..b=3", "--set a..b=3: is not an override; write KEY=VALUE, for example stages.policy.seed=3"),
        (f"{'a.' * 20}a=1", f"--set {'a.' * 20}a=1: is a key of 21 parts, and a recipe has at most 20; name a field of a recipe"),
        ("a=.nan", "--set a=.nan: .nan is not a finite number; write a number, or leave the field out"),
        ("a=!!python/name:x 1", "--set a=!!python/name:x 1: tag:yaml.org,2002:python/name:x is a tag; "
         "a recipe holds plain values; remove the tag"),
    ],
)  # fmt: skip
def test_overrides_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_override(text)
    assert str(caught.value) == said


def test_a_value_that_is_no_yaml_is_told_to_be_quoted() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_override("model.source=@here")
    assert str(caught.value).startswith("--set model.source=@here: the value '@here' is not YAML: ")
    assert str(caught.value).endswith("; put quotes around text")


def test_the_recipe_itself_is_left_alone(plain: dict[str, Any]) -> None:
    changed = overridden(plain, "seed=3")
    assert changed["seed"] == 3
    assert "seed" not in plain


def test_the_short_form_of_algorithm_opens_up(plain: dict[str, Any]) -> None:
    changed = overridden(
        plain, "stages.policy.algorithm.clip_range_high=0.2", "stages.policy.algorithm.gamma=1"
    )
    assert changed["stages"]["policy"]["algorithm"] == {"preset": "vapo", "clip_range_high": 0.2, "gamma": 1}


def test_the_last_override_wins(plain: dict[str, Any]) -> None:
    changed = overridden(plain, "stages.policy.algorithm.gamma=0.5", "stages.policy.algorithm=ppo")
    assert changed["stages"]["policy"]["algorithm"] == "ppo"


def test_fields_that_were_left_out_are_made(plain: dict[str, Any]) -> None:
    changed = overridden(plain, "generation.temperature=0.7", "data.tasks.split.test=64")
    assert changed["generation"] == {"temperature": 0.7}
    assert changed["data"]["tasks"]["split"] == {"test": 64}


def test_one_gate_is_reached_without_a_number(plain: dict[str, Any]) -> None:
    assert overridden(plain, "stages.value.gate.at_least=0.5")["stages"]["value"]["gate"]["at_least"] == 0.5
    plain["stages"]["value"]["gate"] = [plain["stages"]["value"]["gate"]]
    assert (
        overridden(plain, "stages.value.gate.at_least=0.5")["stages"]["value"]["gate"][0]["at_least"] == 0.5
    )
    assert (
        overridden(plain, "stages.value.gate.0.at_least=0.5")["stages"]["value"]["gate"][0]["at_least"] == 0.5
    )


def test_items_of_lists_are_reached_by_number(plain: dict[str, Any]) -> None:
    changed = overridden(plain, "rewards.main.terms.0.weight=2", "publish.0.alias=best")
    assert changed["rewards"]["main"]["terms"][0]["weight"] == 2
    assert changed["publish"][0]["alias"] == "best"


def test_a_whole_stage_can_be_added(plain: dict[str, Any]) -> None:
    assert overridden(plain, "stages.again={kind: sft, data: demos}")["stages"]["again"]["kind"] == "sft"


@every(
    ("text", "said"),
    [
        ("stages.polcy.seed=3",
         "--set stages.polcy.seed=3: stages.polcy: 'polcy' is not in the recipe's stages; did you mean 'policy'?"),
        ("stages.polcy=3", "--set stages.polcy=3: 'polcy' is not in the recipe's stages; did you mean 'policy'?"),
        ("data.prompts.rows=3", "--set data.prompts.rows=3: data.prompts: 'prompts' is not in the recipe's data; "
         "use one of: demos, pairs, tasks"),
        ("recipe.name=x", "--set recipe.name=x: recipe: is 'small', which has no fields; "
         "override the whole value instead"),
        ("publish.7.alias=x", "--set publish.7.alias=x: publish: is a list of 1, which has no item '7'; "
         "use its number, from 0 to 0"),
        ("publish.alias=x", "--set publish.alias=x: publish: is a list of 1, which has no item 'alias'; "
         "use its number, from 0 to 0"),
    ],
)  # fmt: skip
def test_overrides_without_a_place(plain: dict[str, Any], text: str, said: str) -> None:
    assert refusal(plain, text) == said


def test_every_override_is_tried(plain: dict[str, Any]) -> None:
    overrides = [parse_override(text) for text in ("stages.x.seed=1", "seed=5", "data.y.rows=1")]
    changed, placed, problems = apply_overrides(plain, overrides)
    assert changed["seed"] == 5
    assert list(placed) == [("seed",)]
    assert len(problems) == 2


def test_a_replaced_override_is_not_blamed(plain: dict[str, Any]) -> None:
    texts = ("stages.policy.algorithm.gamma=7", "stages.policy.algorithm=ppo")
    _, placed, _ = apply_overrides(plain, [parse_override(text) for text in texts])
    assert list(placed) == [("stages", "policy", "algorithm")]
