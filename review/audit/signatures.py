"""Check signatures of artifacts: whether each is valid, and whether the required ones exist."""

from dataclasses import replace

from vantage.review.audit.evidence import Evidence
from vantage.runs.record import RunRecord
from vantage.schemas.records.audit import Check
from vantage.schemas.records.verdicts import Verdict
from vantage.storage.refs import Ref

SUBJECT = "signature"


def signature_checks(
    evidence: Evidence, ref: Ref, step: str, *, verdicts: tuple[Verdict, ...] | None = None
) -> list[Check]:
    """Return a check for each key that has signed the artifact or must have; none where nothing is signed nor required.

    ``verdicts``: verdicts of a shorter stage that the run went on from; None: take them from the run's record.
    """
    if evidence.store is None:
        return []
    from vantage.signing.key_validity import ALWAYS_VALID
    from vantage.signing.statements import judged_by
    from vantage.signing.verification import SignatureCheck
    from vantage.signing.verification import signature_checks as checks_of

    record = evidence.record(ref.run_id)
    judged = judged_by(record, step) if isinstance(record, RunRecord) and step in record.stages else None
    if judged is not None and verdicts is not None:
        judged = replace(judged, verdicts=tuple(each.model_dump(mode="json") for each in verdicts))
    validity = evidence.key_validity
    found = checks_of(
        evidence.store,
        ref,
        required=evidence.required_keys,
        judged=judged,
        validity=ALWAYS_VALID if isinstance(validity, str) else validity,
    )
    if evidence.required_keys and isinstance(validity, str):
        found.append(SignatureCheck("unchecked", validity))
    return [Check(subject=SUBJECT, outcome=each.outcome, detail=each.detail) for each in found]


def unsigned(evidence: Evidence) -> list[Check]:
    """Check an artifact without a ref, if keys are required: a signature covers an artifact and its ref."""
    if not evidence.required_keys:
        return []
    keys = ", ".join(key.short for key in evidence.required_keys)
    return [
        Check(
            subject=SUBJECT,
            outcome="unchecked",
            detail=f"key {keys} is required, and there is no ref to compare",
        )
    ]
