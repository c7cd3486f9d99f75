"""A reward of graded and named scores in real stages equals one recomputed from the responses by rules of the test's own."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
import pyarrow as pa
import pytest

from tests.tasks.own_rewards import policy_job, rollouts_of, verifiers, with_reward
from vantage.ledger.journal import read
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.rewards import Judge, MissingEos
from vantage.schemas.recipe.stages import BestOfN
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.recipe.verifiers import Right
from vantage.tasks import value_pretraining
from vantage.tasks.data.rows import read_rows
from vantage.tasks.rewards.verifier_scores import UnfitScores, judged
from vantage.tasks.rewards.verifiers import UndecidedVerifier, load_deciding_verifier
from vantage.tasks.rollout.selection import Selection
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL

__all__ = ["verifiers"]  # used as a fixture
RUBRIC = """\
def verify(prompt, response, answer):
    return {"length": len(response), "digits": sum(c.isdigit() for c in response) / 4, "echo": prompt[0] in response}
"""
GRADED = """\
def verify(prompt, response, answer):
    return len(response) / 7
"""
ODD = """\
def verify(prompt, response, answer):
    return len(response) % 2 == 1
"""
TERMS: list[dict[str, Any]] = [
    {
        "verifier": "rubric",
        "weight": 2.0,
        "scores": {
            "length": {"weight": 0.5, "clip": {"low": 2, "high": 6}, "offset": -4.0},
            "digits": {"weight": -1.0, "clip": {"high": 1.0}},
            "echo": {"weight": 0.0},
        },
    },
    {"verifier": "graded", "weight": 3.0, "clip": {"low": 0.5}, "offset": 0.25},
]


def by_hand(prompt: str, response: str) -> dict[str, float]:
    """Return the scores and their sum, written out again from the recipe above."""
    length, digits = float(len(response)), sum(character in "0123456789" for character in response) / 4
    graded = len(response) / 7
    return {
        "rubric.length": length,
        "rubric.digits": digits,
        "rubric.echo": 1.0 if prompt[0] in response else 0.0,
        "graded": graded,
        "sum": 2 * (0.5 * (sorted((2, length, 6))[1] - 4) - min(digits, 1)) + 3 * (max(graded, 0.5) + 0.25),
    }


def test_every_collected_response_has_its_named_scores_and_their_sum(
    pipeline: Any, verifiers: Any, tmp_path: Path
) -> None:
    job = pipeline.job("collected", folder=tmp_path)
    assert isinstance(job.work, RolloutCollection)
    job = with_reward(job, TERMS, verifiers(RUBRIC), verifiers(GRADED))
    result = run_stage(job)
    names = ["rubric.digits", "rubric.echo", "rubric.length", "graded"]
    assert json.loads((job.output / "rollouts.json").read_text())["terms"] == names
    with pa.memory_map(str(job.output / "train.arrow")) as file:
        rows = pa.ipc.open_file(file).read_all().to_pylist()
    expected = [by_hand(row["prompt"], row["response"]) for row in rows]
    for row, scores in zip(rows, expected, strict=True):
        assert {name: row[f"score.{name}"] for name in names} == pytest.approx(
            {name: scores[name] for name in names}, rel=1e-6
        )
        assert row["score"] == pytest.approx(scores["sum"], rel=1e-5)
    assert len({round(scores["sum"], 3) for scores in expected}) > 5, "equal scores would prove nothing"
    assert result.metrics["train_rows"] == len(rows)
    start = (len(expected) - 1) // job.work.batch_size * job.work.batch_size
    batch = [
        scores["rubric.length"] for scores in expected[start:]
    ]  # the metric is that of the last batch of the last split
    last = [entry.metrics for entry in read(job.scratch / JOURNAL)][-1]
    assert last["score_mean_rubric.length"] == pytest.approx(fmean(batch))
    assert [last[f"score_p{percent}_rubric.length"] for percent in (10, 50, 90)] == pytest.approx(
        numpy.quantile(batch, [0.1, 0.5, 0.9]).tolist()
    )


@pytest.mark.slow
def test_each_named_score_has_a_curve(pipeline: Any, verifiers: Any, tmp_path: Path) -> None:
    work = BestOfN(
        kind="best_of_n",
        init="sft",
        reward="main",
        prompts="prompts",
        iterations=2,
        batch_size=8,
        minibatch_size=4,
        samples_per_prompt=2,
        validation_samples=4,
        learning_rate=1e-6,
    )
    job = pipeline.job("sft", folder=tmp_path).model_copy(
        update={
            "work": work,
            "inputs": {"init": pipeline.folder("sft"), "prompts": pipeline.folder("prompts")},
        }
    )
    run_stage(with_reward(job, TERMS, verifiers(RUBRIC), verifiers(GRADED)))
    entries = [entry.metrics for entry in read(job.scratch / JOURNAL) if "score_mean" in entry.metrics]
    assert len(entries) == 2
    for entry in entries:
        means = {name: entry[f"score_mean_{name}"] for name in ("rubric.length", "rubric.digits", "graded")}
        assert means["graded"] == pytest.approx(means["rubric.length"] / 7, rel=1e-5)
        assert "score_mean_rubric" not in entry
        for name in ("rubric.length", "rubric.digits", "rubric.echo", "graded"):
            low, middle, high = (entry[f"score_p{percent}_{name}"] for percent in (10, 50, 90))
            assert low <= middle <= high
        of_graded, of_length = (
            [entry[f"score_p{percent}_{name}"] for percent in (10, 50, 90)]
            for name in ("graded", "rubric.length")
        )
        assert of_graded == pytest.approx([value / 7 for value in of_length], rel=1e-5)
    assert fmean(entry["score_mean_rubric.length"] for entry in entries) > 1


@pytest.mark.parametrize(
    ("text", "term", "message"),
    [
        (
            GRADED,
            {"wrong": -1.0},
            "returns one number, and wrong=-1 is the score of a wrong response; remove wrong",
        ),
        (GRADED, {"scores": {"a": {}}}, "returns one number, and scores names a; remove scores"),
        (
            RUBRIC,
            {"offset": 1.0},
            "digits, echo, length; give clip, offset and whiten to each of them under scores",
        ),
        (RUBRIC, {"scores": {"digit": {}}}, "and not digit; correct the names under scores"),
        (
            RUBRIC,
            {"scores": {"digits": {}, "length": {}}},
            "and scores has no echo; add it, with weight: 0 if it is only recorded",
        ),
    ],
)
def test_a_term_that_does_not_fit_its_verifier_is_refused(
    pipeline: Any, verifiers: Any, tmp_path: Path, text: str, term: dict[str, Any], message: str
) -> None:
    job = pipeline.job("collected", folder=tmp_path)
    with pytest.raises(UnfitScores) as refused:
        run_stage(with_reward(job, [{"verifier": "mine", **term}], verifiers(text)))
    assert str(refused.value).startswith("rewards.main.terms.0: verifier 'mine' returns ")
    assert str(refused.value).endswith(message)


PARTS = {"rubric.length": (1.0, lambda x: sorted((2.0, x, 6.0))[1] - 4), "rubric.digits": (-2.0, lambda x: min(x, 1.0)),
         "rubric.echo": (0.0, lambda x: x), "graded": (3.0, lambda x: max(x, 0.5) + 0.25)}  # fmt: skip
"""The weight of each score of ``TERMS`` in the whole sum, and what is done to it before."""


def test_each_score_is_normalised_within_its_group_before_the_sum(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advantages of a real rollout equal those of numpy in float64, from the responses alone (GDPO)."""
    switches = {"preset": "grpo", "samples_per_prompt": 4, "kl_loss_coef": 0.0, "normalise_each_score": True}
    job = with_reward(policy_job(pipeline, tmp_path, switches), TERMS, verifiers(RUBRIC), verifiers(GRADED))
    seen = rollouts_of(job, monkeypatch)
    assert len(seen) == 2
    for rollout, estimates in seen:
        sampled, mask = rollout.sampled, rollout.sequences.response_mask.numpy()
        scores = [by_hand(*case) for case in zip(sampled.prompts, sampled.responses, strict=True)]
        summed = numpy.zeros(len(scores))
        for name, (weight, counted) in PARTS.items():
            groups = numpy.array([counted(each[name]) for each in scores]).reshape(-1, 4)
            spread = groups.std(axis=1, ddof=1, keepdims=True)
            summed += weight * ((groups - groups.mean(axis=1, keepdims=True)) / (spread + 1e-6)).ravel()
        tokens = numpy.repeat(summed, mask.sum(axis=1))
        expected = (tokens - tokens.mean()) / numpy.sqrt(tokens.var(ddof=1) + 1e-8)
        assert numpy.abs(expected).max() > 0.5
        numpy.testing.assert_allclose(estimates.advantages.numpy()[mask], expected, atol=1e-5)


def test_an_evaluation_counts_as_right_what_the_recipe_defines(pipeline: Any, verifiers: Any) -> None:
    work = PolicyEvaluation(
        kind="evaluation",
        candidate="policy",
        baseline="sft",
        prompts="prompts",
        judge=Judge(verifier="rubric"),
    )
    roles = {role: pipeline.folder("sft") for role in ("candidate", "baseline")}
    inputs = {
        **roles,
        "prompts": pipeline.folder("prompts"),
        "judge": verifiers(RUBRIC, Right(at_least=21, score="length")),
    }
    job = pipeline.job("evaluation", **dict(work)).model_copy(update={"inputs": inputs})
    result = run_stage(job)
    rows = read_rows(job.output, "candidate")
    expected = [float(by_hand(row["prompt"], row["response"])["rubric.length"] >= 21) for row in rows]
    assert [row["judgement"] for row in rows] == expected and set(expected) == {0.0, 1.0}
    assert result.metrics["accuracy"] == pytest.approx(fmean(expected))
    undecided = job.model_copy(update={"inputs": {**inputs, "judge": verifiers(RUBRIC)}})
    with pytest.raises(
        UndecidedVerifier,
        match="returns scores named digits, echo, length, and judge asks for right or wrong",
    ):
        run_stage(undecided)


def test_the_named_score_decides_and_its_bound_is_right(pipeline: Any, verifiers: Any) -> None:
    """Three letters and two digits are the bound; the other two scores would decide otherwise."""
    job = pipeline.job("evaluation")
    judge = verifiers(RUBRIC, Right(at_least=5, score="length"))
    verifier = load_deciding_verifier(
        job.model_copy(update={"inputs": {**job.inputs, "judge": judge}}), "rubric", role="judge"
    )
    responses = ["abcd", "abc12", "abcdef", "1234", "12345"]
    assert [by_hand("p", each)["rubric.length"] for each in responses] == [4, 5, 6, 4, 5]
    right = judged(verifier, ["p"] * 5, responses, [None] * 5)
    assert right.tolist() == [False, True, True, False, True]


def test_positive_examples_are_those_that_the_recipe_defines_as_right(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switches = {
        "preset": "grpo",
        "samples_per_prompt": 4,
        "positive_nll_coef": 0.1,
        "positive_verifier": "graded",
    }
    job = policy_job(pipeline, tmp_path, switches)
    job = with_reward(job, TERMS, verifiers(RUBRIC), verifiers(GRADED))
    right = verifiers(GRADED, Right(at_least=2.0))
    job = job.model_copy(update={"inputs": {**job.inputs, "positive_verifier": right}})
    for rollout, estimates in rollouts_of(job, monkeypatch):
        expected = [len(response) / 7 >= 2.0 for response in rollout.sampled.responses]
        assert estimates.is_positive.tolist() == expected and set(expected) == {True, False}


def test_length_penalties_are_terms_of_the_reward(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores by hand from the ids' number; a group is uniform if its responses are equally right, whatever their lengths."""
    terms = [
        {"verifier": "right", "weight": 2.0},
        {"length": "linear", "weight": 0.5, "limit": 10},
        {"length": "overlong", "buffer": 0.5},
        {"length": "relative", "weight": 3.0},
    ]
    switches = {"preset": "grpo", "samples_per_prompt": 4}
    job = with_reward(policy_job(pipeline, tmp_path, switches), terms, verifiers(ODD))
    most = job.generation.max_response_tokens
    for rollout, _ in rollouts_of(job, monkeypatch):
        lengths = [len(row) for row in rollout.sequences.response_rows()]
        right = [float(len(response) % 2) for response in rollout.sampled.responses]
        prompts = rollout.sampled.prompts
        for row, length in enumerate(lengths):
            others = [each for each, prompt in zip(lengths, prompts, strict=True) if prompt == prompts[row]]
            spread = max(others) - min(others)
            relative = 0.5 - (length - min(others)) / spread if spread else 0.0
            buffer = round(0.5 * most)
            overlong = min(0.0, max(-1.0, ((most - buffer) - length) / buffer))
            expected = 2 * right[row] - 0.5 * length / 10 + overlong + 3 * relative
            assert rollout.scores.total[row].item() == pytest.approx(expected, rel=1e-5)
            assert rollout.scores.weighted_sum[row].item() == 2 * right[row]
    entry = [entry.metrics for entry in read(job.scratch / JOURNAL) if "score_mean" in entry.metrics][-1]
    assert entry["score_mean_length_linear"] == pytest.approx(-entry["response_length_mean"] / 10, rel=1e-5)
    groups = [right[start : start + 4] for start in range(0, len(right), 4)]
    assert entry["uniform_group_share"] == sum(len(set(group)) == 1 for group in groups) / len(groups)


def test_value_pretraining_learns_the_same_reward(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = [*TERMS, {"length": "linear", "weight": 0.5, "limit": 10}]
    job = pipeline.job("value", folder=tmp_path)
    job = with_reward(job, terms, verifiers(RUBRIC), verifiers(GRADED))
    seen: list[Any] = []
    monkeypatch.setattr(
        value_pretraining, "regress", lambda *args, **_: seen.append(args[2].rollout) or {"value_loss": 0.0}
    )
    run_stage(job)
    assert seen
    for rollout in seen:
        lengths = [len(row) for row in rollout.sequences.response_rows()]
        cases = zip(rollout.sampled.prompts, rollout.sampled.responses, lengths, strict=True)
        expected = [
            by_hand(prompt, response)["sum"] - 0.5 * length / 10 for prompt, response, length in cases
        ]
        assert rollout.scores.total.tolist() == pytest.approx(expected, rel=1e-5)
    entries = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    for entry, rollout in zip(entries, seen, strict=True):
        cases = list(zip(rollout.sampled.prompts, rollout.sampled.responses, strict=True))
        lengths = [len(row) for row in rollout.sequences.response_rows()]
        assert entry["score_mean_length_linear"] == pytest.approx(-fmean(lengths) / 10, rel=1e-5)
        assert curves_of(entry) == pytest.approx(curves_by_hand(cases), rel=1e-5)
        assert "score_p50_length_linear" not in entry, "a length penalty has a mean alone"


def curves_by_hand(cases: list[tuple[str, str]], prefix: str = "") -> dict[str, float]:
    """Return mean and percentiles of each verifier's scores of these prompts and responses."""
    found = {}
    for name in ("rubric.length", "rubric.digits", "rubric.echo", "graded"):
        scores = [by_hand(*case)[name] for case in cases]
        found[f"{prefix}score_mean_{name}"] = fmean(scores)
        for percent in (10, 50, 90):
            found[f"{prefix}score_p{percent}_{name}"] = float(numpy.quantile(scores, percent / 100))
    return found


def curves_of(entry: dict[str, float], prefix: str = "") -> dict[str, float]:
    """Return the curves of a journal's entry that ``curves_by_hand`` has."""
    return {name: value for name, value in entry.items() if name in curves_by_hand([("p", "r")], prefix)}


def test_each_graded_score_of_the_validation_responses_has_curves(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = policy_job(pipeline, tmp_path, {"preset": "grpo", "samples_per_prompt": 4})
    job = with_reward(
        job, [*TERMS, {"verifier": "odd"}], verifiers(RUBRIC), verifiers(GRADED), verifiers(ODD)
    )
    seen: list[Any] = []
    score = Selection.score
    monkeypatch.setattr(Selection, "score", lambda *args: seen.append(args[1].sampled) or score(*args))
    run_stage(job)
    entries = [entry.metrics for entry in read(job.scratch / JOURNAL) if "validation_score" in entry.metrics]
    assert entries and len(seen) == len(entries) + 1, (
        "the first measurement, before any iteration, has no curves"
    )
    for entry, sampled in zip(entries, seen[1:], strict=True):
        cases = list(zip(sampled.prompts, sampled.responses, strict=True))
        assert curves_of(entry, "validation_") == pytest.approx(
            curves_by_hand(cases, "validation_"), rel=1e-5
        )
        assert "score_mean_odd" in entry and not any(
            name.startswith("validation_score") and "odd" in name for name in entry
        )


def test_a_whitened_score_is_whitened_over_each_rollout_and_nowhere_else(
    pipeline: Any, verifiers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {
        "length": {"weight": 0.5, "clip": {"low": 20.0}, "whiten": True},
        "digits": {"weight": -1.0},
        "echo": {"whiten": True},
    }
    terms = [{"verifier": "rubric", "weight": 2.0, "scores": scores}]
    job = with_reward(
        policy_job(pipeline, tmp_path, {"preset": "grpo", "samples_per_prompt": 4}), terms, verifiers(RUBRIC)
    )
    reward = job.rewards["main"].model_copy(update={"missing_eos": MissingEos(subtract=0.25)})
    for rollout, _ in rollouts_of(job.model_copy(update={"rewards": {"main": reward}}), monkeypatch):
        cases = zip(rollout.sampled.prompts, rollout.sampled.responses, strict=True)
        found = [by_hand(*case) for case in cases]
        lengths = numpy.array([max(each["rubric.length"], 20.0) for each in found])
        digits, echo = (
            numpy.array([each[f"rubric.{name}"] for each in found]) for name in ("digits", "echo")
        )
        missing = 0.25 * (1 - rollout.sampled.ended.numpy())
        plain = 2 * (0.5 * lengths - digits + echo) - missing
        numpy.testing.assert_allclose(rollout.scores.total.numpy(), plain, rtol=1e-5)
        assert lengths.std() > 0.5
        whitened = (lengths - lengths.mean()) / lengths.std()
        of_echo = (echo - echo.mean()) / echo.std() if echo.std() else 0 * echo
        expected = 2 * (0.5 * whitened - digits + of_echo) - missing
        numpy.testing.assert_allclose(rollout.scaled_scores.numpy(), expected, atol=1e-5)
