"""All mistakes are reported at once: fields and the rules over them, presets' switches, every arm of a sweep."""

import re
from pathlib import Path

import pytest

from tests.support.every import every
from vantage.schemas.loading.field_errors import validated
from vantage.schemas.loading.recipe_file import load_recipe, parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.sweep import load_sweep


def refused(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, name="x.yaml", overrides=overrides)
    return str(caught.value).splitlines()


def fields_of(problems: list[str]) -> list[str]:
    """Return the path of each problem, without file, line and message."""
    return [re.sub(r"^(x\.yaml:\d+: )", "", problem).split(": ")[0] for problem in problems]


def test_all_rules_that_a_preset_with_switches_breaks(text: str) -> None:
    switches = (
        "{preset: grpo, samples_per_prompt: 1, drop_uniform_groups: true, shared_trunk: true, kl_loss_kind: k1, "
        "kl_target: 6, positive_nll_coef: 0.1}"
    )
    problems = refused(text.replace("algorithm: vapo", f"algorithm: {switches}"))
    assert fields_of(problems) == ["stages.policy.algorithm"] * 5
    told = "\n".join(problems)
    for said in (
        "drop_uniform_groups drops every group of samples_per_prompt=1",
        "shared_trunk trains a value head, which advantage=group_normalised does not read",
        "kl_loss_kind=k1 has an expected gradient of 0",
        "kl_target=6 multiplies kl_coef, which is 0",
        "positive_nll_coef=0.1 needs to know which responses are right",
    ):
        assert said in told


def test_switches_of_a_preset_that_is_not_known_are_checked_all_the_same(text: str) -> None:
    switches = "{preset: vappo, gamma: 2, clip_range_low: 0, lambda: 1, dual_clip: x}"
    problems = refused(text.replace("algorithm: vapo", f"algorithm: {switches}"))
    assert fields_of(problems) == [
        f"stages.policy.algorithm.{field}"
        for field in ("gamma", "preset", "clip_range_low", "dual_clip", "lambda")
    ]


def test_wrong_fields_do_not_hide_the_rules_of_what_they_stand_in(text: str) -> None:
    """One field of the algorithm and one of the stage are wrong, other fields break a rule of each, and the value stage
    disagrees; all five are reported.
    """
    policy = (
        "{preset: vapo, gamma: 2, drop_uniform_groups: true, samples_per_prompt: 1, kl_coef: 0.1}\n"
        "    learning_rate: -1\n    batch_size: 100\n    minibatch_size: 64"
    )
    text = text.replace("algorithm: vapo", f"algorithm: {policy}")
    text = text.replace("init: reward\n", "init: reward\n    returns: {kl_coef: 0.2}\n")
    assert sorted(fields_of(refused(text))) == [
        "stages.policy",
        "stages.policy.algorithm",
        "stages.policy.algorithm.gamma",
        "stages.policy.learning_rate",
        "stages.value.returns.kl_coef",
    ]


@every("size", ["x", "-1", "0.5", "null", "[]"])
def test_a_rule_about_a_wrong_field_is_not_told_of_its_default(text: str, size: str) -> None:
    """minibatch_size=100 does not divide the default of 256, but nobody knows what the wrong batch_size should be."""
    problems = refused(text, f"stages.policy.batch_size={size}", "stages.policy.minibatch_size=100")
    assert len(problems) == 1
    assert problems[0].startswith(f"--set stages.policy.batch_size={size}: ")


def test_a_wrong_item_of_a_list_leaves_the_numbers_of_the_others(text: str) -> None:
    terms = "terms: [3, {model: reward, verifier: arithmetic, weight: x}, {wrong: 1}]"
    problems = refused(text.replace("terms:\n      - {model: reward}\n", terms + "\n"))
    assert sorted(fields_of(problems)) == [
        "rewards.main.terms.0",
        "rewards.main.terms.1",
        "rewards.main.terms.1.weight",
        "rewards.main.terms.2",
    ]


def test_what_is_left_out_is_said(text: str) -> None:
    plain = {"recipe": "x", "model": {"source": "builtin:tiny", "chat": 3}, "data": {}, "stages": 3}
    fields = validated(Recipe, plain)
    assert fields.value is None
    assert fields.omitted == (("model", "chat"), ("stages",))
    assert fields.plain == {"recipe": "x", "model": {"source": "builtin:tiny"}, "data": {}}
    assert validated(Recipe, load_recipe("quickstart").model_dump(mode="json")).problems == []


def sweep_refused(folder: Path, text: str) -> list[str]:
    (folder / "x.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_sweep(folder / "x.yaml")
    told = str(caught.value).replace(f"{folder}/", "").splitlines()
    return [problem.split(";")[0] for problem in told]


def test_everything_about_a_sweep(tmp_path: Path, text: str) -> None:
    """Problems of the sweep's fields and rules, of the recipe and of every arm come together, those of the recipe once."""
    (tmp_path / "small.yaml").write_text(text.replace("centre_on: demos", "centre_on: demo"))
    assert sorted(sweep_refused(
        tmp_path,
        "sweep: parts\nrecipe: small.yaml\nset: {stages.sft.epochs: -1}\nseeds: [1, 1, -3]\n"
        "reseeds: [policy]\nbaseline: vap\nmeasure: [{stage: evaluation}]\n"
        "arms:\n  vapo: {stages.policy.seed: 3}\n  plain: {stages.policy.algorithm: pppo}\n"
        "  other: {stages.policy.critic: sft, stages.policy.algorithm.gamma: 2}\n  none: 3\npubished: 1\n",
    )) == sorted([
        "x.yaml:3: set.stages.sft.epochs: -1 must be above 0",
        "x.yaml:4: seeds.2: -3 must be at least 0",
        "x.yaml:4: seeds.1: 1 occurs twice",
        "x.yaml:6: baseline: 'vap' is not an arm",
        "x.yaml:7: measure.0.metric: is required",
        "x.yaml:9: arms.vapo.stages.policy.seed: the sweep itself sets the seed of 'policy'",
        "x.yaml:10: arms.plain.stages.policy.algorithm: 'pppo' is not known",
        "x.yaml:11: arms.other.stages.policy.critic: 'sft' is an sft stage",
        "x.yaml:11: arms.other.stages.policy.algorithm.gamma: 2 must be at most 1",
        "x.yaml:12: arms.none: 3 must be a mapping (field: value)",
        "x.yaml:13: pubished: there is no field 'pubished' here",
        "small.yaml:17: stages.reward.centre_on: no dataset is called 'demo'",
    ])  # fmt: skip


def test_stages_and_metrics_of_a_sweep_are_told_beside_a_wrong_arm(tmp_path: Path, text: str) -> None:
    (tmp_path / "small.yaml").write_text(text)
    assert sorted(sweep_refused(
        tmp_path,
        "sweep: parts\nrecipe: small.yaml\nseeds: [1]\nreseeds: [policy, polcy]\nbaseline: plain\n"
        "measure: [{stage: evaluation, metric: acuracy}, {stage: eval, metric: x}, {stage: reward, metric: pair_accuracy}]\n"
        "arms:\n  vapo: {}\n  wrong: {stages.policy.critic: sft}\n",
    )) == [
        "x.yaml:4: reseeds.1: 'polcy' is not a stage of the recipe",
        "x.yaml:5: baseline: 'plain' is not an arm",
        "x.yaml:6: measure.0.metric: 'acuracy' is not measured by 'evaluation'",
        "x.yaml:6: measure.1.stage: 'eval' is not a stage of arm 'vapo'",
        "x.yaml:6: measure.2.stage: no seed reaches 'reward' in arm 'vapo', so every seed would measure the same",
        "x.yaml:9: arms.wrong.stages.policy.critic: 'sft' is an sft stage",
    ]  # fmt: skip
