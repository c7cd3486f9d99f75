"""An audit judges verdicts, approvals and reused models again: real records, one thing in each test changed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.review.audit.tampering import Case
from tests.review.audit.test_decisions import remove
from vantage.ledger.operations import Input
from vantage.review.audit.aliases import _alias_is_approved, _closed, _is_approved, alias_check
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.judging import differs, is_unchanged
from vantage.review.audit.publications import Recorded, publications
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.approvals import Approval, Question
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.schemas.records.verdicts import Verdict, check_gate
from vantage.storage.removed import Cause

KEY, DIGEST, OTHER = "c" * 64, "a" * 64, "b" * 64
ESTIMATE = {"accuracy_gain": Uncertainty(n=40, rows=40, standard_error=0.05)}


def verdict_of(gain: float, *, on_fail: Any = "approve") -> Verdict:
    gate = Gate(metric="accuracy_gain", at_least=0.9, on_fail=on_fail)
    return check_gate(gate, {"accuracy_gain": gain}, ESTIMATE)


@pytest.mark.parametrize(
    "changes",
    [
        {"passed": True},
        {"measured": 0.11},
        {"relation": "<="},
        {"threshold": 0.05},
        {"on_fail": "continue"},
        {"evidence": {"accuracy_gain": 0.9}},
        {"n": 4000},
        {"standard_error": 0.049},
        {"interval": (0.02, 0.2)},
        {"confidence": 0.5},
        {"method": "t"},
        {"counts": {"rows": 39}},
        {"counts": {}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_verdict_differs_in_every_field_and_not_in_its_last_bits(changes: dict[str, Any]) -> None:
    told = verdict_of(0.1)
    assert not differs(told, verdict_of(0.1))
    assert told.interval is not None
    low, high = told.interval
    assert not differs(told, told.model_copy(update={"interval": (low * (1 + 1e-13), high)}))
    assert differs(told, told.model_copy(update=changes))


@pytest.fixture
def evidence(case: Case) -> Iterator[Evidence]:
    with Evidence(case.workspace) as found:
        yield found


def recorded_of(evidence: Evidence) -> Recorded:
    """Return the policy's publication as ``fake``, with the alias that its evaluation let move."""
    [found] = publications(evidence, "fake")
    return found


def with_input(recorded: Recorded, step: str, role: str, given: Input) -> Recorded:
    """Return the publication of a run in which a step read something else."""
    stage = recorded.entry.stages[step]
    changed = replace(stage, inputs=stage.inputs | {role: given})
    return replace(recorded, entry=replace(recorded.entry, stages=recorded.entry.stages | {step: changed}))


@pytest.mark.parametrize(("step", "role"), [("policy", "init"), ("evaluation", "baseline")])
def test_a_model_that_is_not_new_gets_no_alias(evidence: Evidence, step: str, role: str) -> None:
    recorded = recorded_of(evidence)
    assert list(_closed(evidence, recorded)) == []
    own = recorded.entry.stages["policy"].artifact
    assert own is not None
    same = with_input(recorded, step, role, Input(stage="sft", artifact=own))
    assert "policy holds the weights of sft" in list(_closed(evidence, same))


def test_what_is_sealed_says_that_two_models_are_the_same_whatever_was_told(evidence: Evidence) -> None:
    own = recorded_of(evidence).entry.stages["policy"].artifact
    sft = recorded_of(evidence).entry.stages["sft"].artifact
    assert own is not None and sft is not None
    one = Input(stage="policy", artifact=own)
    edited = Input(stage="sft", artifact=own.model_copy(update={"files_digest": OTHER}))
    assert is_unchanged(evidence, one, edited)
    assert not is_unchanged(evidence, one, Input(stage="sft", artifact=sft))


def answered(recorded: Recorded, **changes: Any) -> Recorded:
    """Return a run in which a person has answered one question."""
    asked = {
        "subject": "evaluation", "stage": "evaluation", "stage_key": KEY, "digest": DIGEST, "verdicts": (verdict_of(0.1),)
    }  # fmt: skip
    approved = changes.pop("approved", True)
    question = Question.model_validate(asked | changes)
    answer = Approval(question=question, approved=approved, by="ada", reason="a small slice", time=1)
    return replace(recorded, entry=replace(recorded.entry, approvals=(answer,)))


@pytest.mark.parametrize(
    "changes",
    [{"approved": False}, {"digest": OTHER}, {"subject": "strict"}, {"verdicts": (verdict_of(0.2),)}],
    ids=lambda changes: next(iter(changes)),
)
def test_an_approval_holds_for_its_own_gate_artifact_and_verdict(
    evidence: Evidence, changes: dict[str, Any]
) -> None:
    recorded, closed = recorded_of(evidence), verdict_of(0.1)
    assert _is_approved(answered(recorded), "evaluation", DIGEST, closed)
    assert not _is_approved(answered(recorded, **changes), "evaluation", DIGEST, closed)
    stops = verdict_of(0.1, on_fail="stop")
    assert not _is_approved(answered(recorded, verdicts=(stops,)), "evaluation", DIGEST, stops)


def test_an_approval_of_an_alias_holds_for_that_alias_and_artifact(evidence: Evidence) -> None:
    recorded = recorded_of(evidence)
    asked = {"subject": "publish:fake@champion", "digest": recorded.digest}
    assert _alias_is_approved(answered(recorded, **asked))
    for changes in ({"approved": False}, {"subject": "publish:fake@trial"}, {"digest": OTHER}):
        assert not _alias_is_approved(answered(recorded, **(asked | changes)))


def test_another_alias_than_the_recipes_waits_for_the_same_answer(evidence: Evidence) -> None:
    """``vantage publish --alias`` asks a person where the recipe's publication does."""
    recorded = recorded_of(evidence)
    assert recorded.recipe is not None
    first, *others = recorded.recipe.publish
    asks = first.model_copy(update={"approve": True})
    recipe = recorded.recipe.model_copy(update={"publish": (asks, *others)})
    by_hand = recorded.operation.model_copy(update={"alias": "trial", "by": "ada"})
    moved = replace(recorded, recipe=recipe, operation=by_hand)
    unasked = "nobody has approved of it, as its recipe asks"
    assert unasked in list(_closed(evidence, moved))
    subject = {"subject": "publish:fake@trial", "digest": recorded.digest}
    assert unasked not in list(_closed(evidence, answered(moved, **subject)))
    assert unasked not in list(_closed(evidence, replace(moved, recipe=recorded.recipe)))


def test_a_gate_that_cannot_be_judged_again_is_not_said_to_have_passed(case: Case) -> None:
    """The evaluation that let the alias move was removed."""
    cause = Cause(when="2026-11-24T03:00:00+00:00", why="no run needed it", by="root")
    remove(case.workspace, case.digest("evaluation"), str(case.record.stages["evaluation"].stage_key), cause)
    with Evidence(case.workspace) as evidence:
        version = evidence.ask(lambda server: server.version("fake", "1", None))
        assert version
        check = alias_check(evidence, version, "champion")
    assert (check.outcome, "the gates of evaluation are not judged again" in check.detail) == (
        "unchecked",
        True,
    )
