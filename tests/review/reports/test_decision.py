"""The verdict on a run has its evaluations, the number of prompts of each effect, and the model."""

from types import SimpleNamespace
from typing import Any

from vantage.review.reports.decision import _models, judged_of
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.records.uncertainty import Uncertainty

STAGE = PolicyEvaluation(
    kind="evaluation",
    candidate="policy",
    baseline="sft",
    judge=Judge(verifier="arithmetic"),
    prompts="prompts",
)


def test_prompts_are_those_of_the_artifact_unless_a_verdict_says_otherwise() -> None:
    """The artifact knows of two metrics, and a gate judged one of them, from other counts."""
    metrics = {"accuracy": 0.9, "baseline_accuracy": 0.6, "accuracy_gain": 0.3}
    known = {"accuracy_gain": Uncertainty(n=64, rows=64, standard_error=0.05, differing=0.4)}

    def judged(*verdicts: SimpleNamespace) -> int | None:
        done = SimpleNamespace(metrics=metrics, intervals={}, verdicts=verdicts)
        record: Any = SimpleNamespace(stages={"last": done}, recipe=SimpleNamespace(stages={"last": STAGE}))
        [found] = judged_of(record, lambda _: known)
        assert (found.step, found.candidate, found.baseline) == ("last", "policy", "sft")
        [effect] = found.effects
        assert effect.sides == (0.9, 0.6)
        return effect.prompts

    assert judged(SimpleNamespace(metric="accuracy", n=10)) == 64
    assert judged(SimpleNamespace(metric="accuracy_gain", n=48)) == 48
    assert judged(SimpleNamespace(metric="accuracy_gain", n=None)) == 64


def test_without_publications_the_run_is_about_the_last_policy_that_it_made() -> None:
    kinds = {"sft": "sft", "reward": "reward_model", "policy": "policy_optimization", "later": "dpo"}
    record: Any = SimpleNamespace(
        recipe=SimpleNamespace(
            publish=(), stages={name: SimpleNamespace(kind=kind) for name, kind in kinds.items()}
        ),
        copies={},
        stages={
            "sft": SimpleNamespace(digest="1"),
            "reward": SimpleNamespace(digest="2"),
            "policy": SimpleNamespace(digest="3"),
            "later": SimpleNamespace(digest=None),
        },
    )
    [found] = _models(record, ())
    assert (found.step, found.digest) == ("policy", "3")
