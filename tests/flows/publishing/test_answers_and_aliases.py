"""Only people's answers about exactly this gate, this verdict and this artifact let an alias move."""

from typing import Any

import pytest

from tests.flows.publishing.test_publishing import PUBLICATION, Recorder, life_with, sha
from vantage.flows.publishing.moving_aliases import _require_publishable
from vantage.flows.publishing.publishing import publish, question_about, why_alias_stays
from vantage.runs.record import StageRecord
from vantage.runs.workspace import RunError
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.approvals import Approval, Question
from vantage.schemas.records.verdicts import Verdict, check_gate

KEY, DIGEST = sha("key"), sha("evaluation and its metrics")


@pytest.fixture(autouse=True)
def _no_bills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vantage.review.exports.bills.tell_bill", lambda run, step, **of: None)


def closed(gain: float = -0.1, *, on_fail: Any = "approve") -> Verdict:
    gate = Gate(metric="accuracy_gain", at_least=0.0, on_fail=on_fail)
    return check_gate(gate, {"accuracy_gain": gain})


def life_of(*verdicts: Verdict, answer: Approval | None = None) -> Any:
    """Return a run whose evaluation went on past these verdicts."""
    made = {"status": "completed", "stage_key": KEY}
    policy = StageRecord.model_validate(made | {"digest": sha("policy and its metrics")})
    evaluation = StageRecord.model_validate(made | {"digest": DIGEST, "verdicts": verdicts})
    life = life_with(Recorder(), policy=policy, evaluation=evaluation)
    life.run.record.run_id = "0001-r-abcdef"
    life.run.record.approvals = () if answer is None else (answer,)
    return life


def answer(*, approved: bool = True, **changes: Any) -> Approval:
    asked = {
        "subject": "evaluation",
        "stage": "evaluation",
        "stage_key": KEY,
        "digest": DIGEST,
        "verdicts": (closed(),),
    }
    question = Question.model_validate(asked | changes)
    return Approval(question=question, approved=approved, by="ada", reason="a small slice", time=0)


def test_a_gate_that_a_person_let_pass_lets_the_alias_move() -> None:
    assert why_alias_stays(PUBLICATION, life_of(closed(), answer=answer())) is None
    assert "gate of evaluation" in str(why_alias_stays(PUBLICATION, life_of(closed())))


@pytest.mark.parametrize(
    "other",
    [
        answer(approved=False),
        answer(subject="policy"),
        answer(stage_key=sha("another")),
        answer(digest=sha("another")),
        answer(verdicts=(closed(-0.2),)),
        answer(verdicts=()),
    ],
    ids=["rejected", "subject", "stage key", "artifact", "verdict", "no verdict"],
)
def test_an_answer_about_something_else_does_not(other: Approval) -> None:
    life = life_of(closed(), answer=other)
    assert "gate of evaluation" in str(why_alias_stays(PUBLICATION, life))
    publish(PUBLICATION, life)
    assert life.ledger.asked == [("policy", "quickstart", None)]


@pytest.mark.parametrize("on_fail", ["continue", "stop"])
def test_no_person_lets_a_gate_pass_that_does_not_ask_for_one(on_fail: str) -> None:
    verdict = closed(on_fail=on_fail)
    life = life_of(verdict, answer=answer(verdicts=(verdict,)))
    assert "gate of evaluation" in str(why_alias_stays(PUBLICATION, life))


def test_one_open_gate_does_not_hide_a_closed_one() -> None:
    life = life_of(closed(0.1), closed(-0.1), answer=answer(verdicts=(closed(0.1),)))
    assert "accuracy_gain -0.100" in str(why_alias_stays(PUBLICATION, life))


def test_a_rollback_needs_the_answer_that_the_publication_needed() -> None:
    asks = PUBLICATION.model_copy(update={"approve": True})
    life = life_of(closed(0.1))
    question = question_about(asks, life)

    def said(**given: Any) -> str:
        given = {"question": question, "approved": True, "by": "ada", "reason": "too long", "time": 0} | given
        life.run.record.approvals = (Approval.model_validate(given),)
        try:
            _require_publishable(asks, life, "3")
        except RunError as error:
            return str(error)
        return ""

    assert said() == ""
    assert "must not get champion: rejected by ada" in said(approved=False)
    other = question.model_copy(update={"subject": "publish:quickstart@trial"})
    assert "nobody has approved of it" in said(question=other)
