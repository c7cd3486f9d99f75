"""The wording of cards has a number: an audit holds a card of its own number to its own sentences.

Where this test fails, the text of a card has changed. Raise ``CARD`` in ``vantage/ledger/model_card.py``, and write the
sum of the new text below. Then cards that were written before are not taken for forged ones.
"""

import hashlib
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from tests.ledger.test_model_card import CLOSED, EVALUATION, run  # noqa: F401
from vantage.ledger.entries import RunEntry
from vantage.ledger.model_card import CARD, written_by
from vantage.ledger.notes import ModelPages, model_note
from vantage.ledger.page_links import Link, artifact_key
from vantage.review.exports.exported_card import MadeBy, model_card
from vantage.runs.named_models import NamedModel, Origin
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.records.approvals import Approval, Question
from vantage.schemas.records.loosened_gates import Asked, LoosenedGate
from vantage.schemas.records.sampling import ModelOpened

SUMS = {1: "93d17ee1ed162c3993fa5035ab99e0b12c9fe13c57e1226b96040fe0e1e737aa"}
"""Number → sha256 of the texts below."""


@pytest.fixture
def rich(run: RunEntry) -> RunEntry:  # noqa: F811
    """Return the run with an answer, a loosened gate, a licence, a bill, and metrics that warn."""
    evaluation = run.stages["evaluation"]
    gate = LoosenedGate(
        metric="accuracy", run_id="0000-r-abcdef", closed=Asked.by(CLOSED), now=None, passed=None
    )
    measured = EVALUATION.model_copy(update={"metrics": {**EVALUATION.metrics, "dropped_too_long": 3.0}})
    approval = Approval(
        question=Question(
            subject="evaluation",
            stage="evaluation",
            stage_key=EVALUATION.stage_key,
            digest=EVALUATION.digest,
            verdicts=(CLOSED,),
        ),
        approved=True,
        by="ada",
        reason="a small slice",
        time=1_764_230_400_000,
    )
    stages = run.stages | {"evaluation": replace(evaluation, loosened=(gate,), artifact=measured)}
    return replace(
        run,
        stages=stages,
        approvals=(approval,),
        licenses={"data.d": "CC-BY-4.0"},
        bills=frozenset({"policy"}),
    )


def texts(entry: RunEntry) -> list[str]:
    """Return cards in MLflow and in exported folders, with every way in which a model is asked."""
    pages = ModelPages(run="#/run", run_of_all="#/all", readers={}, registered=None)
    policy = entry.stages["policy"].artifact
    assert policy is not None
    links = {artifact_key(policy): Link(run="#/run", run_name="policy of run 0001", model="#/model")}
    reused = replace(
        entry, stages=entry.stages | {"policy": replace(entry.stages["policy"], outcome="reused")}
    )
    model = NamedModel(
        label="policy",
        kind="policy",
        folder=None,
        generation=Generation(max_response_tokens=9, stop=("END",)),
        date=date(2026, 1, 2),
        origin=Origin(
            recipe="r",
            run_id=entry.run_id,
            stage="policy",
            stage_key=policy.stage_key,
            digest=policy.digest,
            base=None,
            parents={},
            metrics={"score": 0.5},
            verdicts=("score passed",),
            provenance={"torch": "2.8.0", "device": "cpu"},
        ),
    )
    asked = [
        ModelOpened(uses_chat=chat, stop_token_ids=(2,), stop_tokens=("</s>",), writes_date=chat)
        for chat in (True, False)
    ]
    return [
        model_note(entry, "policy", pages, links),
        model_note(reused, "policy", replace(pages, registered="r/1"), links),
        model_note(entry, "model", pages, {}),
        *(model_card(model, each, folder=Path("/a/folder"), entry=entry) for each in asked),
        model_card(model, asked[0], folder=Path("/a"), made_by=MadeBy("0000-r-abcdef", "policy")),
        model_card(replace(model, kind="reward_model"), None, folder=Path("/a"), entry=None),
    ]


def test_the_wording_is_that_of_its_number(rich: RunEntry) -> None:
    whole = "\n".join(text.replace(written_by(), "") for text in texts(rich))
    for words in ("loosened", "approved by ada", "CC-BY-4.0", "the gate is closed", "bill of materials"):
        assert words in whole
    assert SUMS[CARD] == hashlib.sha256(whole.encode()).hexdigest(), __doc__


def test_every_card_names_its_wording(rich: RunEntry) -> None:
    assert [text.count(written_by()) for text in texts(rich)] == [1] * len(texts(rich))
