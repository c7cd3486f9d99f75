"""Guards in a recipe are refused where they are wrong, and enter the key of their stage where they change it."""

import pytest

from vantage.attempts.jobs import key_parts_of
from vantage.schemas.kinds import STAGES
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.metric_names import MOVED_BY_CRITIC
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.default_guards import default_guards, described_guards, guards_of
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.metrics import curve_metric_names
from vantage.schemas.records.stage_key import stage_key

POLICY = "    algorithm: vapo\n"


def with_guards(text: str, guards: str, *, before: str = POLICY) -> str:
    return text.replace(before, f"    guards: {guards}\n{before}")


def problems(text: str) -> list[str]:
    try:
        parse_recipe(text)
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    return []


def policy_of(text: str) -> Training:
    stage = parse_recipe(text).stages["policy"]
    assert isinstance(stage, Training)
    return stage


@pytest.mark.parametrize(
    ("guards", "said"),
    [
        (
            "{metric: kl_to_referenz, above: 20}",
            "stages.policy.guards.0.metric: a policy_optimization stage has no curve 'kl_to_referenz'; did you mean 'kl_to_reference'?",
        ),
        ("{metric: entropy}", "a guard has one of above, below, rises_by, falls_by, and this one has none"),
        (
            "{metric: entropy, action: freeze_policy}",
            "a guard has one of above, below, rises_by, falls_by, and this one has none",
        ),
        ("{metric: entropy, above: 1, below: 0}", "this one has above and below; give exactly one of them"),
        ("[{metric: entropy, rises_by: -1}]", "stages.policy.guards.0.rises_by"),
        ("[{metric: entropy, rises_by: fifty}]", "stages.policy.guards.0.rises_by"),
        ("[{metric: entropy, rises_by: 0%}]", "stages.policy.guards.0.rises_by"),
        ("[{metric: entropy, above: 1, over: 0}]", "stages.policy.guards.0.over"),
        ("[{metric: entropy, above: 1, over: 1001}]", "stages.policy.guards.0.over"),
        ("[{metric: entropy, above: 1e30}]", "stages.policy.guards.0.above"),
        ("[{metric: entropy, above: 1, action: panic}]", "stages.policy.guards.0.action"),
        (
            "[{metric: entropy, action: freeze_policy}]",
            "a guard has one of above, below, rises_by, falls_by, and this one has none",
        ),
        (
            "[{metric: entropy, rises_by: 1, action: freeze_policy}]",
            "action=freeze_policy lasts until the metric is within a bound again, and rises_by has none",
        ),
        (
            "[{metric: entropy, above: 1}, {metric: entropy, above: 1}]",
            "stages.policy.guards.1: this guard is written twice: entropy above 1, 3 reports in a row: warn",
        ),
        (
            "{metric: tokens_per_second, below: 10}",
            "stages.policy.guards.0.metric: tokens_per_second depends on the machine, so another one would end the stage elsewhere; "
            "name another curve, or bound the stage by resources.max_seconds",
        ),
        (
            "{metric: waiting_share, above: 0.5}",
            "stages.policy.guards.0.metric: waiting_share depends on the machine, so another one would end the stage elsewhere",
        ),
        ("never", "stages.policy.guards"),
        *(
            (
                f"{{metric: {metric}, above: 1, action: freeze_policy}}",
                "stages.policy.guards.0.action: freeze_policy lasts until the metric is within its bound again, and "
                f"{metric} does not change while only the critic learns, or is not reported then; use stop, restore_best, finish "
                "or warn, or one of value_loss,",
            )
            for metric in (
                "approx_kl",
                "clip_fraction",
                "kl_to_reference",
                "validation_score",
                "nonfinite_steps",
            )
        ),
        (
            "{metric: watch_worse, above: 2, action: restore_best}",
            "stages.policy.guards.0.metric: watch_worse is measured only where the stage has a watch; add a watch, or leave the "
            "guard out",
        ),
        (
            "{metric: watch_lost, above: 0.2, action: restore_best}",
            "stages.policy.guards.0.metric: watch_lost is measured only where the stage has a watch; add a watch, or leave the "
            "guard out",
        ),
        (
            "{metric: reward_disagreement, above: 2}",
            "stages.policy.guards.0.metric: reward_disagreement is measured only where the reward has an ensemble; give "
            "rewards.main an ensemble, or leave the guard out",
        ),
    ],
)
def test_a_wrong_guard_is_refused_by_its_field(text: str, guards: str, said: str) -> None:
    found = problems(with_guards(text, guards))
    assert any(said in problem for problem in found), found
    assert all("union" not in problem and "Tag" not in problem for problem in found)


def test_what_a_stage_cannot_do_is_refused(text: str) -> None:
    sft = text.replace(
        "{kind: sft, data: demos}",
        "{kind: sft, data: demos, guards: [{metric: loss, above: 9, action: restore_best},"
        " {metric: loss, above: 8, action: freeze_policy}]}",
    )
    first, second = problems(sft)
    assert first == (
        "stages.sft.guards.0.action: a sft stage measures no best weights while it trains, so there are none to restore; "
        "use finish, stop or warn"
    ) or first.endswith("use finish, stop or warn")
    assert "this stage has no critic of its own" in second
    shared = with_guards(
        text.replace("algorithm: vapo", "algorithm: {preset: ppo, shared_trunk: true}").replace(
            "    critic: value\n", ""
        ),
        "{metric: explained_variance, below: 0, action: freeze_policy}",
        before="    algorithm: {preset: ppo",
    )
    assert any("no critic of its own" in problem for problem in problems(shared))


@pytest.mark.parametrize("metric", MOVED_BY_CRITIC)
def test_a_policy_waits_for_what_its_critic_moves(text: str, metric: str) -> None:
    assert problems(with_guards(text, f"{{metric: {metric}, above: 1, action: freeze_policy}}")) == []


@pytest.mark.parametrize("metric", ["explained_variance", "value_loss", "grad_norm_critic"])
def test_a_curve_of_a_critic_that_is_not_there_is_refused(text: str, metric: str) -> None:
    grpo = text.replace("algorithm: vapo", "algorithm: {preset: grpo, samples_per_prompt: 4}").replace(
        "    critic: value\n", ""
    )
    guarded = with_guards(grpo, f"{{metric: {metric}, above: 1}}", before="    algorithm: {preset: grpo")
    said = f"stages.policy.guards.0.metric: {metric} is measured only where a critic learns, and this algorithm reads none"
    assert any(said in problem for problem in problems(guarded)), problems(guarded)


def test_forms_of_guards(text: str) -> None:
    """One guard, a list of guards and ``off`` are accepted, with metrics of named scores too."""
    for metric in ("score_p50_rubric.style", "score_p90_graded", "score_mean_rubric.style"):
        policy_of(with_guards(text, f"{{metric: {metric}, rises_by: 50%}}"))
    one = policy_of(with_guards(text, "{metric: score_mean_reward, rises_by: 50%}"))
    assert [str(guard) for guard in one.guards or ()] == [
        "score_mean_reward rises by 50%, over 3 reports: warn"
    ]
    assert one.guards == policy_of(with_guards(text, "[{metric: score_mean_reward, rises_by: 50%}]")).guards
    for off in ("off", "OFF", "no", "false"):
        assert policy_of(with_guards(text, off)).guards == "off"
    assert policy_of(text).guards is None


def test_a_list_comes_before_the_defaults_of_other_metrics(text: str) -> None:
    own = policy_of(with_guards(text, "{metric: entropy, below: 0.1, action: stop}"))
    guards = guards_of(own)
    assert [str(guard) for guard in guards if guard.metric == "entropy"] == [
        "entropy below 0.1, 3 reports in a row: stop"
    ]
    others = [guard for guard in default_guards(own) if guard.metric != "entropy"]
    assert guards[1:] == tuple(others)
    described = described_guards(own)
    assert described[0] == "entropy below 0.1, 3 reports in a row: stop"
    assert len(described) == len(guards)
    assert all(each.endswith(": warn (default)") for each in described[1:])
    off = policy_of(with_guards(text, "off"))
    assert guards_of(off) == ()
    assert described_guards(off) == ("off",)


def test_what_a_recipe_writes_enters_the_key_and_defaults_do_not(text: str) -> None:
    """A recipe without guards has the parts of a key that knew none."""
    keys = {}
    for guards in (
        None,
        "off",
        "{metric: entropy, below: 0.1}",
        "{metric: entropy, below: 0.1, action: stop}",
    ):
        recipe = parse_recipe(text if guards is None else with_guards(text, guards))
        inputs = dict.fromkeys(("init", "reference", "critic", "prompts", "reward.main.0"), "0" * 64)
        parts = key_parts_of(recipe, "policy", inputs, facts=())  # type: ignore[arg-type]
        assert ("guards" in parts["configuration"]) is (guards is not None)
        keys[guards] = stage_key(parts)
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("kind", sorted(STAGES))
def test_the_defaults_are_about_curves_of_their_kind_and_only_warn(kind: str, text: str) -> None:
    stages = [stage for stage in parse_recipe(text).stages.values() if stage.kind == kind]
    for stage in stages:
        if isinstance(stage, Training):
            for guard in default_guards(stage):
                assert guard.metric in curve_metric_names(kind)
                assert guard.action == "warn"


def test_defaults_depend_on_what_the_algorithm_reads(text: str) -> None:
    def metrics(algorithm: str) -> set[str]:
        stage = policy_of(text.replace("algorithm: vapo", f"algorithm: {algorithm}"))
        assert isinstance(stage, PolicyOptimization)
        return {guard.metric for guard in default_guards(stage)}

    assert {"explained_variance", "value_loss", "uniform_group_share"} <= metrics("vapo")
    assert "explained_variance" in metrics("ppo")
    assert "uniform_group_share" not in metrics("ppo")  # one response to a prompt is always uniform
    assert "explained_variance" not in metrics("grpo")


def test_a_guard_round_trips_through_json() -> None:
    guard = Guard.model_validate({"metric": "entropy", "rises_by": "12.5%", "over": 7, "action": "stop"})
    assert Guard.model_validate_json(guard.model_dump_json()) == guard
    assert (guard.amount, guard.is_relative, guard.relation) == (0.125, True, "rises_by")
