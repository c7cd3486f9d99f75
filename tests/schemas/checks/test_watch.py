"""A watch in a recipe is refused where it is wrong, is read by its stage, and enters the stage's key."""

from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.jobs import key_parts_of, rewards_of
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.metric_names import INITIAL_AGREEMENT_LOW
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.default_guards import guards_of
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization
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
    """Return the recipe with a second reward, of a second reward model and a verifier of the recipe."""
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
        (
            ["{judge: {model: value}}"],
            "stages.policy.watch.judge.model: 'value' is a value_pretraining stage",
        ),
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
    """The action of a watch is a guard of the stage."""
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


def test_a_judging_model_is_an_input_and_in_the_key_by_its_content(text: str) -> None:
    whole = watched(text, "{judge: {model: sft}}")
    recipe = parse_recipe(whole)
    assert dependencies(recipe)["policy"]["watch"] == "sft"
    stage = policy_of(recipe)
    assert stage.watch is not None and stage.watch.judge.kind == "model"
    by_model = watched(text, "{judge: {model: model}}")
    assert key_of(by_model, watch="0" * 64) == key_of(whole)
    assert key_of(whole, watch="3" * 64) != key_of(whole)
    assert key_of(watched(text, "{judge: {model: sft, answers: [X, Y]}}")) != key_of(whole)


def test_a_judging_model_may_be_another_of_the_recipe(text: str) -> None:
    text = text.replace("data:\n", 'models:\n  big: {source: "builtin:nano"}\ndata:\n', 1)
    recipe = parse_recipe(watched(text, "{judge: {model: big}}"))
    assert dependencies(recipe)["policy"]["watch"] == "models.big"


MORE = '  more: {source: "builtin:arithmetic/prompts", rows: 90}\n'


def test_prompts_of_its_own_are_an_input_and_in_the_key_by_their_content(text: str) -> None:
    text = text.replace("data:\n", f"data:\n{MORE}", 1)
    short = watched(text, "{judge: {verifier: arithmetic}, prompts: more}")
    recipe = parse_recipe(short)
    assert dependencies(recipe)["policy"]["watch_prompts"] == "data.more"
    assert dependencies(recipe)["data.more"] == {}
    assert policy_of(recipe).watch_prompts == "more"
    long = watched(text, "{judge: {verifier: arithmetic}, prompts: {data: more, split: validation}}")
    assert parse_recipe(long) == recipe
    assert key_of(long) == key_of(short)
    renamed = short.replace("  more:", "  others:").replace("prompts: more", "prompts: others")
    assert key_of(renamed) == key_of(short)
    assert key_of(short, watch_prompts="4" * 64) != key_of(short)
    for changed in ("{data: more, split: train}", "{data: more, samples: 9}"):
        assert key_of(watched(text, f"{{judge: {{verifier: arithmetic}}, prompts: {changed}}}")) != key_of(
            short
        )
    assert key_of(watched(text, "{judge: {verifier: arithmetic}}")) != key_of(short)


def test_a_test_set_is_refused_with_the_evaluation_that_reads_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "exam.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    text = text.replace(
        "data:\n", f"data:\n  exam: {{source: '{tmp_path}/exam.jsonl', split: {{test: all}}}}\n", 1
    )
    text = text.replace(
        "    judge: {verifier: arithmetic}\n    prompts: tasks",
        "    judge: {verifier: own}\n    prompts: exam",
    )
    [problem] = problems(watched(text, "{judge: {verifier: own}, prompts: exam}"))
    assert (
        "stages.policy.watch.prompts: data.exam is a test set (split.test: all), which evaluation reads, and a watch chooses the "
        "policy that is kept; name prompts that no evaluation is measured on"
    ) in problem


def test_the_judges_verifier_is_tried_on_the_watchs_prompts_alone(text: str) -> None:
    text = text.replace("data:\n", f"data:\n{MORE}", 1).replace(
        "      - {model: reward}\n", "      - {model: reward}\n      - {verifier: other_rule}\n", 1
    )
    file = text.partition("own: {source: '")[2].partition("'")[0]
    text = text.replace("verifiers:\n", f"verifiers:\n  other_rule: {{source: '{file}'}}\n")
    steps = dependencies(parse_recipe(watched(text, "{judge: {verifier: own}, prompts: more}")))
    assert steps["verifiers.own"] == {"prompts.0": "data.more"}
    assert steps["verifiers.other_rule"] == {"prompts.0": "data.tasks", "prompts.1": "data.more"}
    by_reward = dependencies(parse_recipe(watched(text, "{judge: {reward: other}, prompts: more}")))
    assert by_reward["verifiers.own"] == {"prompts.0": "data.more"}
    without = dependencies(parse_recipe(watched(text, "{judge: {verifier: own}}")))
    assert without["verifiers.own"] == {"prompts.0": "data.tasks"}


BEST_OF = """\
  best:
    kind: best_of_n
    init: sft
    reward: main
    prompts: tasks
"""


def test_a_guard_on_the_agreement_needs_a_judge_that_scores(text: str) -> None:
    guard = "guards: [{metric: watch_initial_pair_accuracy_low, below: 0.6, over: 1, action: stop}]"
    assert problems(watched(text, "{judge: {verifier: own}}", guard)) == []
    [problem] = problems(watched(text, "{judge: {model: sft}}", guard))
    assert (
        "stages.policy.guards.0.metric: watch_initial_pair_accuracy_low is measured only where the watch's judge scores each "
        "response by itself, and a model compares two policies; use a verifier or a reward as the judge, or leave the guard out"
    ) in problem


def test_a_guard_on_the_judge_of_preferences_needs_a_reward_that_judges(text: str) -> None:
    guard = "guards: [{metric: watch_preference_accuracy, below: 0.5, over: 1}]"
    assert problems(watched(text, "{judge: {reward: other}}", "preferences: pairs", guard)) == []
    [problem] = problems(watched(text, "{judge: {verifier: own}}", "preferences: pairs", guard))
    assert (
        "watch_preference_accuracy is measured only where the stage has a watch whose judge is a reward; use a reward as the judge, or "
        "leave the guard out"
    ) in problem


def test_best_of_n_has_a_watch_too(text: str) -> None:
    plain = text.replace("  evaluation:\n", f"{BEST_OF}  evaluation:\n", 1)
    recipe = parse_recipe(
        plain.replace(BEST_OF, f"{BEST_OF}    watch: {{judge: {{model: sft}}, every: 3}}\n")
    )
    stage = recipe.stages["best"]
    assert isinstance(stage, BestOfN)
    assert (stage.validations, stage.keeps_by_watch) == ((2, 3), True)
    assert dependencies(recipe)["best"]["watch"] == "sft"
    assert str(guards_of(stage)[0]).startswith("watch:")
    assert "watch_lost" in [guard.metric for guard in guards_of(stage)]
    assert INITIAL_AGREEMENT_LOW not in [guard.metric for guard in guards_of(stage)], "a model compares"
    by_verifier = plain.replace(BEST_OF, f"{BEST_OF}    watch: {{judge: {{verifier: own}}}}\n")
    scoring = parse_recipe(by_verifier).stages["best"]
    assert isinstance(scoring, BestOfN)
    assert INITIAL_AGREEMENT_LOW in [guard.metric for guard in guards_of(scoring)]
    without = parse_recipe(plain).stages["best"]
    assert isinstance(without, BestOfN)
    assert not {"watch", "keep"} & without.model_dump(mode="json").keys()
    assert "watch_lost" not in [guard.metric for guard in guards_of(without)]
    [problem] = problems(plain.replace(BEST_OF, f"{BEST_OF}    watch: {{judge: {{reward: main}}}}\n"))
    assert "watch.judge.reward=main is the reward that trains the policy" in problem
