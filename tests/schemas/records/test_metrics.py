"""The table of metrics is complete, and the page that is printed from it is up to date."""

from pathlib import Path

from tests.support.every import every
from vantage.schemas.kinds import KINDS, STAGES
from vantage.schemas.metric_names import PASS_AT
from vantage.schemas.records.metric import settings_of
from vantage.schemas.records.metrics import (
    METRICS,
    curve_metric_names,
    headline_metric_names,
    how_to_measure,
    one_of_each_family,
)
from vantage.schemas.records.metrics_page import docs_page

BY_THE_SECOND_JUDGE = ("win_rate", "tied_pairs", "length_controlled_win_rate")
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_names_are_unique_and_every_metric_is_reported_by_some_stage() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert any(metric.name in (*kind.headline, *kind.curves) for kind in KINDS.values()), metric.name
        assert metric.unit, metric.name
        assert metric.meaning.endswith("."), metric.name


def test_every_kind_of_stage_measures_something_and_all_but_evaluations_have_a_curve() -> None:
    assert all(headline_metric_names(kind) for kind in STAGES)
    assert {kind for kind in STAGES if not curve_metric_names(kind)} == {
        "evaluation",
        "reward_evaluation",
        "benchmark_evaluation",
        "prompt_selection",
    }


@every(
    ("metric", "kinds"),
    [
        ("validation_nll", {"sft"}),
        ("pair_accuracy", {"reward_model", "dpo", "reward_evaluation"}),
        ("explained_variance", {"value_pretraining"}),
        ("validation_score", {"policy_optimization", "best_of_n", "distillation"}),
        (
            "train_rows",
            {"prepare_data", "mix_data", "preference_collection", "rollout_collection", "prompt_selection"},
        ),
        ("accuracy_gain", {"evaluation"}),
    ],
)
def test_which_kinds_a_gate_can_ask_for_it(metric: str, kinds: set[str]) -> None:
    assert {kind for kind in KINDS if metric in headline_metric_names(kind)} == kinds


@every(
    ("name", "unit"),
    [
        ("kl_coef", "reward/nat"),
        ("kl_penalty_coef", "1/nat"),
        ("kl_loss", "nats/token"),
        ("old_kl", "nats/token"),
        ("reward_moments_mean", "reward"),
        ("reward_moments_std", "reward"),
        ("scaled_score_mean", "1"),
        ("advantage_mean", "reward"),
        ("advantage_std", "reward"),
        ("uniform_group_share", "1"),
        ("sampling_rounds", "rollouts"),
        ("greedy_score_mean", "reward"),
        ("ptx_nll", "nats/token"),
        ("dual_clip_fraction", "1"),
        ("trust_region_undone", "steps"),
    ],
)
def test_what_the_switches_do_can_be_watched_and_not_gated_on(name: str, unit: str) -> None:
    (metric,) = [metric for metric in METRICS if metric.name == name]
    assert metric.unit == unit
    assert name in curve_metric_names("policy_optimization")
    assert name not in headline_metric_names("policy_optimization")


def test_an_evaluation_measures_what_its_judge_can_tell() -> None:
    others = ("demonstrations", *(f"samples.{k}" for k in PASS_AT))
    verified, scored = (
        headline_metric_names("evaluation", has=("verifier", *others)),
        headline_metric_names("evaluation", has=("reward", *others)),
    )
    assert {"accuracy", "baseline_accuracy", "accuracy_gain", "greedy_accuracy"} <= verified - scored
    assert {"score", "baseline_score", "score_gain", "greedy_score"} <= scored - verified
    assert {"win_rate", "mean_response_length", "truncated_share"} <= verified & scored
    asked = headline_metric_names("evaluation", has=("model", *others))
    assert asked - scored == {"order_disagreement"}
    assert {name for name in asked if "score" in name or "accuracy" in name or "greedy" in name} == set()
    named = ("accuracy", "score", "preference")
    second = {f"{name}_{rate}" for name in named for rate in BY_THE_SECOND_JUDGE}
    assert headline_metric_names("evaluation") == verified | scored | asked | second
    assert not (verified | scored | asked) & second


def test_what_an_evaluation_measures_by_its_settings() -> None:
    stage = {"kind": "evaluation", "judge": {"verifier": "x"}, "samples_per_prompt": 9}
    names = headline_metric_names("evaluation", has=settings_of(stage))
    assert {"pass_at_2", "pass_at_8", "baseline_pass_at_4", "pass_at_8_difference"} <= names
    assert not {"pass_at_10", "perplexity", "score", "score_win_rate"} & names
    more = stage | {"also": {"reward": "main"}, "demonstrations": "demos"}
    assert headline_metric_names("evaluation", has=settings_of(more)) > names | {
        "perplexity_ratio",
        "score_gain",
        "score_length_controlled_win_rate",
    }
    assert settings_of({"kind": "evaluation", "judge": {"verifier": "x", "reward": "y"}}) is None
    asked = headline_metric_names("evaluation", has=settings_of(stage | {"also": {"model": "sft"}}))
    assert asked - names == {"order_disagreement", *(f"preference_{rate}" for rate in BY_THE_SECOND_JUDGE)}
    assert settings_of({"kind": "sft"}) is None


def test_what_is_to_be_set_for_a_metric() -> None:
    has = {"verifier", "samples.2"}
    assert how_to_measure("pass_at_16", has) == "set samples_per_prompt: 16 or more"
    assert how_to_measure("perplexity", has) == "name a dataset as demonstrations"
    assert how_to_measure("score_win_rate", has) == "name a reward as also"
    assert how_to_measure("win_rate", has) is how_to_measure("no metric", has) is None


def test_nothing_is_measured_by_an_unknown_kind() -> None:
    assert headline_metric_names("ppo") == curve_metric_names("ppo") == frozenset()


def test_curves_are_not_gated_on() -> None:
    assert "clip_fraction" in curve_metric_names("policy_optimization")
    assert "clip_fraction" not in headline_metric_names("policy_optimization")


def test_a_family_is_listed_by_its_first() -> None:
    listed = one_of_each_family(headline_metric_names("value_pretraining"))
    assert [name for name in listed if "…" in name] == [
        "explained_variance_hardest …",
        "explained_variance_length_1 …",
        "explained_variance_tenth_1 …",
        "explained_variance_tokens_left_1 …",
    ]
    assert "explained_variance_position_4" in listed and "explained_variance_length_2_3" not in listed
    assert one_of_each_family(["pair_accuracy"]) == ["pair_accuracy"]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == docs_page(), (
        'docs/metrics.md is old; run: python -c "from vantage.schemas.records.metrics_page import docs_page; '
        "print(docs_page(), end='')\" > docs/metrics.md"
    )
