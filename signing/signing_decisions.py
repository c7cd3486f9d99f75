"""Sign people's decisions, as statements chained to the statements of the artifacts."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from pydantic import ValidationError

from vantage.ledger.replay import Replay
from vantage.runs.named_models import DamagedModel
from vantage.runs.record import RunRecord
from vantage.runs.view import Broken, RunView
from vantage.runs.workspace import Workspace
from vantage.schemas.records.approvals import Approval
from vantage.signing.bundles import problem_of, sign
from vantage.signing.decisions import Decision, decision_statement, decisions_of, read_decision
from vantage.signing.key_validity import now
from vantage.signing.keys import PublicKey, SigningKey
from vantage.signing.lineage import NotStored, refs_of
from vantage.signing.signing import statement_of
from vantage.signing.statements import BadStatement
from vantage.storage.signatures import SignedStatement, add_signature, read_signatures


def sign_decisions(
    workspace: Workspace, record: RunRecord, decisions: Collection[Decision], key: SigningKey
) -> int:
    """Sign the decisions that the key has not signed yet; returns their number.

    Raises:
        NotStored: the store no longer has the artifact of a decision.
        DamagedModel: an artifact's manifest is damaged, or an answer in run.json differs from the one that was given.
        OSError, ValueError: the key, the disk or the bucket fails.
    """
    return sum(_sign(workspace, record, each, key) for each in decisions)


def sign_decisions_of(
    workspace: Workspace, record: RunRecord, steps: Collection[str], key: SigningKey
) -> int:
    """Sign the decisions about these steps in the run's records; returns the number of new signatures.

    Raises:
        OSError, ValueError: as ``sign_decisions``; or the outbox, which has the movements of aliases, cannot be read.
    """
    replay = RunView(workspace, record.run_id).replay
    if isinstance(replay, Broken):
        raise DamagedModel(f"the decisions of run {record.run_id} are not signed: {replay}")
    known = decisions_of(record, replay if isinstance(replay, Replay) else None)
    return sign_decisions(workspace, record, [each for each in known if each.step in steps], key)


@dataclass(frozen=True)
class ReadyDecision:
    """A decision that is signed but not stored yet."""

    stage_key: str
    key: PublicKey
    statement: bytes
    signature: bytes


def make_ready(workspace: Workspace, record: RunRecord, decision: Decision, key: SigningKey) -> ReadyDecision:
    """Sign a decision; raises as ``sign_decisions``."""
    about = _about(workspace, record, decision)
    said = decision_statement(decision, about=about, signed_at=now())
    return ReadyDecision(decision.stage_key, key.public, said, sign(said, key))


def store_ready(workspace: Workspace, ready: ReadyDecision) -> None:
    """Store a signed decision. Raises OSError if the disk or the bucket cannot be written."""
    assert ready.key.pem is not None, "of a private key"
    add_signature(
        workspace.storage,
        ready.stage_key,
        key_id=ready.key.key_id,
        public_key=ready.key.pem,
        statement=ready.statement,
        signature=ready.signature,
        about="decisions",
    )


def _sign(workspace: Workspace, record: RunRecord, decision: Decision, key: SigningKey) -> bool:
    about, pem = _about(workspace, record, decision), key.public.pem
    _require_as_given(workspace, record, decision)
    assert pem is not None, "of a private key"
    for each in read_signatures(workspace.storage, decision.stage_key, "decisions"):
        if each.key_id == key.public.key_id and _is_same(each, decision, about, pem):
            return False
    store_ready(workspace, make_ready(workspace, record, decision, key))
    return True


def _about(workspace: Workspace, record: RunRecord, decision: Decision) -> str:
    """Return the sha256 of the statement about the decision's artifact."""
    if not decision.step:
        raise NotStored(
            f"{decision.described} is about {decision.digest[:12]}, which run {record.run_id} has no longer, and is not signed"
        )
    ref = refs_of(workspace, record, [decision.step])[decision.step]
    return hashlib.sha256(statement_of(workspace.storage, record, decision.step, ref)).hexdigest()


def _is_same(stored: SignedStatement, decision: Decision, about: str, pem: bytes) -> bool:
    """Return whether a stored statement is this decision, validly signed; only its time may differ."""
    try:
        said = read_decision(stored.statement)
    except BadStatement:
        return False
    return (said.body, said.about) == (decision.body, about) and problem_of(
        stored.statement, stored.signature, pem
    ) is None


def _require_as_given(workspace: Workspace, record: RunRecord, decision: Decision) -> None:
    """Raise DamagedModel if an answer in run.json differs from the one in its own file."""
    if decision.kind != "approval":
        return
    answer = Approval.model_validate(decision.content)
    try:
        data = workspace.records.read_answer(record.run_id, answer.question.id)
        given = None if data is None else Approval.model_validate_json(data)
    except ValidationError:
        given = None
    if given != answer:
        raise DamagedModel(
            f"{decision.described} of run {record.run_id} is not signed: run.json has it as {answer}, and its file in "
            f"approvals/ has {given or 'no answer'}; `vantage audit {record.run_id}` shows more"
        )
