"""A recipe's text becomes a ``Recipe``, or every mistake that a person makes on the way gets its message."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.every import every
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading import recipe_file
from vantage.schemas.loading.recipe_file import (
    builtin_recipes,
    find_recipe,
    load_recipe,
    parse_recipe,
)
from vantage.schemas.problems import Problem, RecipeError
from vantage.schemas.recipe.algorithm import Algorithm, Returns
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.steps import dependencies


def refused(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, name="x.yaml", overrides=overrides)
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return str(caught.value).splitlines()


def problems_of(source: str, *overrides: str) -> tuple[Problem, ...]:
    """Return the problems of a text (or of a built-in recipe); none where it loads."""
    try:
        parse_recipe(source, overrides=overrides) if "{" in source else load_recipe(source, overrides)
    except RecipeError as error:
        return error.problems
    return ()


def algorithm_of(recipe: Recipe) -> Algorithm:
    stage = recipe.stages["policy"]
    assert isinstance(stage, PolicyOptimization)
    return stage.algorithm


# -- what loads


def test_a_recipe_loads_with_inheritance_written_out(text: str) -> None:
    recipe = parse_recipe(text)
    value = recipe.stages["value"]
    assert isinstance(value, ValuePretraining)
    assert (value.returns, value.reference) == (Returns(), "sft")
    assert recipe.recipe == "small"


def test_loading_its_own_output_changes_nothing(text: str) -> None:
    recipe = parse_recipe(text)
    assert parse_recipe(json.dumps(recipe.model_dump(mode="json"))) == recipe


@pytest.mark.parametrize("source", ["quickstart", "recipes/quickstart.yaml"])
def test_the_quickstart_loads_by_name_and_by_path(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    recipe = load_recipe(source)
    assert list(recipe.stages) == ["sft", "reward", "value", "policy", "evaluation"]
    assert warnings(recipe, dependencies(recipe)) == []


def is_a_sweep(name: str) -> bool:
    """Return whether the file is of many runs: test_sweep.py loads those."""
    return "sweep" in yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))


@every("name", builtin_recipes())
def test_every_builtin_recipe_is_one_that_loads_or_says_what_to_give(name: str) -> None:
    # A recipe for the user's own model and data names none.
    assert (
        is_a_sweep(name)
        or [problem for problem in problems_of(name) if problem.path[-1:] != ("source",)] == []
    )


def test_a_sweep_is_no_recipe_and_that_is_all_that_is_said() -> None:
    (problem,) = problems_of("ablation_vapo")
    assert str(problem).endswith("sweep: is a sweep, not a recipe; use `vantage sweep`")


def test_numbers_with_an_exponent_are_numbers(text: str) -> None:
    recipe = parse_recipe(
        text.replace("kind: sft, data: demos", "kind: sft, data: demos, learning_rate: 1e-5")
    )
    assert recipe.stages["sft"].learning_rate == 1e-5  # type: ignore[union-attr]


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("off", False), ("true", True)])
def test_chat_may_be_said_with_yaml_words(text: str, word: str, value: bool) -> None:
    assert parse_recipe(text, overrides=[f"model.chat={word}"]).model.chat is value


# -- overrides


def test_overrides_change_what_they_name(text: str) -> None:
    recipe = parse_recipe(
        text,
        overrides=[
            "stages.policy.algorithm.clip_range_high=0.2",
            "seed=3",
            "stages.value.gate.at_least=0.5",
            "stages.sft.learning_rate=3e-4",
        ],
    )
    assert algorithm_of(recipe) == Algorithm.model_validate({"preset": "vapo", "clip_range_high": 0.2})
    assert recipe.seed == 3
    assert recipe.stages["value"].gate[0].bound == 0.5
    assert recipe.stages["sft"].learning_rate == 3e-4  # type: ignore[union-attr]


def test_an_override_can_exchange_the_whole_algorithm(text: str) -> None:
    recipe = parse_recipe(text, overrides=["stages.policy.algorithm=ppo"])
    assert algorithm_of(recipe) == Algorithm.model_validate("ppo")
    assert recipe.stages["value"].returns == Returns(kl_coef=0.05)  # type: ignore[union-attr]


def test_an_override_can_exchange_the_critic_for_a_method_without(text: str) -> None:
    recipe = parse_recipe(text, overrides=["stages.policy.algorithm=dr_grpo"])
    assert recipe.stages["policy"].critic is None  # type: ignore[union-attr]
    assert (
        warnings(recipe, dependencies(recipe))[0]
        == "stages.value: no policy_optimization stage starts from this critic"
    )


@every(
    ("override", "said"),
    [
        ("stages.policy.critic=sft", "'sft' is an sft stage; a critic is a value_pretraining or reward_model stage; "
         "use one of: reward, value"),
        ("stages.policy.batch_size=100", "stages.policy: batch_size=100 is not a multiple of minibatch_size=128; "
         "use minibatch_size: 100 or a divisor of it"),
        ("stages.policy.algorithm.samples_per_prompt=7",
         "stages.policy: batch_size=256 is not a multiple of algorithm.samples_per_prompt=7; use 252 or 259"),
        ("stages.policy.algorithm=vapoo", "'vapoo' is not known; did you mean 'vapo'?"),
        ("stages.policy.algorithm.gamma=2", "2 must be at most 1"),
        ("stages.value.gate.at_most=1", "stages.value.gate: a gate has either at_least or at_most; "
         "give exactly one of them"),
        ("stages.policy.critic=null", "stages.policy: algorithm.advantage=gae needs a critic; "
         "name a value_pretraining or reward_model stage as critic, or a policy as fresh_critic, or set algorithm.shared_trunk: true"),
        ("stages.policy.fresh_critic=sft", "stages.policy: critic=value and fresh_critic=sft exclude each other; give one"),
        ("stages.policy.algorithm=rloo", "stages.policy: algorithm.importance_ratio=false takes one optimiser step on "
         "each rollout, but epochs=1 and minibatch_size=128 of batch_size=256 make more; "
         "use epochs: 1 and minibatch_size: 256"),
        ("stages.policy.algorithm.drop_uniform_group=true", "there is no field 'drop_uniform_group' here; "
         "did you mean 'drop_uniform_groups'?"),
        ("stages.value.returns.gama=1", "there is no field 'gama' here; did you mean 'gamma'?"),
        ("stages.value.gamma=1", "there is no field 'gamma' here; it belongs into stages.value.returns.gamma"),
        ("precision=bfloat16", "there is no field 'precision' here; it belongs into stages.NAME.precision"),
        ("generation.temp=1", "there is no field 'temp' here; did you mean 'temperature'?"),
        ("stages.value.returns.kl_coef=0.1", "0.1 is not the kl_coef of 'policy' (0), which starts from this critic; "
         "leave returns out here, to inherit them"),
        ("seed=x", "'x' must be a whole number; write the number without quotes or units"),
        ("stages=3", "3 must be a mapping (field: value); write its fields as {FIELD: VALUE}, or each on an indented line of its own"),
        ("recipe=2024", "2024 must be text; put quotes around it"),
        ("stages.sft=null", "null must be a mapping (field: value); write its fields as {FIELD: VALUE}, or each on an indented line of its own"),
    ],
)  # fmt: skip
def test_what_an_override_breaks_is_reported_as_its_fault(text: str, override: str, said: str) -> None:
    assert f"--set {override}: {said}" in refused(text, override)


def test_one_gate_in_a_list_is_blamed_on_its_override(text: str) -> None:
    listed = text.replace("gate: {metric: explained_variance, at_least: 0.3}",
                          "gate: [{metric: explained_variance, at_least: 0.3}]")  # fmt: skip
    assert refused(listed, "stages.value.gate.at_least=high") == [
        "--set stages.value.gate.at_least=high: stages.value.gate.0.at_least: 'high' must be a number; "
        "write the number without quotes or units"
    ]


def test_problems_of_the_file_and_of_overrides_come_together(text: str) -> None:
    problems = refused(text.replace("init: sft", "init: stf", 1), "seed", "stages.x.y=1", "seed=-1")
    assert [problem.partition(": ")[0] for problem in problems] == [
        "x.yaml:15", "--set seed", "--set stages.x.y=1", "--set seed=-1",
    ]  # fmt: skip


# -- all errors at once, with their lines


BROKEN = """\
recipe: Broken Recipe
seed: -1
model: {source: "builtin:tinny"}
data:
  demos: {source: "builtin:arithmetic/demonstrations", splitt: {test: 5}}
  pairs: {source: "builtin:arithmetic/preferences", split: {test: 1.5}}
rewards:
  main:
    terms:
      - {model: reward, verifier: arithmetic}
stages:
  sft: {kind: sft, data: demoos, learning_rate: true}
  reward:
    kind: reward_modell
    init: sft
  value:
    kind: value_pretraining
    policy: sft
    init: reward
    prompts: tasks
    gate:
      - {metric: explained_varianc, at_least: 0.3, at_most: 0.5}
  policy:
    kind: policy_optimization
    algorithm: {preset: vapo, clip_range_hihg: 0.2}
    clip_range_high: 0.2
    init: sft
    critic: sft
    reward: maain
    prompts: demos
    prompts: demos
  evaluation: {kind: evaluation, candidate: policy, baseline: sft, judge: {}, prompts: demos, epochs: 3}
publish:
  - {stage: value, registered_model: "../m", after: sft}
"""


def test_everything_wrong_is_found_in_one_loading() -> None:
    assert refused(BROKEN) == [
        "x.yaml:1: recipe: 'Broken Recipe' is not a valid name; start with a lower-case letter; "
        "lower-case letters, digits, underscores and hyphens follow, as in broken-recipe",
        "x.yaml:2: seed: -1 must be at least 0",
        "x.yaml:3: model.source: there is no built-in model 'builtin:tinny'; did you mean 'builtin:tiny'?",
        "x.yaml:5: data.demos.splitt: there is no field 'splitt' here; did you mean 'split'?",
        "x.yaml:6: data.pairs.split.test: 1.5 must be a whole number or below 1 or 'all'",
        "x.yaml:10: rewards.main.terms.0: a reward term names either a model, a verifier, a judge, a reward server (http) or a length; "
        "give exactly one of them",
        "x.yaml:12: stages.sft.learning_rate: true must be a number",
        "x.yaml:12: stages.sft.data: no dataset is called 'demoos'; did you mean 'demos'?",
        "x.yaml:14: stages.reward.kind: 'reward_modell' is not a kind of stage; did you mean 'reward_model'?",
        "x.yaml:16: stages.value.reward: is required; add `reward: …`",
        "x.yaml:20: stages.value.prompts: no dataset is called 'tasks'; use one of: demos, pairs",
        "x.yaml:22: stages.value.gate.0: a gate has either at_least or at_most; give exactly one of them",
        "x.yaml:22: stages.value.gate.0.metric: a value_pretraining stage does not measure 'explained_varianc'; "
        "did you mean 'explained_variance'?",
        "x.yaml:25: stages.policy.algorithm.clip_range_hihg: there is no field 'clip_range_hihg' here; "
        "did you mean 'clip_range_high'?",
        "x.yaml:26: stages.policy.clip_range_high: there is no field 'clip_range_high' here; "
        "it belongs into stages.policy.algorithm.clip_range_high",
        "x.yaml:28: stages.policy.critic: 'sft' is an sft stage; "
        "a critic is a value_pretraining or reward_model stage; use one of: value",
        "x.yaml:29: stages.policy.reward: no reward is called 'maain'; did you mean 'main'?",
        "x.yaml:31: stages.policy.prompts: occurs twice, first in line 30; keep one of the two",
        "x.yaml:32: stages.evaluation.judge: a judge is a verifier, a reward or a model; "
        "give exactly one of them",
        "x.yaml:32: stages.evaluation.epochs: a stage of kind evaluation has no 'epochs'; "
        "it is a field of sft and reward_model and dpo and kto and value_pretraining "
        "and policy_optimization and best_of_n and distillation",
        "x.yaml:34: publish.0.registered_model: '../m' is not a valid name; "
        "use letters, digits, '.', '_' and '-' (pattern ^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$)",
        "x.yaml:34: publish.0.stage: 'value' is a value_pretraining stage; "
        "a stage is a sft or dpo or kto or policy_optimization or best_of_n or distillation or reward_model stage; "
        "use one of: sft, policy",
        "x.yaml:34: publish.0.after: 'sft' has no gate that could pass; use one of: value",
    ]


@every(
    ("written", "instead", "said"),
    [
        ("seed: x\nrecipe: small", "recipe: small", "x.yaml:1: seed: 'x' must be a whole number; "
         "write the number without quotes or units"),
        ("", "recipe: small\n", "x.yaml:1: recipe: is required; give the recipe a name, for example "
         "`recipe: quickstart`"),
        ("critic: value\n    batch_size: '256'", "critic: value",
         "x.yaml:31: stages.policy.batch_size: '256' must be a whole number; write the number without quotes or units: 256"),
        ("kind: sft, epochs: .inf,", "kind: sft,", "x.yaml:12: stages.sft.epochs: .inf is not a finite number; "
         "write a number, or leave the field out"),
        ("kind: sft, data: [demos]", "kind: sft, data: demos", "x.yaml:12: stages.sft.data: [\"demos\"] must be text; "
         "write one value, without brackets"),
        ("- {model: reward}\n  Main: {terms: []}", "- {model: reward}", "x.yaml:11: rewards.Main: 'Main' is not a "
         "valid name; start with a lower-case letter; lower-case letters, digits and underscores follow, as in main"),
        ("- {model: reward}\n  none: {terms: []}", "- {model: reward}",
         "x.yaml:11: rewards.none.terms: [] must be 1 or more in number"),
        ("{data: demos}", "{kind: sft, data: demos}", "x.yaml:12: stages.sft.kind: is required; "
         "use one of: sft, reward_model, dpo, kto, value_pretraining, policy_optimization, best_of_n, distillation, "
         "preference_collection, rollout_collection, prompt_selection, reward_evaluation, benchmark_evaluation, evaluation"),
        ("algorithm: [vapo]", "algorithm: vapo", "x.yaml:28: stages.policy.algorithm: [\"vapo\"] must be a mapping "
         "(field: value); write vapo alone, without brackets, or its fields as {FIELD: VALUE}"),
        ("model: builtin:tiny", 'model: {source: "builtin:tiny"}',
         "x.yaml:2: model: 'builtin:tiny' must be a mapping (field: value); write {source: 'builtin:tiny'}"),
        ("at_least: 0.3, on_fail: retry", "at_least: 0.3", "x.yaml:25: stages.value.gate.on_fail: 'retry' is not "
         "known; use one of: stop, continue, approve, extend"),
        ("stages: []\nx:", "stages:", "x.yaml:11: stages: [] must be a mapping (field: value); write its fields as {FIELD: VALUE}, or each on an indented line of its own"),
        ("judge: {verifer: arithmetic}", "judge: {verifier: arithmetic}",
         "x.yaml:37: stages.evaluation.judge.verifer: there is no field 'verifer' here; did you mean 'verifier'?"),
        ("pairs: {sorce: x}\n  p", "pairs", "x.yaml:5: data.pairs.source: is required; add `source: …`"),
    ],
)  # fmt: skip
def test_one_mistake(text: str, written: str, instead: str, said: str) -> None:
    """A recipe with this mistake is refused with this message."""
    assert instead in text
    assert said in refused(text.replace(instead, written, 1))


def test_a_tab_stops_the_reading(text: str) -> None:
    assert refused(text.replace("    kind: reward_model", "\tkind: reward_model")) == [
        "x.yaml:14: the line is indented with a tab; YAML allows spaces only"
    ]


@pytest.mark.parametrize("text", ["3", "[1, 2]", "just text", "null"])
def test_a_recipe_is_a_mapping(text: str) -> None:
    assert refused(text) == ["x.yaml:1: is not a mapping; a recipe starts with `recipe: NAME`"]


def test_a_ring_of_stages_is_found_beside_other_mistakes(text: str) -> None:
    problems = refused(
        text.replace("kind: sft, data: demos", "kind: sft, data: demos, init: policy, seed: -1")
    )
    assert problems[0] == "x.yaml:12: stages.sft.seed: -1 must be at least 0"
    assert problems[1].startswith("x.yaml:12: stages.sft.init: stages wait for one another: sft reads policy")


def test_disagreement_has_its_line(text: str) -> None:
    returns = "init: reward\n    returns:\n      kl_kind: k1\n      gamma: 0.9\n"
    assert refused(text.replace("init: reward\n", returns)) == [
        "x.yaml:25: stages.value.returns.gamma: 0.9 is not the gamma of 'policy' (1), which starts from this critic; "
        "leave returns out here, to inherit them"
    ]


def test_a_disagreement_of_heirs_stands_at_the_critic(text: str) -> None:
    second = "  second: {kind: policy_optimization, algorithm: ppo, init: sft, critic: value, reward: main, prompts: tasks}\n"
    assert refused(text.replace("  evaluation:\n", second + "  evaluation:\n")) == [
        "x.yaml:19: stages.value.returns: are to be those of the policy stages that start from this critic, "
        "but kl_coef differs: policy has 0, second has 0.05; use one kl_coef in all, or pretrain a critic for each"
    ]


def test_a_flood_of_stages_is_refused_without_looking_at_each(text: str) -> None:
    flood = "".join(f"  s{i}: {{kind: sft, data: nothing, init: s{i + 1}}}\n" for i in range(1000))
    problems = refused(text.replace("stages:\n", "stages:\n" + flood))
    assert len(problems) == 1
    assert problems[0].startswith("x.yaml:11: stages: {")
    assert problems[0].endswith("… must be 200 or fewer in number")


@pytest.mark.slow
def test_no_value_of_any_shape_escapes_the_reports(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever replaces a field, the recipe loads or is refused with problems; nothing else is raised."""
    read = cache(recipe_file._read)  # the text is the same each time
    monkeypatch.setattr(recipe_file, "_read", lambda *given: copy.deepcopy(read(*given)))

    def paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        if isinstance(node, dict):
            return [path, *(p for key, inner in node.items() for p in paths(inner, (*path, key)))]
        if isinstance(node, list):
            return [path, *(p for i, inner in enumerate(node) for p in paths(inner, (*path, i)))]
        return [path]

    for path in paths(plain)[1:]:
        for value in (None, True, 3, -1.5, "word", "", [], [3], ["sft"], {}, {"kind": "sft"}, [{}], [[]]):
            override = f"{'.'.join(map(str, path))}={json.dumps(value)}"
            assert all(problem.message for problem in problems_of(json.dumps(plain), override))
