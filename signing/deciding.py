"""Choose the key with which a person signs a decision: the named key, else the recipe's, if the policy allows it."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from vantage.ledger.replay import Replay
from vantage.runs.approving import answer, open_question
from vantage.runs.own_commands import own_command
from vantage.runs.record import RunRecord
from vantage.runs.run import read_run
from vantage.runs.view import RunView
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.approvals import PUBLISH_PREFIX, Approval, Question
from vantage.schemas.safe_text import safe_text
from vantage.schemas.steps import merging_step
from vantage.signing.decisions import Decision, approval_decision, decisions_of
from vantage.signing.key_validity import now
from vantage.signing.keys import BadKey, MissingPackages, SigningKey, key_of, path_of, signing_key
from vantage.signing.lineage import lineage
from vantage.signing.policy import Policy, decision_keys_of, read_policy
from vantage.signing.signing_decisions import make_ready, sign_decisions, store_ready


@dataclass(frozen=True)
class Signer:
    """The key for a person's decision."""

    key: SigningKey | None
    """The private key; None: the decision is not signed."""
    why_not: str = ""
    """Reason why the recipe's key could not be used; empty: the recipe names none."""


@dataclass(frozen=True)
class Answered:
    """A recorded answer."""

    approval: Approval
    sent: bool
    """Whether MLflow has received it."""
    key_id: str | None
    """Id of the key that signed the answer; None: it is not signed."""
    unsigned: str
    """Reason why the answer is not signed; empty: it is signed, or no key is named."""


def sign_and_answer(
    workspace: Workspace,
    run_id: str,
    subject: str,
    *,
    approved: bool,
    by: str | None,
    reason: str,
    key: Path | None,
) -> Answered:
    """Record a person's answer, as ``vantage.runs.approving.answer`` does, and sign it.

    Args:
        workspace, run_id, subject, approved, by, reason: see ``answer``.
        key: file of a private key; None: the key of the recipe's ``sign:``, if it can be used.

    Raises:
        RunError: as ``answer``; or the policy requires one of its keys, but none was given. Then nothing is recorded.
        BadKey, MissingPackages, OSError, ValueError: the named key cannot be used, or the artifact no longer exists. Then
            nothing is recorded.
        vantage.signing.policy.BadPolicy: the policy cannot be read.
    """
    record = read_run(workspace, run_id)
    question = open_question(record, subject)
    signer = _signer(
        workspace,
        record,
        key,
        list(_aliases_that_wait(record, question)),
        f"the answer about {question.subject}",
    )
    failed: list[str] = []

    def prepare(given: Approval) -> Callable[[], None]:
        """Sign before the answer is stored: a process that reads the answer may look for the signature at once."""
        return _prepared(workspace, record, given, signer, failed, is_named=key is not None)

    given, sent = answer(workspace, run_id, subject, approved=approved, by=by, reason=reason, prepare=prepare)
    is_signed = signer.key is not None and not failed
    return Answered(
        approval=given,
        sent=sent,
        key_id=signer.key.public.key_id if is_signed and signer.key is not None else None,
        unsigned="; ".join(failed) or signer.why_not,
    )


def _prepared(
    workspace: Workspace,
    record: RunRecord,
    given: Approval,
    signer: Signer,
    failed: list[str],
    *,
    is_named: bool,
) -> Callable[[], None]:
    """Return the function that stores the signature of an answer; reasons why it cannot be signed or stored are added to
    ``failed``."""
    try:
        if signer.key is None:
            return lambda: None
        ready = make_ready(workspace, record, approval_decision(record, given), signer.key)
    except (OSError, ValueError) as error:
        if is_named:
            raise
        failed.append(safe_text(str(error)))
        return lambda: None

    def store() -> None:
        try:
            store_ready(workspace, ready)
        except Exception as error:  # the answer is recorded, and can be signed later
            failed.append(safe_text(str(error) or type(error).__name__))

    return store


def signer_of_movement(
    workspace: Workspace, record: RunRecord, model: str, alias: str, key: Path | None
) -> Signer:
    """Return the key with which a person signs a movement of an alias; raises as ``sign_and_answer``."""
    return _signer(workspace, record, key, [(model, alias)], f"the movement of {model}@{alias}")


def sign_recorded(
    workspace: Workspace, record: RunRecord, decisions: Collection[Decision], signer: Signer
) -> list[str]:
    """Sign decisions that are recorded already; returns the reason if that failed."""
    if signer.key is None:
        return []
    try:
        sign_decisions(workspace, record, decisions, signer.key)
    except Exception as error:  # the decision is recorded, and can be signed later
        return [safe_text(str(error) or type(error).__name__)]
    return []


def movements_of(workspace: Workspace, run_id: str) -> list[Decision]:
    """Return the movements of aliases by people in the run's ledger; empty: its outbox cannot be read."""
    record, replay = read_run(workspace, run_id), RunView(workspace, run_id).replay
    known = decisions_of(record, replay) if isinstance(replay, Replay) else []
    return [each for each in known if each.kind == "moved_alias"]


def sign_movements(
    workspace: Workspace, run_id: str, before: Collection[Decision], signer: Signer
) -> list[str]:
    """Sign the movements of aliases by a person since ``before``; returns the reason if that failed.

    ``before``: result of ``movements_of`` before the movement.
    """
    known = {each.identity for each in before}
    moved = [each for each in movements_of(workspace, run_id) if each.identity not in known]
    if moved and signer.why_not:
        return [signer.why_not]
    return sign_recorded(workspace, read_run(workspace, run_id), moved, signer)


def how_to_sign(workspace: Workspace, run_id: str) -> str:
    """Return the command that signs decisions later."""
    return own_command("sign", run_id, "--key", "FILE", "--workspace", workspace.address)


def _signer(
    workspace: Workspace, record: RunRecord, key: Path | None, aliases: list[tuple[str, str]], what: str
) -> Signer:
    policy = read_policy(workspace)
    if key is not None:
        signer = Signer(signing_key(path_of(key)))
    else:
        signer = _recipes_signer(record)
    if policy is not None:
        _require_allowed(policy, signer, aliases, what)
    return signer


def _recipes_signer(record: RunRecord) -> Signer:
    try:
        return Signer(key_of(record.recipe))
    except (BadKey, MissingPackages) as error:
        return Signer(None, str(error))


def _require_allowed(policy: Policy, signer: Signer, aliases: list[tuple[str, str]], what: str) -> None:
    """Raise RunError if a rule of the policy requires another key, or the key must not sign now."""
    own = None if signer.key is None else signer.key.public.key_id
    for path, rule in (each for alias in aliases for each in policy.rules.rules_for(*alias)):
        keys = decision_keys_of(rule, policy.folder)
        if not keys or own in {each.key_id for each in keys}:
            continue
        shorts = " or ".join(each.short for each in keys)
        has = f"it is key {own[:16]}" if own is not None else "there is none"
        more = f" (the recipe's cannot be used: {signer.why_not})" if signer.why_not else ""
        raise RunError(
            f"{policy.name}, {path}: decision_keys: {what} must be signed by key {shorts}, and {has}{more}; name the file of "
            "its private key with --key"
        )
    if own is None:
        return
    invalid = policy.validity.problem(own, statement="", signed_at=now())
    if invalid is not None:
        raise RunError(f"{policy.name}: {invalid.detail}; sign with another key (--key FILE)")


def _aliases_that_wait(record: RunRecord, question: Question) -> Iterator[tuple[str, str]]:
    """Yield (registered model, alias) of each publication that depends on the answer."""
    for each in record.recipe.publish:
        if each.alias is None:
            continue
        asked = question.subject.removeprefix(PUBLISH_PREFIX)
        if question.subject.startswith(PUBLISH_PREFIX):
            if asked.partition("@")[0] == each.registered_model:
                yield each.registered_model, asked.partition("@")[2]
            continue
        steps = [each.stage, *([each.after] if each.after else [])]
        merged = merging_step(each.stage)
        if question.subject in lineage(record, *steps, *([merged] if merged in record.stages else [])):
            yield each.registered_model, each.alias
