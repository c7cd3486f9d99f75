"""Gates on few prompts give a warning before anything runs, by a rule that is worked out by hand."""

from pathlib import Path
from typing import Any

import pytest

from vantage.schemas.checks.few_prompts import few_prompts
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.steps import dependencies

RECIPE = """
recipe: few
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: a.jsonl, split: {validation: 8, test: DEMONSTRATIONS}}
  preferences: {source: b.jsonl, split: {validation: 8, test: PREFERENCES}}
rewards:
  main: {terms: [{model: reward}]}
stages:
  sft: {kind: sft, data: demonstrations, gate: {metric: test_nll, at_most: 2.0}}
  reward: {kind: reward_model, init: sft, data: preferences, gate: {metric: pair_accuracy, at_least: 0.7}}
  value:
    kind: value_pretraining
    policy: sft
    init: reward
    reward: main
    prompts: demonstrations
    gate: [{metric: explained_variance, at_least: 0.3}, {metric: best_iteration, at_least: 1}]
    test_samples: 500
  policy:
    {kind: policy_optimization, algorithm: vapo_SWITCHES, init: sft, critic: value, reward: main, prompts: demonstrations}
  evaluation:
    kind: evaluation
    candidate: policy
    baseline: sft
    judge: {reward: main}
    prompts: demonstrations
    gate: [{metric: win_rate, at_least: 0.5}, {metric: truncated_share, at_most: 0.1}]
"""


def warned(
    tmp_path: Path, *, demonstrations: Any = 500, preferences: Any = 500, change: tuple[str, str] = ("", ""),
    measured: dict[str, dict[str, float | None]] | None = None,
) -> list[str]:  # fmt: skip
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("")
    text = RECIPE.replace("vapo_SWITCHES", "{preset: vapo, length_adaptive_alpha: 1.0}").replace(*change)
    text = text.replace("DEMONSTRATIONS", str(demonstrations)).replace("PREFERENCES", str(preferences))
    recipe = parse_recipe(text, folder=tmp_path)
    return list(few_prompts(recipe, dependencies(recipe), measured or {}))


def test_enough_prompts_are_not_warned_of(tmp_path: Path) -> None:
    assert warned(tmp_path) == []


def test_what_nobody_knows_yet_is_not_guessed(tmp_path: Path) -> None:
    assert warned(tmp_path, demonstrations=0.05, preferences=0.05) == []


def test_four_pairs_cannot_tell_anything(tmp_path: Path) -> None:
    """4 right of 4 pairs show that the share is at least 0.283."""
    assert warned(tmp_path, preferences=4) == [
        "stages.reward.gate: pair_accuracy is measured on 4 prompts at most, of which not even a perfect result tells "
        "it from 0.7; set more apart in data.preferences.split.test"
    ]


@pytest.mark.parametrize(("pairs", "said"), [(32, "which tell it from 0.7 only from 0.875 up"), (120, None)])
def test_a_share_is_told_from_its_threshold_within_a_tenth_or_warned_of(
    tmp_path: Path, pairs: int, said: str | None
) -> None:
    """Wilson's interval (with t) lies above 0.7 from 28 of 32 pairs (0.875) on, and from 95 of 120 (0.792) on."""
    found = warned(tmp_path, preferences=pairs)
    assert len(found) == (said is not None)
    assert all(said and said in warning for warning in found)


def test_of_other_estimates_thirty_are_enough(tmp_path: Path) -> None:
    few = warned(tmp_path, demonstrations=29)
    assert [warning.split(":")[0] for warning in few] == [
        "stages.sft.gate",
        "stages.value.gate",
        "stages.evaluation.gate",
        "stages.evaluation.gate",
    ]
    assert "too few to know its standard error (from 30 on)" in few[0]
    assert "which tell it from 0.5 only from 0.724 up" in few[2]
    assert "of which not even a perfect result tells it from 0.1" in few[3]
    many = warned(tmp_path, demonstrations=30)
    assert [warning.split(":")[0] for warning in many] == ["stages.evaluation.gate"] * 2


def test_fewer_samples_than_prompts_are_as_few_prompts(tmp_path: Path) -> None:
    [said] = warned(tmp_path, change=("test_samples: 500", "test_samples: 16"))
    assert said.startswith("stages.value.gate: explained_variance is measured on 16 prompts at most")


def test_rows_that_have_been_counted_are_what_counts(tmp_path: Path) -> None:
    """A share of 0.05 of a small file is held out."""
    [said] = warned(
        tmp_path,
        preferences=0.05,
        measured={"data.preferences": {"test_rows": 9.0, "validation_rows": 500.0}},
    )
    assert "pair_accuracy is measured on 9 prompts at most" in said


def test_a_confidence_that_is_asked_for_is_what_has_to_be_reached(tmp_path: Path) -> None:
    surer = ("at_least: 0.7}", "at_least: 0.7, confidence: 0.999}")
    assert warned(tmp_path, preferences=200) == []
    assert len(warned(tmp_path, preferences=200, change=surer)) == 1
