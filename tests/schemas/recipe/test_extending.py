"""Gates that extend their stage, and training states that are kept, are accepted or refused by rule, and enter the right keys."""

import pytest

from vantage.attempts.jobs import key_parts_of, step_of
from vantage.runs.extending import extended_step
from vantage.runs.resolving import load_resolved_text
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.extending import length_of, why_not_extended, with_length
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stage import Training
from vantage.schemas.records.stage_key import stage_key

RECIPE = """\
recipe: small
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  preferences: {source: "builtin:arithmetic/preferences"}
  prompts: {source: "builtin:arithmetic/prompts"}
rewards:
  main: {terms: [{model: reward}]}
stages:
  sft: {kind: sft, data: demonstrations, SFT}
  reward: {kind: reward_model, init: sft, data: preferences}
  policy: {kind: policy_optimization, algorithm: grpo, init: sft, reward: main, prompts: prompts, iterations: 60, POLICY}
  evaluation: {kind: evaluation, candidate: policy, baseline: sft, judge: {verifier: arithmetic}, prompts: prompts, EVALUATION}
"""
GATE = "gate: {metric: test_score, at_least: 0.5, on_fail: extend, extend: {by: 30, at_most: 2}}"
INPUTS = {
    "policy": {"init": "1" * 64, "reference": "1" * 64, "prompts": "2" * 64, "reward.main.0": "3" * 64},
    "sft": {"init": "1" * 64, "data": "2" * 64},
}


def text_of(policy: str = "seed: 1", *, sft: str = "seed: 1", evaluation: str = "seed: 1") -> str:
    return RECIPE.replace("POLICY", policy).replace("SFT", sft).replace("EVALUATION", evaluation)


def resolved(policy: str = "seed: 1", *, sft: str = "seed: 1") -> ResolvedRecipe:
    return load_resolved_text(text_of(policy, sft=sft), [])[0]


def refused(text: str) -> str:
    with pytest.raises(RecipeError) as found:
        parse_recipe(text)
    return str(found.value)


def key_of(recipe: ResolvedRecipe, step: str) -> str:
    return stage_key(key_parts_of(recipe, step, INPUTS[step]))


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            "schedule: cosine, keep_state: true",
            "keep_state=true keeps what a longer stage goes on from; schedule=cosine has reached its end, 0, by the stage's last "
            "step, and a longer stage would have had other learning rates; use schedule: constant, or leave keep_state out",
        ),
        (
            "validate_every: 7, keep_state: true",
            "iterations=60 is not a multiple of validate_every=7, so that the last measurement is one that a longer stage does not "
            "make; use 56 or 63, or leave keep_state out",
        ),
        (
            "rollout: {ahead: 1}, keep_state: true",
            "rollout.ahead=1 samples each rollout beside the update before it, but none beside the last one; use ahead: 0",
        ),
        (
            "resources: {gpus: 2, distributed: {strategy: fsdp2}}, keep_state: true",
            "resources.distributed.strategy=fsdp2 cuts it; use strategy: ddp, or leave keep_state out",
        ),
        (
            GATE,
            "gate.on_fail=extend goes on from the stage's training state, and keep_state=false keeps none",
        ),
        (
            "keep_state: true, gate: {metric: test_score, at_least: 0.5, on_fail: extend}",
            "on_fail=extend trains the stage further, by an amount that is not given; add extend: {by: 30, at_most: 2}",
        ),
        (
            "keep_state: true, gate: {metric: test_score, at_least: 0.5, extend: {by: 30}}",
            "extend is read only with on_fail: extend, and on_fail=stop; leave extend out, or use on_fail: extend",
        ),
        (
            f"keep_state: true, {GATE}".replace("by: 30", "by: 25"),
            "gate.iterations + extend.by=85 is not a multiple of",
        ),
        (
            f"keep_state: true, {GATE}".replace("by: 30", "by: 2.5"),
            "gate.extend.by=2.5 is a number of iterations; use a whole number",
        ),
        (f"keep_state: true, {GATE}".replace("by: 30", "by: 0"), "stages.policy.gate.extend.by"),
        (
            f"keep_state: true, {GATE}".replace("at_most: 2", "at_most: 0"),
            "stages.policy.gate.extend.at_most",
        ),
        (
            f"keep_state: true, {GATE.replace('gate: {', 'gate: [{')}, "
            "{metric: kl_to_reference, at_most: 9, on_fail: extend, extend: {by: 10}}]",
            "two gates extend the stage by different amounts; give both the same extend",
        ),
    ],
)
def test_what_cannot_be_extended_is_refused_with_its_remedy(policy: str, said: str) -> None:
    assert said in refused(text_of(policy))


def test_a_gate_of_a_stage_that_trains_nothing_extends_nothing() -> None:
    said = refused(text_of(evaluation=GATE.replace("test_score", "accuracy_gain")))
    assert (
        "gate.on_fail=extend trains a stage further, and this one trains nothing; put the gate on the stage that trains"
        in said
    )


def test_epochs_are_extended_by_any_share() -> None:
    gate = "keep_state: true, gate: {metric: test_nll, at_most: 1.0, on_fail: extend, extend: {by: 0.5}}"
    assert parse_recipe(text_of(sft=gate)).stages["sft"].extend is not None


def test_a_kept_state_and_a_gate_are_in_no_key() -> None:
    assert key_of(resolved(), "policy") == key_of(resolved(f"seed: 1, keep_state: true, {GATE}"), "policy")
    plain = parse_recipe(text_of()).model_dump(mode="json")
    assert "keep_state" not in plain["stages"]["policy"]


@pytest.mark.parametrize(("step", "length"), [("policy", 90.0), ("sft", 2.5)])
def test_a_longer_stage_is_the_recipe_with_that_length_and_names_what_it_goes_on_from(
    step: str, length: float
) -> None:
    unit = "iterations" if step == "policy" else "epochs"
    recipe = resolved()
    longer = with_length(recipe.stages[step], length)
    assert (length_of(recipe.stages[step]), length_of(longer)) == ({"policy": 60.0, "sft": 1.0}[step], length)
    previous = {"previous": "4" * 64, "previous.state": "5" * 64}
    short, long = (
        key_parts_of(recipe.model_copy(update={"stages": {**recipe.stages, step: each}}), step, inputs)
        for each, inputs in ((recipe.stages[step], INPUTS[step]), (longer, {**INPUTS[step], **previous}))
    )
    assert long["inputs"] == {**short["inputs"], **previous}
    assert long["configuration"] == {**short["configuration"], unit: length}
    assert stage_key(long) != stage_key({**long, "inputs": short["inputs"]})


def test_only_lengths_that_a_gate_may_reach_are_those_of_the_recipe() -> None:
    step = step_of(resolved(f"seed: 1, keep_state: true, {GATE}"), "policy")
    for length, expected in ((60, 60), (90, 90), (120, 120), (150, 60), (61, 60)):
        found = extended_step(step, {"configuration": {"iterations": length}})
        assert length_of(found.work) == expected


def test_a_watch_measures_too() -> None:
    """A stage validates every 40 and is watched every 15 iterations, so by its watch a longer one measures at 60."""
    watch = "validate_every: 40, keep_state: true, watch: {judge: {verifier: arithmetic}, every: 15}"
    stage = resolved(watch).stages["policy"]
    assert isinstance(stage, Training) and why_not_extended(stage) is None
