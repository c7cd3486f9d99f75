"""The loader writes out the rounds of iterative DPO as stages, and refuses wrong ones."""

from pathlib import Path

import pytest

from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rounds import round_seed
from vantage.schemas.records.stage_key import dumped
from vantage.schemas.steps import dependencies
from vantage.schemas.sweep import load_sweep

RECIPE = """\
recipe: iterative
seed: 3
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  prompts: {source: "builtin:arithmetic/prompts"}
  preferences: {source: "builtin:arithmetic/preferences"}
rewards:
  right: {terms: [{verifier: arithmetic}]}
stages:
  sft: {kind: sft, data: demonstrations}
  pairs: {kind: preference_collection, policy: sft, prompts: prompts, judge: {reward: right}, gate: {metric: tied_share, at_most: 0.5}}
  evaluation: {kind: evaluation, candidate: dpo, baseline: sft, judge: {reward: right}, prompts: prompts}
  dpo: {kind: dpo, init: sft, data: pairs, rounds: 3, beta: 0.3}
publish:
  - {stage: dpo, registered_model: iterative}
"""

BY_HAND = """\
  sft: {kind: sft, data: demonstrations}
  pairs_1: {kind: preference_collection, policy: sft, prompts: prompts, judge: {reward: right}, gate: {metric: tied_share, at_most: 0.5}}
  dpo_1: {kind: dpo, init: sft, data: pairs_1, beta: 0.3}
  pairs_2: {kind: preference_collection, policy: dpo_1, prompts: prompts, judge: {reward: right}, gate: {metric: tied_share, at_most: 0.5}, seed: SECOND}
  dpo_2: {kind: dpo, init: dpo_1, data: pairs_2, beta: 0.3, seed: SECOND}
  pairs: {kind: preference_collection, policy: dpo_2, prompts: prompts, judge: {reward: right}, gate: {metric: tied_share, at_most: 0.5}, seed: THIRD}
  dpo: {kind: dpo, init: dpo_2, data: pairs, beta: 0.3, seed: THIRD}
  evaluation: {kind: evaluation, candidate: dpo, baseline: sft, judge: {reward: right}, prompts: prompts}
"""


def by_hand(stages: str) -> Recipe:
    head, tail = RECIPE.split("stages:\n")[0], RECIPE[RECIPE.index("publish:") :]
    stages = stages.replace("SECOND", str(round_seed(3, 2))).replace("THIRD", str(round_seed(3, 3)))
    return parse_recipe(f"{head}stages:\n{stages}{tail}")


def without_places(recipe: Recipe) -> dict[str, object]:
    return {
        name: {field: value for field, value in dumped(stage).items() if field != "round"}
        for name, stage in recipe.stages.items()
    }


def refused(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text)
    return [str(problem) for problem in caught.value.problems]


def test_rounds_are_the_stages_that_one_would_write_by_hand() -> None:
    loaded, written = parse_recipe(RECIPE), by_hand(BY_HAND)
    assert without_places(loaded) == without_places(written)
    assert dependencies(loaded) == dependencies(written)
    places = {name: stage.round and (stage.round.of, stage.round.number) for name, stage in loaded.stages.items() if hasattr(stage, "round")}  # fmt: skip
    assert places == {
        "pairs_1": ("pairs", 1), "dpo_1": ("dpo", 1), "pairs_2": ("pairs", 2), "dpo_2": ("dpo", 2), "pairs": ("pairs", 3), "dpo": ("dpo", 3),
    }  # fmt: skip


def test_without_a_reference_each_round_is_held_to_the_policy_before_and_with_one_to_that() -> None:
    def references(text: str) -> list[str]:
        read = dependencies(parse_recipe(text))
        return [read[name]["reference"] for name in ("dpo_1", "dpo_2", "dpo")]

    assert references(RECIPE) == ["sft", "dpo_1", "dpo_2"]
    assert references(RECIPE.replace("rounds: 3", "rounds: 3, reference: sft")) == ["sft"] * 3
    assert references(RECIPE.replace("rounds: 3", "rounds: 3, reference: model")) == ["model"] * 3


def test_the_first_rounds_are_the_same_of_whatever_number() -> None:
    three, four = parse_recipe(RECIPE), parse_recipe(RECIPE.replace("rounds: 3", "rounds: 4"))
    for name in ("pairs_1", "dpo_1", "pairs_2", "dpo_2"):
        assert three.stages[name] == four.stages[name]
    last, third = dumped(three.stages["dpo"]), dumped(four.stages["dpo_3"])
    assert {**last, "data": None} == {**third, "data": None}


def test_seeds_of_rounds_differ_and_that_of_the_first_is_the_stage_s_own() -> None:
    text = RECIPE.replace("rounds: 3", "rounds: 3, seed: 9")
    stages = parse_recipe(text).stages
    assert [stages[name].seed for name in ("dpo_1", "dpo_2", "dpo")] == [
        9,
        round_seed(9, 2),
        round_seed(9, 3),
    ]
    assert [stages[name].seed for name in ("pairs_1", "pairs_2", "pairs")] == [
        None,
        round_seed(3, 2),
        round_seed(3, 3),
    ]
    assert len({round_seed(seed, number) for seed in range(50) for number in range(1, 5)}) == 200


def test_collected_rollouts_are_repeated_too() -> None:
    text = RECIPE.replace(
        "  evaluation:",
        "  scored: {kind: rollout_collection, policy: sft, prompts: prompts, reward: right, samples_per_prompt: 2}\n  evaluation:",
    ).replace("data: pairs, rounds", "rollouts: scored, rounds")
    recipe = parse_recipe(text)
    assert [recipe.stages[name].rollouts for name in ("dpo_1", "dpo_2", "dpo")] == [
        "scored_1",
        "scored_2",
        "scored",
    ]
    assert [recipe.stages[name].policy for name in ("scored_1", "scored_2", "scored", "pairs")] == [
        "sft",
        "dpo_1",
        "dpo_2",
        "sft",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("data: pairs, rounds", "data: preferences, rounds", "x.yaml:15: stages.dpo.rounds: each round collects anew from the policy of the round before; name a preference_collection stage in data"),
        ("init: sft, data: pairs", "init: model, data: pairs", "stages.dpo.rounds: the first round collects from the policy that it trains, and 'pairs' has policy: sft where this stage has init: model; name one policy in both"),
        ("  evaluation:", "  dpo_2: {kind: sft, data: demonstrations}\n  evaluation:", "stages.dpo.rounds: a round would be called 'dpo_2', and there is such a stage; give 'dpo_2' another name"),
        ("  evaluation:", "  other: {kind: dpo, init: sft, data: pairs, rounds: 2}\n  evaluation:", "stages.other.rounds: another loop collects with 'pairs', too"),
        ("rounds: 3", "rounds: 1", "stages.dpo.rounds: 1 must be at least 2"),
        ("rounds: 3", "rounds: 33", "stages.dpo.rounds: 33 must be at most 32"),
        ("rounds: 3", "rounds: yes", "stages.dpo.rounds"),
        ("beta: 0.3", "beta: -1", "stages.dpo.beta: -1"),
    ],
)  # fmt: skip
def test_loops_that_are_refused(old: str, new: str, message: str) -> None:
    text = RECIPE.replace(old, new)
    assert text != RECIPE
    problems = refused(text)
    assert any(message.removeprefix("x.yaml:15: ") in problem for problem in problems), problems
    assert len([problem for problem in problems if "beta" in problem]) <= 1, (
        "the rounds have one problem, not one each"
    )


SWEEP = """\
sweep: seeds
recipe: iterative.yaml
seeds: [3, 4]
reseeds: [pairs, dpo]
baseline: mild
measure: {stage: evaluation, metric: score_gain}
arms:
  mild: {stages.dpo.beta: 0.1}
  strong: {stages.dpo.beta: 0.5}
"""


def test_a_sweep_reseeds_all_rounds_by_the_stages_names_and_keeps_them_apart(tmp_path: Path) -> None:
    (tmp_path / "iterative.yaml").write_text(RECIPE)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    cell = next(cell for cell in load_sweep(tmp_path / "sweep.yaml").cells() if cell.seed == 4)
    seeds = {name: stage.seed for name, stage in cell.recipe.stages.items()}
    expected = [4, round_seed(4, 2), round_seed(4, 3)]
    assert [seeds[name] for name in ("dpo_1", "dpo_2", "dpo")] == expected
    assert [seeds[name] for name in ("pairs_1", "pairs_2", "pairs")] == expected
    betas = {name: stage.beta for name, stage in cell.recipe.stages.items() if name.startswith("dpo")}
    assert betas == dict.fromkeys(("dpo_1", "dpo_2", "dpo"), 0.1 if cell.arm == "mild" else 0.5)
