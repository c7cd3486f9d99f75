"""On scripted curves a policy's default guards see a collapse within five iterations of its onset, and ignore noise."""

import math
import random
from collections.abc import Callable

import pytest

from vantage.ledger.journal import Entry
from vantage.schemas.recipe.default_guards import default_guards
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.tasks.training.guarding import Guarding

POLICY = PolicyOptimization.model_validate(
    {
        "kind": "policy_optimization",
        "algorithm": "grpo",
        "init": "sft",
        "reward": "main",
        "prompts": "prompts",
    }
)
HEALTHY = {
    "kl_to_reference_per_token": 0.05,
    "reference_nll": 0.3,
    "approx_kl": 0.01,
    "entropy": 1.5,
    "response_length_mean": 60.0,
    "truncated_share": 0.1,
    "repeated_trigrams": 0.05,
    "distinct_bigrams": 0.6,
    "clip_fraction": 0.1,
    "effective_sample_share": 0.95,
    "grad_norm_policy": 1.0,
    "uniform_group_share": 0.3,
    "judge_unreadable_share": 0.1,
}
ONSET, LENGTH = 20, 40

COLLAPSES: dict[str, tuple[dict[str, float], str]] = {
    "the KL runs away": ({"kl_to_reference_per_token": 3.0}, "kl_to_reference_per_token"),
    "the reference finds responses unlikely": ({"reference_nll": 0.6}, "reference_nll"),
    "one update goes too far": ({"approx_kl": 0.5}, "approx_kl"),
    "the entropy is gone": ({"entropy": 0.02}, "entropy"),
    "all tokens are as likely": ({"entropy": 3.5}, "entropy"),
    "responses become long": ({"response_length_mean": 200.0}, "response_length_mean"),
    "responses become short": ({"response_length_mean": 2.0}, "response_length_mean"),
    "responses do not end": ({"truncated_share": 0.9}, "truncated_share"),
    "responses become loops": ({"repeated_trigrams": 0.8}, "repeated_trigrams"),
    "all responses become one": ({"distinct_bigrams": 0.05}, "distinct_bigrams"),
    "most tokens are clipped": ({"clip_fraction": 0.8}, "clip_fraction"),
    "a few tokens have all the weight": ({"effective_sample_share": 0.1}, "effective_sample_share"),
    "gradients explode": ({"grad_norm_policy": 40.0}, "grad_norm_policy"),
    "a judge answers in other words": ({"judge_unreadable_share": 0.9}, "judge_unreadable_share"),
    "groups have no contrast": ({"uniform_group_share": 1.2}, "uniform_group_share"),
}


def curves(changed: dict[str, float], *, seed: int) -> list[Entry]:
    """Return curves with noise of a tenth, which have other values from the onset on; a share is 1 at most."""
    chance = random.Random(seed)
    most = {name: 1.0 for name in HEALTHY if name.endswith("_share")}
    return [
        Entry(
            step,
            0.0,
            {
                name: min(
                    (changed if step >= ONSET else {}).get(name, value) * chance.uniform(0.9, 1.1),
                    most.get(name, math.inf),
                )
                for name, value in HEALTHY.items()
            },
        )
        for step in range(1, LENGTH + 1)
    ]


@pytest.mark.parametrize("collapse", COLLAPSES)
@pytest.mark.parametrize("seed", range(3))
def test_a_collapse_is_seen_within_five_iterations(collapse: str, seed: int) -> None:
    changed, metric = COLLAPSES[collapse]
    guarding = Guarding(default_guards(POLICY), curves(changed, seed=seed))
    assert {firing.guard.metric for firing in guarding.firings} == {metric}
    assert ONSET <= guarding.firings[0].step < ONSET + 5


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_collapse(seed: int) -> None:
    assert Guarding(default_guards(POLICY), curves({}, seed=seed)).firings == ()


@pytest.mark.parametrize(
    ("action", "asked"),
    [
        ("stop", lambda found: found.stop),
        ("restore_best", lambda found: found.end),
        ("finish", lambda found: found.finish),
    ],
)
def test_a_policy_that_never_ends_is_stopped_by_a_guard_of_its_recipe(
    action: str, asked: Callable[[object], bool]
) -> None:
    """A default guard sees a share that rises; one that is high from the beginning needs a bound."""
    guard = Guard.model_validate({"metric": "truncated_share", "above": 0.95, "over": 3, "action": action})
    never = [Entry(step, 0.0, {"truncated_share": 1.0}) for step in range(1, 6)]
    assert Guarding(default_guards(POLICY), never).firings == ()
    guarding = Guarding((guard,), never)
    assert [firing.step for firing in guarding.firings] == [3]
    assert asked(guarding.asked())
