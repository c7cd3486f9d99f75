"""A reward model with members is as many stages as if each had been written by hand."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.jobs import key_parts_of
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import Recipe, ResolvedRecipe
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies
from vantage.schemas.sweep import load_sweep

REWARD = "  reward:\n    kind: reward_model\n    init: sft\n    data: pairs\n    centre_on: demos\n    gate: {metric: pair_accuracy, at_least: 0.7}\n"
TERMS = "    terms:\n      - {model: reward}\n"
VALUE = "    init: reward\n"


def with_members(text: str, members: str, *, seed: int | None = None) -> str:
    """Return the recipe with an ensemble in place of its reward model; the critic starts from the SFT policy."""
    own = f"    seed: {seed}\n" if seed is not None else ""
    text = text.replace(REWARD, f"{REWARD}    members: {members}\n{own}")
    return text.replace(TERMS, f"{TERMS}    ensemble: {{combine: min}}\n").replace(VALUE, "    init: sft\n")


def by_hand(text: str, changes: list[str]) -> str:
    """Return the same recipe with a stage for each member, written as a person would."""
    stages = "".join(
        REWARD.replace("reward:", f"reward_{number}:", 1)
        + "".join(f"    {line}\n" for line in lines.split(";") if line)
        for number, lines in enumerate(changes, start=1)
    )
    terms = "".join(f"      - {{model: reward_{number}}}\n" for number in range(1, len(changes) + 1))
    text = text.replace(REWARD, stages).replace(VALUE, "    init: sft\n")
    return text.replace(TERMS, f"    terms:\n{terms}    ensemble: {{combine: min}}\n")


def derived(seed: int, number: int) -> int:
    return int(hashlib.sha256(f"{seed}:member:{number}".encode()).hexdigest()[:8], 16)


def plain_of(recipe: Recipe) -> dict[str, Any]:
    """Return the whole recipe but for what names the members."""
    plain: dict[str, Any] = json.loads(recipe.model_dump_json())
    for stage in plain["stages"].values():
        stage.pop("member", None)
    return plain


def problems(text: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        parse_recipe(text)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(("seed", "recipe_seed"), [(None, 0), (5, 5)])
def test_members_by_seed_are_stages_written_by_hand(text: str, seed: int | None, recipe_seed: int) -> None:
    changes = [f"seed: {seed}" if seed is not None else ""]
    changes += [f"seed: {derived(recipe_seed, number)}" for number in (2, 3)]
    found, expected = parse_recipe(with_members(text, "3", seed=seed)), parse_recipe(by_hand(text, changes))
    assert plain_of(found) == plain_of(expected)
    assert list(found.stages) == list(expected.stages)
    assert dependencies(found) == dependencies(expected)
    assert found == parse_recipe(with_members(text, "{count: 3, by: seed}", seed=seed))


def test_members_by_halves_are_stages_written_by_hand(text: str) -> None:
    changes = [f"half: {number}" for number in (1, 2, 3, 4)]
    found = parse_recipe(with_members(text, "{count: 4, by: halves}"))
    assert plain_of(found) == plain_of(parse_recipe(by_hand(text, changes)))


def test_the_recipes_own_seed_counts_and_an_override_of_it(text: str) -> None:
    for found in (
        parse_recipe("seed: 9\n" + with_members(text, "2")),
        parse_recipe(with_members(text, "1"), overrides=["seed=9", "stages.reward.members=2"]),
    ):
        assert [stage.seed for name, stage in found.stages.items() if name.startswith("reward")] == [
            None,
            derived(9, 2),
        ]
    both = parse_recipe("seed: 9\n" + with_members(text, "2", seed=5))
    assert [both.stages[f"reward_{number}"].seed for number in (1, 2)] == [5, derived(5, 2)]


def key_of(recipe: Recipe, stage: str) -> str:
    resolved = ResolvedRecipe.of(with_learning_rates(recipe, width=64))
    inputs = dict.fromkeys(dependencies(recipe)[stage], "0" * 64)
    return stage_key(key_parts_of(resolved, stage, inputs, facts=()))


def test_keys_are_those_of_stages_written_by_hand_and_the_first_is_the_one_without_members(text: str) -> None:
    found = parse_recipe(with_members(text, "2"))
    hand = parse_recipe(by_hand(text, ["", f"seed: {derived(0, 2)}"]))
    assert [key_of(found, f"reward_{k}") for k in (1, 2)] == [key_of(hand, f"reward_{k}") for k in (1, 2)]
    assert key_of(found, "reward_1") == key_of(parse_recipe(text), "reward")
    assert key_of(found, "policy") == key_of(hand, "policy")
    halves = parse_recipe(with_members(text, "{count: 2, by: halves}"))
    assert len({key_of(halves, "reward_1"), key_of(halves, "reward_2"), key_of(found, "reward_1")}) == 3


def test_a_loaded_recipe_is_read_again_as_it_is(text: str) -> None:
    found = parse_recipe(with_members(text, "2"))
    again = Recipe.model_validate(json.loads(found.model_dump_json()))
    assert again == found
    assert "members" not in found.stages["reward_1"].model_dump(mode="json")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ("1", "stages.reward.members: 1 must be at least 2"),
        ("33", "stages.reward.members: 33 must be at most 32"),
        ("true", "stages.reward.members"),
        ("{count: 3, by: halves}", "count=3 is odd, and by=halves gives each half of the prompts to a member; use 2 or 4"),
        ("{count: 2, by: half}", "stages.reward.members.by: 'half' is not known; did you mean 'halves'?"),
        ("{by: seed}", "stages.reward.members.count: is required"),
    ],
)  # fmt: skip
def test_members_that_are_written_wrongly_are_named(text: str, members: str, said: str) -> None:
    found = problems(with_members(text, members))
    assert any(said in problem for problem in found), found


def test_a_member_is_neither_given_a_half_nor_a_number(text: str) -> None:
    for field in ("half: 1", "member: {of: other, number: 1}"):
        found = problems(with_members(text, f"2\n    {field}"))
        assert any(f"{field[:4]}" in each and "leave" in each for each in found), found


def test_a_name_that_a_member_would_have_is_refused(text: str) -> None:
    text = with_members(text, "2").replace(
        "  policy:\n", "  reward_2: {kind: sft, data: demos}\n  policy:\n", 1
    )
    found = problems(text)
    assert any(
        "stages.reward.members: member 2 would be called 'reward_2', and there is such a stage; give 'reward_2' another name"
        in each
        for each in found
    ), found


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("    ensemble: {combine: min}\n", "", "rewards.main.terms.0.model"),
        ("    init: sft\n    reward: main", "    init: reward\n    reward: main", "stages.value.init"),
        ("stage: policy,", "stage: reward,", "publish.0.stage"),
        ("after: evaluation", "after: reward", "publish.0.after"),
        ("publish:", "licenses: {reward: MIT}\npublish:", "licenses.reward"),
    ],
)
def test_where_one_model_is_needed_the_members_are_listed(text: str, old: str, new: str, place: str) -> None:
    whole = with_members(text, "2")
    assert old in whole
    found = problems(whole.replace(old, new))
    [said] = [each for each in found if f"{place}: " in each]
    assert "'reward' has 2 members, and one stage is needed here" in said
    assert "name one of them: reward_1, reward_2" in said
    assert ("add ensemble: {combine: mean} to the reward" in said) == place.startswith("rewards")


def test_what_is_wrong_with_all_members_is_said_once_where_it_was_written(text: str) -> None:
    whole = with_members(text, "3").replace("    data: pairs\n", "    data: pears\n")
    lines = whole.splitlines()
    [said] = [each for each in problems(whole) if "pears" in each]
    assert said.startswith(
        f"recipe:{lines.index('    data: pears') + 1}: stages.reward.data: no dataset is called 'pears'"
    )
    term = with_members(text, "2").replace("{model: reward}", "{model: reward, weight: 2.0}")
    [said] = problems(term)
    assert "the models of an ensemble count equally, and reward_1 has weight=2" in said


def test_terms_after_an_ensemble_keep_their_places_in_messages(text: str) -> None:
    whole = with_members(text, "3").replace(
        "{model: reward}", "{model: reward}\n      - {verifier: arithmetik}"
    )
    [said] = problems(whole)
    assert "rewards.main.terms.1.verifier: no verifier is called 'arithmetik'" in said


def test_only_a_reward_model_has_members(text: str) -> None:
    assert any(
        "stages.sft.members" in each
        for each in problems(text.replace("data: demos}", "data: demos, members: 2}", 1))
    )


def test_a_recipe_that_was_not_loaded_has_no_members_trained_in_silence(text: str) -> None:
    recipe = parse_recipe(text)
    stage = type(recipe.stages["reward"]).model_validate(
        {**recipe.stages["reward"].model_dump(), "members": 2}
    )
    made = recipe.model_copy(update={"stages": {**recipe.stages, "reward": stage}})
    with pytest.raises(
        ValueError, match=r"stages\.reward\.members are stages of their own in a loaded recipe"
    ):
        ResolvedRecipe.of(with_learning_rates(made, width=64))


SWEEP = """\
sweep: seeds
recipe: RECIPE
seeds: [3, 4]
reseeds: [reward]
baseline: low
measure: {stage: policy, metric: test_score}
arms:
  low: {}
  high: {stages.policy.learning_rate: 0.001}
"""


@pytest.mark.parametrize(
    ("members", "seeds"), [("2", [3, derived(3, 2)]), ("{count: 2, by: halves}", [3, 3])]
)
def test_a_sweep_reseeds_all_members_by_the_stages_name(
    text: str, tmp_path: Path, members: str, seeds: list[int]
) -> None:
    (tmp_path / "recipe.yaml").write_text(with_members(text, members))
    (tmp_path / "sweep.yaml").write_text(SWEEP.replace("RECIPE", "recipe.yaml"))
    first = load_sweep(tmp_path / "sweep.yaml").cells()[0]
    assert first.seed == 3
    assert [first.recipe.stages[f"reward_{k}"].seed for k in (1, 2)] == seeds
