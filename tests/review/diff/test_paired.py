"""Differences of two evaluations equal the estimates that evaluations themselves make, and scipy's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats

from vantage.algorithms.uncertainty import clustered_mean
from vantage.review.diff.metrics import metric_differences
from vantage.review.diff.paired import Samples, kept_samples, paired_difference, reproduces, same_prompts
from vantage.review.diff.sides import Step
from vantage.runs.record import StageRecord
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.records.artifacts import Evaluation
from vantage.schemas.records.uncertainty import Uncertainty

STAGE = PolicyEvaluation(
    kind="evaluation",
    candidate="sft",
    baseline="model",
    judge=Judge(verifier="arithmetic"),
    prompts="prompts",
)
RANDOM = np.random.default_rng(5)


def samples(values: list[float], prompts: list[str]) -> Samples:
    return Samples(prompts, {"accuracy": np.array(values)})


def test_of_equal_numbers_of_responses_it_is_the_clustered_mean_of_the_differences() -> None:
    prompts = [f"p{i // 4}" for i in range(80)]
    a, b = (RANDOM.integers(0, 2, 80).astype(float) for _ in range(2))
    found = paired_difference(samples(list(a), prompts), samples(list(b), prompts), "accuracy")
    expected = clustered_mean(torch.tensor(b - a), torch.tensor([i // 4 for i in range(80)]))
    assert found is not None
    assert found.value == pytest.approx(expected.value, abs=1e-12)
    assert found.standard_error == pytest.approx(expected.standard_error, rel=1e-12)
    assert (found.num_prompts, found.num_rows) == (20, 80)


def test_the_order_of_the_responses_says_nothing() -> None:
    prompts = [f"p{i // 2}" for i in range(20)]
    a, b = (list(RANDOM.random(20)) for _ in range(2))
    shuffled = RANDOM.permutation(20)
    other = samples([b[i] for i in shuffled], [prompts[i] for i in shuffled])
    one, two = (
        paired_difference(samples(a, prompts), each, "accuracy") for each in (samples(b, prompts), other)
    )
    assert one is not None
    assert two is not None
    assert one.standard_error == pytest.approx(two.standard_error)


def test_other_numbers_of_responses_have_the_error_of_a_jackknife_over_prompts() -> None:
    """The linearised error agrees with a jackknife that deletes one prompt at a time, up to terms of 1/n."""
    prompts_a, prompts_b = ([f"p{i % 60}" for i in range(size)] for size in (240, 180))
    ease = {f"p{i}": RANDOM.random() for i in range(60)}
    a = np.array([float(RANDOM.random() < ease[p]) for p in prompts_a])
    b = np.array([float(RANDOM.random() < ease[p]) for p in prompts_b])
    found = paired_difference(samples(list(a), prompts_a), samples(list(b), prompts_b), "accuracy")
    left = []
    for prompt in ease:
        keep_a, keep_b = (np.array([p != prompt for p in prompts]) for prompts in (prompts_a, prompts_b))
        left.append(b[keep_b].mean() - a[keep_a].mean())
    jackknife = np.sqrt(59 / 60 * np.square(np.array(left) - np.mean(left)).sum())
    assert found is not None
    assert found.value == pytest.approx(b.mean() - a.mean())
    assert found.standard_error == pytest.approx(jackknife, rel=0.05)


def test_one_prompt_has_no_error_and_an_unknown_metric_no_difference() -> None:
    one = samples([1.0, 0.0], ["p", "p"])
    found = paired_difference(one, one, "accuracy")
    assert found is not None
    assert found.standard_error is None
    assert paired_difference(one, one, "score") is None
    assert not same_prompts(one, samples([1.0], ["q"]))
    both = samples([1.0, 0.0], [one.prompts[0], "q"])
    assert not same_prompts(one, both) and not same_prompts(both, one)


def write(folder: Path, role: str, judgements: list[float], ended: list[bool]) -> None:
    rows = [
        {"prompt": f"p{i // 2}", "response": "x", "ended": end, "judgement": judged}
        for i, (judged, end) in enumerate(zip(judgements, ended, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{role}.parquet")


def test_the_metrics_of_kept_responses_by_hand(tmp_path: Path) -> None:
    write(tmp_path, "candidate", [1, 1, 0, 1], [True, True, False, True])
    write(tmp_path, "baseline", [0, 1, 1, 1], [True] * 4)
    found = kept_samples(tmp_path, STAGE)
    assert found is not None
    means = {name: float(values.mean()) for name, values in found.values.items()}
    assert means == {
        "accuracy": 0.75,
        "baseline_accuracy": 0.75,
        "accuracy_gain": 0.0,
        "win_rate": 0.5,  # won, tied, lost, tied
        "tied_pairs": 0.5,
        "truncated_share": 0.25,
        "baseline_truncated_share": 0.0,
        "truncated_share_difference": 0.25,
    }
    assert reproduces(found, "accuracy", 0.75)
    assert not reproduces(found, "accuracy", 0.7501)
    assert not reproduces(found, "accuracy", None)


def test_the_second_judge_has_metrics_of_its_own(tmp_path: Path) -> None:
    """The verifier prefers the candidate in both pairs, and the reward the baseline."""
    for role, judged, also in (("candidate", 1.0, -2.0), ("baseline", 0.0, 3.0)):
        rows = {
            "prompt": ["p", "q"],
            "ended": [True] * 2,
            "judgement": [judged] * 2,
            "also_judgement": [also] * 2,
        }
        pq.write_table(pa.table(rows), tmp_path / f"{role}.parquet")
    found = kept_samples(tmp_path, STAGE.model_copy(update={"also": Judge(reward="main")}))
    assert found is not None
    means = {name: float(values.mean()) for name, values in found.values.items()}
    assert (means["win_rate"], means["score_win_rate"]) == (1.0, 0.0)
    assert (means["accuracy_gain"], means["score_gain"]) == (1.0, -5.0)
    assert (means["tied_pairs"], means["score_tied_pairs"]) == (0.0, 0.0)


def test_an_artifact_of_another_form_keeps_no_samples(tmp_path: Path) -> None:
    assert kept_samples(tmp_path, STAGE) is None
    for role in ("candidate", "baseline"):
        pq.write_table(pa.table({"prompt": ["p"]}), tmp_path / f"{role}.parquet")
    assert kept_samples(tmp_path, STAGE) is None


def step(metric: str, values: np.ndarray) -> Step:
    error = float(values.std(ddof=1) / np.sqrt(len(values)))
    told = Uncertainty(n=len(values), rows=len(values), standard_error=error)
    artifact = Evaluation(
        uri="objects/x", digest="0" * 64, stage_key="1" * 64, parents={}, uncertainty={metric: told}
    )
    return Step(
        "e", "evaluation", (), None, {}, StageRecord(metrics={metric: float(values.mean())}), artifact
    )


def test_without_samples_the_interval_is_welchs() -> None:
    a, b = RANDOM.normal(0, 1, 30), RANDOM.normal(0.4, 3, 12)
    (found,) = metric_differences(step("score", a), step("score", b), None)
    expected = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert (found.paired, found.n) == (False, None)


@pytest.mark.parametrize("scale", [1e-120, 1.0, 1e120])
def test_welchs_interval_of_very_small_and_very_large_numbers(scale: float) -> None:
    """The fourth power of such numbers overflows or is 0."""
    a, b = RANDOM.normal(0, 1, 30), RANDOM.normal(0.4, 3, 12)
    (found,) = metric_differences(step("score", a * scale), step("score", b * scale), None)
    expected = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low * scale, expected.high * scale), rel=1e-9)


def test_what_is_beyond_the_largest_number_has_no_difference() -> None:
    plain = step("score", np.array([0.0, 0.0]))
    assert plain.artifact is not None
    wide = Uncertainty(n=5, rows=5, standard_error=1e308)
    artifact = plain.artifact.model_copy(update={"uncertainty": {"score": wide}})
    low, high = (
        replace(plain, record=StageRecord(metrics={"score": value}), artifact=artifact)
        for value in (-1.7e308, 1.7e308)
    )
    (found,) = metric_differences(high, low, None)
    assert (found.a, found.b, found.difference, found.interval) == (1.7e308, -1.7e308, None, None)
    (found,) = metric_differences(high, high, None)
    assert (found.difference, found.interval_a, found.interval) == (0.0, None, None)


def test_an_evaluation_without_rows_keeps_no_samples(tmp_path: Path) -> None:
    for role in ("candidate", "baseline"):
        write(tmp_path, role, [], [])
    assert kept_samples(tmp_path, STAGE) is None


def test_pairing_finds_what_two_intervals_hide() -> None:
    """Prompts differ much, and the gain is nearly the same at each."""
    ease = RANDOM.normal(0, 10, 40)
    a, b = ease, ease + 0.5 + RANDOM.normal(0, 0.1, 40)
    prompts = [f"p{i}" for i in range(40)]
    kept = tuple(Samples(prompts, {"score": each}) for each in (a, b))
    (paired,) = metric_differences(step("score", a), step("score", b), (kept[0], kept[1]))
    (unpaired,) = metric_differences(step("score", a), step("score", b), None)
    expected = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert paired.interval == pytest.approx((expected.low, expected.high))
    assert (paired.paired, paired.n, paired.is_clear, unpaired.is_clear) == (True, 40, True, False)


def test_rows_that_do_not_have_the_recorded_mean_are_not_paired() -> None:
    a, b = RANDOM.random(10), RANDOM.random(10)
    prompts = [f"p{i}" for i in range(10)]
    kept = (Samples(prompts, {"score": a}), Samples(prompts, {"score": b + 1}))
    (found,) = metric_differences(step("score", a), step("score", b), kept)
    assert not found.paired


def test_two_shares_that_are_the_same_at_every_prompt_still_have_an_interval() -> None:
    ones = np.ones(24)
    kept = Samples([f"p{i}" for i in range(24)], {"accuracy": ones})
    (found,) = metric_differences(step("accuracy", ones), step("accuracy", ones), (kept, kept))
    t = float(stats.t.ppf(0.975, 23))
    assert found.interval == pytest.approx((-t * t / (24 + t * t), t * t / (24 + t * t)))


def test_a_metric_of_one_side_alone_has_no_difference() -> None:
    (one, other) = metric_differences(
        step("score", RANDOM.random(9)), step("accuracy", RANDOM.random(9)), None
    )
    assert (one.metric, one.b, one.difference, other.metric, other.a) == (
        "score",
        None,
        None,
        "accuracy",
        None,
    )
