"""Distributions and samples of a report are those in the files of an evaluation."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vantage.review.reports.comparisons import NO_VALUES, compared, distribution
from vantage.review.reports.gathered import Token
from vantage.runs.record import StageRecord
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.rewards import Judge

STAGE = PolicyEvaluation(
    kind="evaluation", candidate="policy", baseline="sft", judge=Judge(reward="main"), prompts="prompts"
)


def row(prompt: str, response: str, judgement: float) -> dict[str, Any]:
    return {"prompt": prompt, "response": response, "ended": True, "judgement": judgement}


def files(**sides: list[dict[str, Any]]) -> dict[str, bytes]:
    found = {}
    for role, rows in sides.items():
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), file)
        found[f"{role}.parquet"] = file.getvalue()
    return found


BASELINE = [row("p", "aa", 0.0), row("p", "bbbb", 1.0), row("q", "same", 2.0)]
CANDIDATE = [row("p", "cc", 3.0), row("p", "dddd", 4.0), row("q", "same", 10.0)]


def test_counts_by_hand() -> None:
    """There are 24 bins of 0.5 from 0 to 12. The values 0, 0.5 and 12 fall into the first, the second and the last."""
    found = distribution(
        "x", {"baseline": [0.0, 0.5, 12.0, 1.0, 2.0, 3.0, 4.0], "candidate": [11.9, float("nan")]}
    )
    assert found is not None and not found.is_discrete
    assert (found.edges[0], found.edges[1], found.edges[-1]) == (0.0, 0.5, 12.0)
    assert [place for place, count in enumerate(found.baseline) if count] == [0, 1, 2, 4, 6, 8, 23]
    assert found.candidate[23] == 1 and sum(found.candidate) == 1, "what is not finite is left out"


def test_few_values_are_shown_one_by_one() -> None:
    found = distribution("x", {"baseline": [0.0, 1.0, 1.0], "candidate": [0.5, 1.0]})
    assert found is not None and found.is_discrete
    assert (found.edges, found.baseline, found.candidate) == ((0.0, 0.5, 1.0), (1, 0, 2), (0, 1, 1))


@pytest.mark.parametrize("baseline", [[], [float("inf")]])
def test_nothing_finite_has_no_distribution(baseline: list[float]) -> None:
    assert distribution("x", {"baseline": baseline, "candidate": [1.0]}) is None


def test_equal_lengths_have_one_bin() -> None:
    found = distribution("x", {"baseline": [3.0, 3.0], "candidate": [3.0]}, is_length=True)
    assert found is not None and (found.edges, found.baseline, found.candidate) == ((2.5, 3.5), (2,), (1,))


def test_the_first_response_to_each_prompt_those_that_differ_first_with_recorded_tokens() -> None:
    stored = files(baseline=BASELINE[::-1], candidate=CANDIDATE[::-1])
    recorded = {
        "prompt": "p",
        "candidate": "dddd",
        "candidate_tokens": [["dd", -0.5], ["d", -3.0]],
        "candidate_num_tokens": 3,
        "baseline": "another text than that of the artifact",
        "baseline_tokens": [["x", -1.0]],
    }
    found = compared("evaluation", STAGE, StageRecord(samples=(recorded,)), stored.get)
    assert found.responses == 3
    assert [sample.prompt for sample in found.samples] == ["p", "q"]
    answer = found.samples[0].candidate
    assert (answer.text, answer.judgements) == ("dddd", (("score", 4.0),))
    assert answer.tokens == (Token("dd", -0.5), Token("d", -3.0)) and answer.more_tokens == 1
    assert found.samples[0].baseline.tokens == (), "they belong to another text"
    assert [each.what for each in found.distributions] == [
        "Score (reward) of a response",
        "Length of a response (characters)",
    ]
    assert found.distributions[0].candidate_mean == pytest.approx(17 / 3)
    assert found.missing == (NO_VALUES,)


def test_values_of_a_critic_stand_beside_the_log_probabilities() -> None:
    stored = files(baseline=BASELINE, candidate=CANDIDATE)
    recorded = {"prompt": "p", "candidate": "cc", "candidate_tokens": [["c", -0.5, 1.25], ["c", -3.0, -0.5]]}
    stage = STAGE.model_copy(update={"critic": "value"})
    found = compared("evaluation", stage, StageRecord(samples=(recorded,)), stored.get)
    assert found.samples[0].candidate.tokens == (Token("c", -0.5, 1.25), Token("c", -3.0, -0.5))
    assert (found.critic, found.missing) == ("value", ())


def test_what_is_missing_is_said() -> None:
    gone = compared("evaluation", STAGE, StageRecord(), lambda name: None)
    assert gone.samples == gone.distributions == () and "holds no responses" in gone.missing[0]

    def damaged(name: str) -> bytes:
        raise ValueError("candidate.parquet has other bytes than its manifest says")

    assert "other bytes" in compared("evaluation", STAGE, StageRecord(), damaged).missing[0]
    rubbish = compared("evaluation", STAGE, StageRecord(), lambda name: b"no parquet")
    assert "cannot be read" in rubbish.missing[0]
    uneven = compared(
        "evaluation", STAGE, StageRecord(), files(baseline=BASELINE, candidate=CANDIDATE[:1]).get
    )
    assert "different numbers" in uneven.missing[0] and uneven.samples == ()
    plain = compared("evaluation", STAGE, StageRecord(), files(baseline=BASELINE, candidate=CANDIDATE).get)
    assert any("Log-probabilities" in each for each in plain.missing)
