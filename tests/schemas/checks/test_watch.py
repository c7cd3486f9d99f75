"""A watch as a recipe writes it: its names, what is refused, what a stage reads and what enters its key."""

from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.jobs import key_parts_of, rewards_of
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.default_guards import guards_of
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies

POLICY = "    algorithm: vapo\n"
OTHER = """\
  other:
    terms:
      - {model: second}
      - {verifier: own, weight: 0.5}
"""
SECOND = """\
  second:
    kind: reward_model
    init: sft
    data: pairs
    seed: 3
"""


def watched(text: str, watch: str, *more: str) -> str:
    lines = "".join(f"    {line}\n" for line in (f"watch: {watch}", *more))
    return text.replace(POLICY, POLICY + lines)


@pytest.fixture
def text(text: str, tmp_path: Path) -> str:
    """With a second reward, of a second reward model and a verifier of the recipe."""
    file = tmp_path / "own.py"
    file.write_text("def verify(prompt, response, answer):\n    return True\n")
    text = text.replace("data:\n", 'data:\n  long: {source: "builtin:arithmetic_long/prompts"}\n', 1)
    text = text.replace("stages:\n", OTHER + "stages:\n").replace("  value:\n", SECOND + "  value:\n", 1)
    return text.replace("rewards:\n", f"verifiers:\n  own: {{source: '{file}'}}\nrewards:\n", 1)


def problems(text: str) -> list[str]:
    try:
        parse_recipe(text)
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["{judge: {verifier: arithmetik}}"],
            "stages.policy.watch.judge.verifier: no verifier is called 'arithmetik'",
        ),
        (["{judge: {reward: others}}"], "stages.policy.watch.judge.reward: no reward is called 'others'"),
        (["{judge: {reward: main}}"], "watch.judge.reward=main is the reward that trains the policy"),
        (["{judge: {model: sfft}}"], "stages.policy.watch.judge.model: no stage is called 'sfft'"),
        (["{judge: {model: policy}}"], "stages.policy.watch.judge.model: 'policy' is this stage itself"),
        (["{judge: {model: value}}"], "stages.policy.watch.judge.model: 'value' is a value_pretraining stage"),
        (
            ["{judge: {verifier: arithmetic}, prompts: task}"],
            "stages.policy.watch.prompts: no dataset is called 'task'; did you mean 'tasks'?",
        ),
        (
            ["{judge: {verifier: arithmetic}, prompts: {data: pears}}"],
            "stages.policy.watch.prompts: no dataset is called 'pears'",
        ),
        (
            ["{judge: {verifier: arithmetic}, prompts: pairs}"],
            "stages.policy.watch.prompts: reads as prompts what",
        ),
        (
            ["{judge: {verifier: arithmetic}, prompts: {data: tasks, split: test}}"],
            "stages.policy.watch.prompts.split: test is what gates and evaluations are measured on",
        ),
        (
            ["{judge: {verifier: arithmetic}, prompts: {data: tasks, samples: 0}}"],
            "stages.policy.watch.prompts.samples: 0 must be at least 1",
        ),
        (
            ["{judge: {verifier: arithmetic}, prompts: long}"],
            "stages.policy.watch.judge.verifier: 'arithmetic' does not understand the prompts that policy reads (data.long",
        ),
        (["{judge: {verifier: arithmetic}, every: 0}"], "stages.policy.watch.every: 0 must be at least 1"),
        (
            ["{judge: {verifier: arithmetic}}", "guards: off"],
            "guards=off has no guard act, and a watch acts by one",
        ),
        (
            ["{judge: {verifier: arithmetic}}", "keep: {by: validation}"],
            "watch.on_fall=restore_best restores the best policy by the judge, and keep.by=validation keeps another",
        ),
        (["{every: 3}"], "stages.policy.watch.judge: is required"),
    ],
)
def test_what_is_wrong_is_named_by_its_field(text: str, lines: list[str], said: str) -> None:
    found = problems(watched(text, *lines))
    assert any(said in problem for problem in found), found


def test_a_stage_keeps_by_a_watch_only_if_it_has_one(text: str) -> None:
    [problem] = problems(text.replace(POLICY, POLICY + "    keep: {by: watch}\n"))
    assert "keep.by=watch, and the stage has no watch; add watch, or leave keep out" in problem


def policy_of(recipe: Recipe) -> PolicyOptimization:
    stage = recipe.stages["policy"]
    assert isinstance(stage, PolicyOptimization)
    return stage


def test_the_stage_reads_what_its_judge_scores_with(text: str) -> None:
    recipe = parse_recipe(watched(text, "{judge: {reward: other}}"))
    read = dependencies(recipe)["policy"]
    assert {role: read[role] for role in read if role.startswith("reward.")} == {
        "reward.main.0": "reward",
        "reward.other.0": "second",
        "reward.other.1": "verifiers.own",
    }
    assert list(rewards_of(recipe, "policy")) == ["main", "other"]  # type: ignore[arg-type]
    by_verifier = parse_recipe(watched(text, "{judge: {verifier: own}, every: 2}"))
    assert dependencies(by_verifier)["policy"]["watch"] == "verifiers.own"


def key_of(text: str, **digests: str) -> str:
    recipe: Any = parse_recipe(text)
    inputs = {role: digests.get(role, "0" * 64) for role in dependencies(recipe)["policy"]}
    return stage_key(key_parts_of(recipe, "policy", inputs, facts=()))


def test_the_judge_is_in_the_key_by_its_content_and_not_by_its_name(text: str) -> None:
    first = watched(text, "{judge: {reward: other}}")
    renamed = first.replace("reward: other", "reward: another").replace("  other:\n", "  another:\n")
    roles = {"reward.other.0": "1" * 64, "reward.another.0": "1" * 64}
    assert key_of(first, **roles) == key_of(renamed, **roles)
    assert key_of(first, **roles) != key_of(first)
    assert key_of(first) != key_of(text)
    assert key_of(watched(text, "{judge: {reward: other}, every: 6}")) != key_of(first)
    own = watched(text, "{judge: {verifier: own}}")
    assert key_of(own, watch="2" * 64) != key_of(own)


@pytest.mark.parametrize("on_fall", ["warn", "stop", "restore_best", "finish"])
def test_it_acts_by_a_guard_of_the_recipe(text: str, on_fall: str) -> None:
    stage = policy_of(parse_recipe(watched(text, f"{{judge: {{verifier: arithmetic}}, on_fall: {on_fall}}}")))
    assert str(guards_of(stage)[0]) == (
        f"watch: the reward rose and the judge's score fell, at 2 measurements in a row: {on_fall}"
    )
    assert stage.keeps_by_watch
    assert stage.validations == (10, 5)


def test_without_a_watch_nothing_is_different(text: str) -> None:
    stage = policy_of(parse_recipe(text))
    assert not stage.keeps_by_watch
    assert stage.validations == (10,)
    assert "watch" not in stage.model_dump(mode="json")
    assert "keep" not in stage.model_dump(mode="json")
