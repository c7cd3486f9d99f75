"""Check people's decisions about a run's artifacts: whether each is signed, and whether the signed content matches the
record."""

from collections.abc import Iterator

from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.publications import movements, publications
from vantage.runs.record import RunRecord
from vantage.schemas.records.audit import Check
from vantage.signing.decision_checks import DecisionChecks, Trust
from vantage.signing.decisions import decisions_of
from vantage.storage.refs import Ref

SUBJECT = "decisions"


def decision_checks(evidence: Evidence, run_id: str) -> Iterator[Check]:
    """Yield wrong signatures of a run's decisions, else one check of all of them; nothing if none is signed."""
    record = evidence.record(run_id)
    if not isinstance(record, RunRecord) or evidence.store is None:
        return
    validity = evidence.key_validity
    if isinstance(validity, str):
        if evidence.decision_keys:
            yield Check(subject=SUBJECT, outcome="unchecked", detail=validity)
        return
    replay = evidence.replay(run_id)
    known = decisions_of(record, replay if isinstance(replay, Replay) else None)

    def ref_of(stage_key: str) -> Ref | None:
        ref = evidence.ref(stage_key)
        return ref if isinstance(ref, Ref) else None

    trust = Trust(evidence.decision_keys, validity)
    checks = DecisionChecks(evidence.store, record, trust=trust, ref_of=ref_of).all(known)
    good = [each for each in checks if each.outcome == "ok"]
    for each in checks:
        if each.outcome != "ok":
            yield Check(subject=SUBJECT, outcome=each.outcome, detail=each.detail)
    if good:
        yield Check(subject=SUBJECT, detail="; ".join(each.detail for each in good))


def deciding_runs(evidence: Evidence, name: str, digest: str, alias: str | None) -> list[str]:
    """Return the runs that published a version or moved its alias to it: their decisions hold for the version."""
    found = [each.run_id for each in publications(evidence, name) if each.digest == digest]
    if alias is not None:
        found += [each.run_id for each in movements(evidence, name, alias) if each.digest == digest]
    return list(dict.fromkeys(found))
