"""The table of metrics, and the page that is printed from it."""

from pathlib import Path
from typing import get_args

import pytest

from schemas.metrics import METRICS, curves_of, docs_page, measured_by
from schemas.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
STAGE_KINDS = ("sft", "reward_model", "value_pretraining", "policy_optimization", "evaluation")


def test_names_are_unique_and_every_metric_is_reported_by_some_stage() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.headline or metric.curve, metric.name
        assert metric.unit, metric.name
        assert metric.meaning.endswith("."), metric.name
        assert set(metric.headline + metric.curve) <= {*STAGE_KINDS, "prepare_data"}, metric.name


def test_the_stage_kinds_are_those_of_a_recipe() -> None:
    union = get_args(get_args(Recipe.model_fields["stages"].annotation)[1])[0]
    assert {get_args(stage.model_fields["kind"].annotation)[0] for stage in get_args(union)} == set(
        STAGE_KINDS
    )


@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        ("sft", "validation_nll"),
        ("reward_model", "pair_accuracy"),
        ("value_pretraining", "explained_variance"),
        ("policy_optimization", "validation_score"),
        ("evaluation", "accuracy_gain"),
    ],
)
def test_what_each_kind_is_gated_on(kind: str, metric: str) -> None:
    assert metric in measured_by(kind)
    assert all(metric not in measured_by(other) for other in STAGE_KINDS if other != kind)


def test_an_evaluation_measures_what_its_judge_can_tell() -> None:
    verified, scored = measured_by("evaluation", judge="verifier"), measured_by("evaluation", judge="reward")
    assert {"accuracy", "baseline_accuracy", "accuracy_gain", "greedy_accuracy"} <= verified - scored
    assert {"score", "baseline_score", "score_gain", "greedy_score"} <= scored - verified
    assert {"win_rate", "mean_response_length", "truncated_share"} <= verified & scored
    assert measured_by("evaluation") == verified | scored


def test_nothing_is_measured_by_an_unknown_kind() -> None:
    assert measured_by("dpo") == curves_of("dpo") == frozenset()


def test_curves_are_not_gated_on() -> None:
    assert "clip_fraction" in curves_of("policy_optimization")
    assert "clip_fraction" not in measured_by("policy_optimization")


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == docs_page(), (
        'docs/metrics.md is old; run: python -c "from schemas.metrics import docs_page; '
        "print(docs_page(), end='')\" > docs/metrics.md"
    )
