"""Audits from Python."""

from collections.abc import Sequence
from pathlib import Path

from vantage.api.places import Place, workspace_of
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit as audit_target
from vantage.schemas.records.audit import AuditReport as Audit
from vantage.signing.keys import required_key

__all__ = ["Audit", "audit"]


def audit(
    target: str,
    *,
    workspace: Place = None,
    require_signature: Sequence[str] = (),
    decision_keys: Sequence[str] = (),
) -> Audit:
    """Check a model and all that it was made of, as ``vantage audit`` does; nothing is written or changed.

    Args:
        target: a registered model, a run, a stage, a digest or a folder (docs/names.md).
        workspace: a folder or a bucket.
        require_signature: files or ids of public keys, by which every artifact must be signed.
        decision_keys: further public keys that may have signed what people decided.

    Returns:
        The report. Its ``outcome`` is ``ok``, ``unchecked`` or ``wrong``; ``every_check`` yields each check with its place.

    Raises:
        ValueError: there is no such target.
    """
    with Evidence(
        workspace_of(workspace),
        required_keys=[required_key(each, Path.cwd()) for each in require_signature],
        decision_keys=[required_key(each, Path.cwd()) for each in decision_keys],
    ) as evidence:
        return audit_target(evidence, target)
