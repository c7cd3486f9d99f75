"""Check signatures of a stored artifact; the public key is enough.

A check makes the statement again from the present manifest and ref, and compares it with the signed one. So an edit
after signing is found, even if digests were changed to agree with one another.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vantage.signing.bundles import problem_of
from vantage.signing.key_validity import ALWAYS_VALID, Invalid, KeyValidity
from vantage.signing.keys import (
    BadKey,
    MissingPackages,
    PublicKey,
    can_check,
    public_key_in,
    require_packages,
)
from vantage.signing.statements import (
    BadStatement,
    Judged,
    attempt_of,
    differences,
    digest_of,
    files_in,
    files_of,
    judged_in,
    read_statement,
    stage_key_of,
    statement,
)
from vantage.storage.refs import Ref
from vantage.storage.signatures import SignedStatement, read_signatures, read_stored_manifest
from vantage.storage.storage import Readable

Outcome = Literal["ok", "wrong", "unchecked", "note"]


@dataclass(frozen=True)
class SignatureCheck:
    """The result of one check."""

    outcome: Outcome
    """``unchecked``: nothing is wrong, but a required signature is missing or could not be checked. ``note``: a
    signature that was not required does not count."""
    detail: str
    """The finding, in one sentence."""
    key_id: str | None = None


@dataclass(frozen=True)
class _Found:
    """Result of checking one signed statement."""

    outcome: Literal["ok", "wrong", "earlier"]
    """``earlier``: a valid signature of an earlier attempt at the same stage key."""
    detail: str = ""
    judged: Judged | None = None


def signature_checks(
    storage: Readable,
    ref: Ref,
    *,
    required: Sequence[PublicKey] = (),
    judged: Judged | None = None,
    with_verdicts: bool = False,
    validity: KeyValidity = ALWAYS_VALID,
) -> list[SignatureCheck]:
    """Check every signature of an artifact; returns nothing if there is none and none was required.

    The bytes of the artifact's files are not read: compare them with its manifest (``Storage.verify``), whose digest is in
    the statement.

    Args:
        storage: the storage with the artifact and its signatures.
        ref: the artifact's present ref in the storage.
        required: keys that must all have signed the artifact.
        judged: verdicts in a run's record (``judged_by``), to be compared with that run's signed ones; None: not
            compared.
        with_verdicts: whether to refuse a signature of the same artifact with other verdicts even if the run itself has
            none: its recipe may have dropped the gate that closed. Otherwise, a run without gates accepts any verdicts.
        validity: the policy's rules about the validity of keys.
    """
    stage_key = ref.artifact.stage_key
    stored = read_signatures(storage, stage_key)
    wanted = {key.key_id: key for key in required}
    if not stored and not wanted:
        return []
    if not can_check():
        try:
            require_packages()
        except MissingPackages as error:
            return [SignatureCheck("unchecked", str(error))]
    try:
        files = _files(storage, ref)
    except ValueError as error:
        return [SignatureCheck("wrong", f"no signature can hold: {error}")]
    checks: list[SignatureCheck] = []
    for key_id in dict.fromkeys((*wanted, *sorted(each.key_id for each in stored))):
        of_key = [each for each in stored if each.key_id == key_id]
        invalid = {
            each.name: validity.problem(key_id, statement=_sha256(each), signed_at=None) for each in of_key
        }
        counting = [each for each in of_key if invalid[each.name] is None]
        if of_key and not counting:
            checks.append(_refused(invalid[of_key[0].name], key_id, is_required=key_id in wanted))
            continue
        checks += _checks_of(
            counting, key_id, wanted.get(key_id), bool(wanted), ref, files, judged, with_verdicts
        )
    return checks


def _refused(invalid: Invalid | None, key_id: str, *, is_required: bool) -> SignatureCheck:
    """Return the check of a key that the policy does not accept."""
    assert invalid is not None, "the key's statements do not count"
    if not is_required:
        return SignatureCheck("note", f"is signed, which does not count: {invalid.detail}", key_id)
    detail = f"is not signed by key {key_id[:16]}, which is required: {invalid.detail}"
    # The time at which an expired key signed an artifact is not known
    return SignatureCheck("wrong" if invalid.why == "revoked" else "unchecked", detail, key_id)


def _sha256(stored: SignedStatement) -> str:
    return hashlib.sha256(stored.statement).hexdigest()


def _checks_of(
    stored: list[SignedStatement],
    key_id: str,
    required: PublicKey | None,
    asked: bool,
    ref: Ref,
    files: Mapping[str, str] | None,
    judged: Judged | None,
    with_verdicts: bool,
) -> list[SignatureCheck]:
    """Return the checks of one key: every wrong statement, or else whether a statement is about this artifact."""
    found = [_look_at(each, required, ref, files, judged) for each in stored]
    short = key_id[:16]
    wrong = [
        SignatureCheck("wrong", f"key {short}: {each.detail}", key_id)
        for each in found
        if each.outcome == "wrong"
    ]
    if wrong:
        return wrong
    good = [each for each in found if each.outcome == "ok"]
    if not good and required is not None:
        why = found[0].detail if found else "there is no signature by it"
        return [SignatureCheck("wrong", f"is not signed by key {short}, which is required: {why}", key_id)]
    if not good:
        return [SignatureCheck("unchecked", f"key {short}: {found[0].detail}", key_id)]
    detail = f"signed by key {short}"
    if files is None:
        detail += "; the artifact was removed, and what it was is signed"
    if required is None:
        detail += (
            ", which is not required"
            if asked
            else ", which was compared with no key of yours (--require-signature KEY)"
        )
    checks = [SignatureCheck("ok", detail, key_id)]
    signed_verdicts = [each.judged.verdicts for each in good if each.judged is not None]
    has_to_agree = judged is not None and (judged.verdicts or with_verdicts)
    if judged is not None and has_to_agree and judged.verdicts not in signed_verdicts:
        detail = f"key {short} has signed the artifact, but not the verdicts of run {judged.run_id}"
        if not judged.verdicts:
            detail += ", which has no gate on it"
        checks.append(SignatureCheck("unchecked", detail, key_id))
    return checks


def _look_at(
    stored: SignedStatement,
    required: PublicKey | None,
    ref: Ref,
    files: Mapping[str, str] | None,
    judged: Judged | None,
) -> _Found:
    """Return the result of checking one signed statement of an artifact: first its signature, then its content."""
    try:
        pem = key_to_check_with(stored, required)
    except BadKey as error:
        return _Found("wrong", str(error))
    problem = problem_of(stored.statement, stored.signature, pem)
    if problem is not None:
        return _Found(
            "wrong",
            f"the signature does not hold: {problem}; statement or signature was changed after signing",
        )
    try:
        said = read_statement(stored.statement)
    except BadStatement as error:
        return _Found("wrong", f"what it signed {error}")
    artifact, signed = ref.artifact, judged_in(said)
    if stage_key_of(said) != artifact.stage_key:
        return _Found(
            "wrong", f"the statement is about another stage key, {stage_key_of(said)[:12]}; it was moved here"
        )
    if attempt_of(said) < ref.attempt:
        return _Found(
            "earlier",
            f"what it has signed is {digest_of(said)[:12]} of attempt {attempt_of(said)}, and attempt {ref.attempt} has made "
            f"{artifact.digest[:12]} since, by the store; find out why, then sign that: `vantage sign {ref.run_id}`",
        )
    try:
        again = statement(ref, files_of(said) if files is None else files, signed)
    except ValueError as error:  # values that JSON cannot represent, such as NaN
        return _Found("wrong", f"what it signed is no statement that Vantage writes ({type(error).__name__})")
    if again != stored.statement:
        changed = differences(said, read_statement(again))
        return _Found(
            "wrong",
            f"what is stored differs from what was signed: {changed or 'the same values, written in another way'}",
        )
    if judged is not None and judged.run_id == signed.run_id and judged != signed:
        what = "verdicts" if judged.verdicts != signed.verdicts else "recipe"
        return _Found("wrong", f"the {what} in the record of run {judged.run_id} differ from what was signed")
    return _Found("ok", judged=signed)


def key_to_check_with(stored: SignedStatement, required: PublicKey | None) -> bytes:
    """Return the public key for the check: the required one, or else the stored one if its id matches.

    Raises:
        BadKey: there is no such key.
    """
    if required is not None and required.pem is not None:
        return required.pem
    if stored.public_key is None:
        raise BadKey("its public key is not stored beside the signature; give the file of the key")
    beside = public_key_in(stored.public_key, "the file beside the signature")
    if beside.key_id != stored.key_id:
        raise BadKey(f"the public key beside the signature is {beside.short}, another one")
    assert beside.pem is not None, "read from a file"
    return beside.pem


def _files(storage: Readable, ref: Ref) -> dict[str, str] | None:
    """Return path → sha256 of the files in the artifact's manifest; None: the artifact was removed.

    Raises:
        ValueError: the manifest does not have this digest.
    """
    manifest = read_stored_manifest(storage, ref.artifact.digest)
    return None if manifest is None else files_in(manifest, digest=ref.artifact.digest)
