"""A sweep's file becomes the recipe of every run, or every mistake on the way gets its message."""

from pathlib import Path

import pytest

from tests.support.every import every
from vantage.schemas.problems import RecipeError
from vantage.schemas.sweep import SweepPlan, load_sweep, with_downstream

SWEEP = """\
sweep: parts
recipe: small.yaml
seeds: [1, 2, 3]
reseeds: [policy, evaluation]
baseline: vapo
measure: {stage: evaluation, metric: accuracy}
arms:
  vapo: {}
  unpretrained: {stages.policy.critic: reward}
  plain:
    stages.policy.algorithm: ppo
    stages.policy.critic: reward
"""


@pytest.fixture
def folder(tmp_path: Path, text: str) -> Path:
    """Return a folder with the small recipe."""
    (tmp_path / "small.yaml").write_text(text)
    return tmp_path


def load(folder: Path, text: str = SWEEP, *overrides: str, **chosen: list[str]) -> SweepPlan:
    (folder / "parts.yaml").write_text(text)
    return load_sweep(folder / "parts.yaml", overrides, **chosen)


def refused(folder: Path, text: str, *overrides: str, **chosen: list[str]) -> list[str]:
    """Return the problems, without the folder before the file's name."""
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *overrides, **chosen)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


# -- what loads


def test_every_arm_comes_with_every_seed_and_a_seed_is_whole_before_the_next(folder: Path) -> None:
    cells = load(folder).cells()
    assert [(cell.seed, cell.arm) for cell in cells] == [
        (1, "vapo"), (1, "unpretrained"), (1, "plain"),
        (2, "vapo"), (2, "unpretrained"), (2, "plain"),
        (3, "vapo"), (3, "unpretrained"), (3, "plain"),
    ]  # fmt: skip
    assert cells[5].name == "plain · 2"


def test_a_seed_reaches_the_named_stages_alone(folder: Path) -> None:
    for cell in load(folder).cells():
        seeds = {name: stage.seed for name, stage in cell.recipe.stages.items() if stage.seed is not None}
        assert seeds == {"policy": cell.seed, "evaluation": cell.seed}


def test_an_arm_is_the_recipe_with_its_overrides(folder: Path) -> None:
    recipes = load(folder).recipes
    presets = {arm: recipe.stages["policy"].algorithm.preset for arm, recipe in recipes.items()}  # type: ignore[union-attr]
    assert presets == {"vapo": "vapo", "unpretrained": "vapo", "plain": "ppo"}


def test_what_the_measured_stage_does_not_need_is_left_out_and_nothing_is_published(folder: Path) -> None:
    recipes = load(folder).recipes
    assert list(recipes["vapo"].stages) == ["sft", "reward", "value", "policy", "evaluation"]
    assert list(recipes["plain"].stages) == ["sft", "reward", "policy", "evaluation"]
    assert {recipe.publish for recipe in recipes.values()} == {()}

    of_sft = SWEEP.replace("[policy, evaluation]", "[sft]").replace(
        "evaluation, metric: accuracy", "sft, metric: test_nll"
    )
    of_sft = of_sft[: of_sft.index("  unpretrained")] + "  long: {stages.sft.epochs: 2}\n"
    recipe = load(folder, of_sft).recipes["vapo"]
    assert (list(recipe.stages), list(recipe.data), recipe.rewards) == (["sft"], ["demos"], {})


def test_what_may_stand_in_for_a_registered_model_is_kept(folder: Path, text: str) -> None:
    """The stage is kept with all that it reads, since only at a run's start it is known which of the two is compared
    with.
    """
    other = 'models: {champion: {source: "models:/x@champion", otherwise: spare}}\n'
    spare = "stages:\n  spare: {kind: sft, data: demos, epochs: 3}\n"
    written = other + text.replace("stages:\n", spare, 1).replace("baseline: sft", "baseline: champion", 1)
    assert written.count("baseline: champion") == 1
    (folder / "small.yaml").write_text(written)
    recipe = load(folder).recipes["vapo"]
    assert list(recipe.models) == ["champion"]
    assert "spare" in recipe.stages


def test_set_is_laid_over_every_arm_after_its_own_overrides(folder: Path) -> None:
    added = "set: {stages.policy.algorithm.clip_range_high: 0.4}\n"
    swept = load(folder, SWEEP + added, "stages.policy.iterations=7")
    stages = [recipe.stages["policy"] for recipe in swept.recipes.values()]
    assert {stage.algorithm.clip_range_high for stage in stages} == {0.4}  # type: ignore[union-attr]
    assert {stage.iterations for stage in stages} == {7}  # type: ignore[union-attr]


def test_a_source_is_looked_for_beside_the_sweep(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text("{}\n")
    swept = load(folder, SWEEP + "set: {data.tasks.source: tasks.jsonl}\n")
    assert {recipe.data["tasks"].source for recipe in swept.recipes.values()} == {str(folder / "tasks.jsonl")}


def test_a_builtin_recipe_is_named_as_everywhere(folder: Path) -> None:
    swept = load(folder, SWEEP.replace("small.yaml", "quickstart"))
    assert {recipe.recipe for recipe in swept.recipes.values()} == {"quickstart"}


def test_a_few_arms_and_seeds_can_be_chosen(folder: Path) -> None:
    swept = load(folder, arms=["vapo", "plain"], seeds=["3"])
    assert [cell.name for cell in swept.cells()] == ["vapo · 3", "plain · 3"]
    assert swept.digest != load(folder).digest


def test_the_digest_is_that_of_what_is_compared(folder: Path) -> None:
    digest = load(folder).digest
    said = "published: {source: a paper, unit: points, values: {vapo: 60}}\n# a comment\n"
    assert load(folder, SWEEP + said).digest == digest
    assert load(folder, SWEEP.replace("baseline: vapo", "baseline: plain")).digest != digest
    assert load(folder, SWEEP, "stages.sft.epochs=2").digest != digest


def test_a_seed_reaches_all_that_reads_what_it_reseeds(folder: Path) -> None:
    recipe = load(folder).recipes["vapo"]
    assert with_downstream(recipe, ["policy"]) == {"policy", "evaluation"}
    assert with_downstream(recipe, ["reward"]) == {"reward", "value", "policy", "evaluation"}
    assert with_downstream(recipe, ["evaluation"]) == {"evaluation"}


# -- what is refused


@every(
    "old, new, said",
    [
        ("sweep: parts\n", "", "parts.yaml:1: sweep: is required; add `sweep: …`"),
        ("seeds:", "seedz:", "parts.yaml:3: seedz: there is no field 'seedz' here; did you mean 'seeds'?"),
        ("metric: accuracy", "metric: accuracy, beter: lower", "parts.yaml:6: measure.beter: there is no field 'beter' here; did you mean 'better'?"),
        ("[1, 2, 3]", "[1, 2, 1]", "parts.yaml:3: seeds.2: 1 occurs twice; keep one of the two"),
        ("[1, 2, 3]", "[]", "parts.yaml:3: seeds: [] must be 1 or more in number"),
        ("[1, 2, 3]", "[-1]", "parts.yaml:3: seeds.0: -1 must be at least 0"),
        ("baseline: vapo", "baseline: vap", "parts.yaml:5: baseline: 'vap' is not an arm; did you mean 'vapo'?"),
        ("[policy, evaluation]", "[polcy, evaluation]", "parts.yaml:4: reseeds.0: 'polcy' is not a stage of the recipe; did you mean 'policy'?"),
        ("[policy, evaluation]", "[policy, policy]", "parts.yaml:4: reseeds.1: policy occurs twice; keep one of the two"),
        ("stage: evaluation", "stage: evaluations", "parts.yaml:6: measure.stage: 'evaluations' is not a stage of arm 'vapo'; did you mean 'evaluation'?"),
        ("metric: accuracy", "metric: acuracy", "parts.yaml:6: measure.metric: 'acuracy' is not measured by 'evaluation'; did you mean 'accuracy'?"),
        ("metric: accuracy", "metric: score", "parts.yaml:6: measure.metric: 'score' is not measured by 'evaluation'; use one of: accuracy"),
        ("stage: evaluation, metric: accuracy", "stage: reward, metric: pair_accuracy", "parts.yaml:6: measure.stage: no seed reaches 'reward' in arm 'vapo', so every seed would measure the same; add reward, or what it reads, to reseeds"),
        ("  vapo: {}\n", "  vapo:\n", "parts.yaml:8: arms.vapo: null must be a mapping (field: value)"),
        ("critic: reward}", "critic: sft}", "parts.yaml:9: arms.unpretrained.stages.policy.critic: 'sft' is an sft"),
        ("stages.policy.critic: reward}", "stages.polcy.critic: reward}", "parts.yaml:9: arms.unpretrained.stages.polcy.critic: stages.polcy: 'polcy' is not in the recipe's stages; did you mean 'policy'?"),
        ("algorithm: ppo", "algorithm: pppo", "parts.yaml:11: arms.plain.stages.policy.algorithm"),
        ("{stages.policy.critic: reward}", "{stages.policy.seed: 3}", "parts.yaml:9: arms.unpretrained.stages.policy.seed: the sweep itself sets the seed of 'policy'; remove it, or take policy out of reseeds"),
        ("{stages.policy.critic: reward}", "{stages.policy.gate: {metric: kl_to_reference, at_most: 9}}", "parts.yaml:9: arms.unpretrained: differs from 'vapo' in nothing that the measured stages depend on; remove it, or correct its overrides"),
        ("{stages.policy.critic: reward}", "{publish: []}", "parts.yaml:9: arms.unpretrained: differs from 'vapo' in nothing"),
        ("small.yaml", "smal.yaml", "smal.yaml: there is no such file"),
        ("small.yaml", "quickstrat", "quickstrat: is neither a file nor a built-in recipe; did you mean 'quickstart'?"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_line_and_remedy(folder: Path, old: str, new: str, said: str) -> None:
    assert old in SWEEP
    problems = refused(folder, SWEEP.replace(old, new))
    assert any(problem.startswith(said) for problem in problems), problems


@every(
    "added, said",
    [
        (
            "set: {stages.policy.critic: value}\n",
            "parts.yaml:9: arms.unpretrained.stages.policy.critic: is laid over by set.stages.policy.critic, "
            "so this arm would be without it; remove one of the two",
        ),
        (
            "set: {stages.policy: {kind: policy_optimization}}\n",
            "parts.yaml:9: arms.unpretrained.stages.policy.critic: is laid over by set.stages.policy, so this arm",
        ),
        (
            "set: {stages.evaluation: {seed: 3}}\n",
            "parts.yaml:13: set.stages.evaluation: the sweep itself sets the seed of 'evaluation'",
        ),
        ("set: {stages.sft.epochs: -1}\n", "parts.yaml:13: set.stages.sft.epochs: -1 must be above 0"),
        (
            "published: {source: a, unit: b, values: {vap: 60}}\n",
            "parts.yaml:13: published.values.vap: 'vap' is not an arm; did you mean 'vapo'?",
        ),
        ("published: {source: a}\n", "parts.yaml:13: published.unit: is required"),
        (
            "tag: !!python/name:os.system x\n",
            "parts.yaml:13: tag: tag:yaml.org,2002:python/name:os.system is a tag",
        ),
    ],
)
def test_what_is_added_is_checked_too(folder: Path, added: str, said: str) -> None:
    problems = refused(folder, SWEEP + added)
    assert any(problem.startswith(said) for problem in problems), problems


def test_a_mistake_in_the_recipe_is_told_once_with_the_recipes_line(folder: Path, text: str) -> None:
    (folder / "small.yaml").write_text(
        text.replace("init: sft\n    data: pairs", "init: stf\n    data: pairs")
    )
    [problem] = refused(folder, SWEEP)
    assert problem.startswith("small.yaml:15: stages.reward.init: no stage is called 'stf'")


def test_the_mistakes_of_all_arms_are_told_at_once(folder: Path) -> None:
    text = SWEEP.replace("critic: reward}", "critic: sft}").replace("algorithm: ppo", "algorithm: pppo")
    problems = refused(folder, text)
    assert [problem.split(": ")[1].split(".")[1] for problem in problems] == ["unpretrained", "plain"]


def test_a_disagreement_that_an_arm_causes_elsewhere_names_the_arm(folder: Path, text: str) -> None:
    (folder / "small.yaml").write_text(text.replace("  value:\n", "  value:\n    returns: {kl_coef: 0.0}\n"))
    problems = refused(
        folder, SWEEP.replace("{stages.policy.critic: reward}", "{stages.policy.algorithm: ppo}")
    )
    assert len(problems) == 1
    assert problems[0].startswith("parts.yaml:9: arms.unpretrained")
    assert "stages.value.returns.kl_coef" in problems[0]


def test_an_override_of_the_command_line_is_named(folder: Path) -> None:
    [problem] = refused(folder, SWEEP, "stages.sft.epochs=-1")
    assert problem.startswith("--set stages.sft.epochs=-1: -1 must be above 0")
    [problem] = refused(folder, SWEEP, "stages.policy.critic=value")[:1]
    assert "is laid over by --set stages.policy.critic=value" in problem


def test_a_preset_that_is_only_another_name_makes_no_arm(folder: Path) -> None:
    switches = "{preset: ppo_vapo_baseline, aggregation: token}"
    text = SWEEP.replace("{stages.policy.critic: reward}", "{stages.policy.algorithm: " + switches + "}")
    twin = text.replace("    stages.policy.algorithm: ppo\n    stages.policy.critic: reward\n", "")
    twin = twin.replace("  plain:\n", "  twin: {stages.policy.algorithm: {preset: ppo, kl_coef: 0.0, "
                        "whiten_advantages: false, value_clip_range: null}}\n")  # fmt: skip
    [problem] = refused(folder, twin)
    assert "arms.twin: differs from 'unpretrained' in nothing" in problem


@pytest.mark.parametrize(
    "chosen, said",
    [
        (
            {"arms": ["plain"]},
            "--arms: the baseline 'vapo' is missing, and there is nothing to compare with; add vapo",
        ),
        (
            {"arms": ["vapo", "ppo"]},
            "--arms: 'ppo' is not among the sweep's; use some of: vapo, unpretrained, plain",
        ),
        ({"seeds": ["7"]}, "--seeds: '7' is not among the sweep's; use some of: 1, 2, 3"),
        ({"seeds": ["one"]}, "--seeds: 'one' is not among the sweep's; use some of: 1, 2, 3"),
    ],
)
def test_what_cannot_be_chosen_is_refused(folder: Path, chosen: dict[str, list[str]], said: str) -> None:
    assert refused(folder, SWEEP, **chosen) == [said]


def test_a_recipe_is_no_sweep(folder: Path, text: str) -> None:
    assert refused(folder, text) == ["parts.yaml:1: is a recipe, not a sweep; use `vantage run`"]
    assert refused(folder, "- a\n") == ["parts.yaml:1: is not a mapping; a sweep starts with `sweep: NAME`"]
    assert refused(folder, "a: [") != []


def test_the_ablation_removes_one_part_of_vapo_in_each_arm() -> None:
    """Seven arms differ from VAPO in one switch, or in the critic; plain PPO in all seven parts."""
    recipes = load_sweep("ablation_vapo").recipes
    stages = {arm: recipe.stages["policy"].model_dump(exclude={"seed"}) for arm, recipe in recipes.items()}

    def changed(arm: str) -> set[str]:
        ours, base = stages[arm], stages["vapo"]
        switches = {
            name
            for name, value in ours["algorithm"].items()
            if value != base["algorithm"][name] and name != "preset"
        }
        return switches | {name for name in ours if name != "algorithm" and ours[name] != base[name]}

    parts = {
        "without_value_pretraining": {"critic"},
        "without_decoupled_gae": {"lambda_value"},
        "without_length_adaptive_lambda": {"length_adaptive_alpha"},
        "without_clip_higher": {"clip_range_high"},
        "without_token_loss": {"aggregation"},
        "without_positive_nll": {"positive_nll_coef"},
        "without_group_sampling": {"samples_per_prompt"},
    }
    assert {arm: changed(arm) for arm in parts} == parts
    # the verifier tells which responses are right, and is read only for the NLL
    how = {"positive_threshold", "positive_verifier"}
    assert changed("plain_ppo") - how == set().union(*parts.values())
    assert set(stages) == {"vapo", "plain_ppo", *parts}
