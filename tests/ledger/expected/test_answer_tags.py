"""Names and texts of the tags for people's decisions, written out by hand."""

import json

import pytest

from vantage.ledger.expected.answer_tags import alias_tags, answer_tags
from vantage.ledger.operations import MoveAlias
from vantage.schemas.records.approvals import Approval, Question
from vantage.schemas.records.verdicts import Verdict

VERDICT = Verdict(
    passed=False,
    metric="accuracy",
    measured=0.5,
    relation=">=",
    threshold=0.7,
    on_fail="stop",
    evidence={"accuracy": 0.5},
)


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("reward", "vantage.approval"),
        ("publish:lab/model@champion", "vantage.approval.publish.lab/model.champion"),
        ("a publish:stage", "vantage.approval"),
    ],
)
def test_an_answer_is_in_words_and_whole_but_for_the_evidence(subject: str, name: str) -> None:
    question = Question(
        subject=subject, stage="reward", stage_key="a" * 64, digest="b" * 64, verdicts=(VERDICT,)
    )
    answer = Approval(question=question, approved=False, by="ada", reason="too few rows", time=7)
    tags = answer_tags(answer)
    assert tags.keys() == {name, f"{name}.record"} and tags[name] == str(answer)
    assert "ada" in tags[name] and "too few rows" in tags[name]
    record = json.loads(tags[f"{name}.record"])
    assert (record["by"], record["approved"], record["time"]) == ("ada", False, 7)
    [verdict] = record["question"]["verdicts"]
    assert verdict["threshold"] == 0.7 and "evidence" not in verdict


@pytest.mark.parametrize(("before", "shown"), [("", "none"), ("3", "3")])
def test_a_moved_alias_names_both_versions_and_who_moved_it(before: str, shown: str) -> None:
    moved = MoveAlias(
        registered_model="m",
        alias="champion",
        from_version=before,
        to_version="4",
        by="ada",
        reason="it is better",
        time=1,
        stage="policy",
        digest="c" * 64,
        login="ada",
    )
    assert alias_tags(moved) == {"vantage.alias.m.champion": f"version {shown} → 4, by ada: it is better"}
