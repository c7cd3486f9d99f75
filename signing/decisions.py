"""Make statements about people's decisions: answers to questions of a run, loosened gates, moved aliases.

A decision is an in-toto Statement v1. Its subject is the artifact's manifest, and it names the sha256 of the artifact's own
statement (``vantage.signing.statements``), which is a function of artifact, inputs, code, recipe and verdicts. So a
signature covers the decision, its author, time and reason, and exactly one artifact.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vantage.ledger.operations import MoveAlias, Publish
from vantage.ledger.replay import Replay
from vantage.runs.record import RunRecord
from vantage.runs.run import recipe_digest
from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.milliseconds import LATEST
from vantage.signing.statements import STATEMENT_TYPE, BadStatement
from vantage.storage.sealed_folders import MANIFEST
from vantage.storage.signatures import STATEMENT

DECISION_TYPE = "urn:x-vantage-rlhf:decision:v1"
"""Type of the predicate; if the meaning of its fields changes, it gets another number."""

Kind = Literal["approval", "loosened_gate", "moved_alias"]
_PUBLISHED = ("operation", "time", "stage", "registered_model", "alias", "by")
"""Fields of a publication that belong to the decision; the others describe the artifact and its place."""


@dataclass(frozen=True)
class Decision:
    """A decision about one artifact, from the records of a run."""

    kind: Kind
    described: str
    """Description for messages."""
    run_id: str
    recipe: str
    """sha256 of the run's resolved recipe."""
    step: str
    """Step of the run that has the artifact; empty: the run no longer has it."""
    stage_key: str
    digest: str
    content: Mapping[str, Any] = field(hash=False)
    """The record of the decision, as JSON. A field that a later version adds must be left out if it is unset: otherwise
    earlier signatures would contradict the record."""
    identity: str
    """Identity of the decision, equal in two records of it that contradict each other."""

    @property
    def body(self) -> dict[str, Any]:
        """The statement without the reference to the artifact's statement, and without the time of signing."""
        return {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": MANIFEST, "digest": {"sha256": self.digest}}],
            "predicateType": DECISION_TYPE,
            "predicate": {
                "kind": self.kind,
                "run": {"id": self.run_id, "recipe": self.recipe},
                "stage_key": self.stage_key,
                "identity": self.identity,
                "decision": dict(self.content),
            },
        }


@dataclass(frozen=True)
class SignedDecision:
    """The content of a signed statement, unchecked."""

    run_id: str
    stage_key: str
    digest: str
    kind: str
    identity: str
    about: str
    """sha256 of the artifact's statement."""
    signed_at: int
    """Milliseconds since 1970, as the signer claims."""
    body: Mapping[str, Any] = field(hash=False)
    """Content of ``Decision.body``."""


def decisions_of(record: RunRecord, replay: Replay | None) -> list[Decision]:
    """Return every decision in the records of a run: answers, loosened gates, and aliases that a person moved.

    ``replay``: the run's outbox, which contains the movements; None: it cannot be read.
    """
    movements = replay.movements() if replay is not None else ()
    return [
        *(approval_decision(record, approval) for approval in record.approvals),
        *(each for step in record.stages for each in loosened_decisions(record, step)),
        *(each for operation in movements if (each := _movement(record, operation)) is not None),
    ]


def approval_decision(record: RunRecord, approval: Approval) -> Decision:
    """Return an answer as a decision."""
    question = approval.question
    return Decision(
        kind="approval",
        described=f"the answer about {question.subject}",
        run_id=record.run_id,
        recipe=recipe_digest(record.recipe),
        step=_step_of(record, question.digest, question.stage_key),
        stage_key=question.stage_key,
        digest=question.digest,
        content=approval.model_dump(mode="json"),
        identity=question.id,
    )


def loosened_decisions(record: RunRecord, step: str) -> Iterator[Decision]:
    """Yield each gate of a step that the run recorded as loosened, as a decision."""
    stage = record.stages[step]
    if stage.stage_key is None or stage.digest is None:
        return
    for gate in stage.loosened:
        content = gate.model_dump(mode="json")
        yield Decision(
            kind="loosened_gate",
            described=f"the loosened gate {gate.metric} of {step}",
            run_id=record.run_id,
            recipe=recipe_digest(record.recipe),
            step=step,
            stage_key=stage.stage_key,
            digest=stage.digest,
            content={"step": step, **content},
            identity=canonical_json([step, gate.metric, gate.run_id, content["closed"]]),
        )


def _movement(record: RunRecord, operation: Publish | MoveAlias) -> Decision | None:
    """Return a movement of an alias by a person; None: the run itself moved it, as its recipe requires."""
    if operation.by is None:
        return None
    content = operation.model_dump(mode="json")
    if isinstance(operation, Publish):
        digest, key = operation.artifact.digest, operation.artifact.stage_key
        content = {name: content[name] for name in _PUBLISHED}
    else:
        digest = operation.digest
        key = next((str(each.stage_key) for each in record.stages.values() if each.digest == digest), "")
    named = f"{operation.registered_model}@{operation.alias}"
    return Decision(
        kind="moved_alias",
        described=f"the movement of alias {named}",
        run_id=record.run_id,
        recipe=recipe_digest(record.recipe),
        step=_step_of(record, digest, key),
        stage_key=key,
        digest=digest,
        content=content,
        identity=canonical_json([named, operation.time]),
    )


def _step_of(record: RunRecord, digest: str, stage_key: str) -> str:
    same = (
        step
        for step, stage in record.stages.items()
        if (stage.digest, stage.stage_key) == (digest, stage_key)
    )
    return next(same, "")


def decision_statement(decision: Decision, *, about: str, signed_at: int) -> bytes:
    """Return the statement that is signed, as canonical JSON.

    Args:
        about: sha256 of the artifact's statement.
        signed_at: the present time, in milliseconds since 1970.
    """
    said = decision.body
    said["predicate"] |= {
        "about": {"name": STATEMENT, "digest": {"sha256": about}},
        "signed_at": signed_at,
    }
    return canonical_json(said).encode()


def read_decision(data: bytes) -> SignedDecision:
    """Return the content of a signed statement. Raises BadStatement if it is not about a decision."""
    try:
        said = json.loads(data)
        predicate = said["predicate"]
        about, signed_at = predicate.pop("about"), predicate.pop("signed_at")
        if said["predicateType"] != DECISION_TYPE or type(signed_at) is not int:
            raise ValueError("another kind")
        if not 0 <= signed_at <= LATEST:
            raise ValueError("no time")
        return SignedDecision(
            run_id=str(predicate["run"]["id"]),
            stage_key=str(predicate["stage_key"]),
            digest=str(said["subject"][0]["digest"]["sha256"]),
            kind=str(predicate["kind"]),
            identity=str(predicate["identity"]),
            about=str(about["digest"]["sha256"]),
            signed_at=signed_at,
            body=said,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise BadStatement(f"is no statement about a decision ({type(error).__name__})") from None
