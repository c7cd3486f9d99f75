"""Check the models that a run registered in MLflow: whether each version still exists, and matches the published artifact."""

from collections.abc import Iterator

from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.publications import is_published
from vantage.runs.view import Missing
from vantage.schemas.records.audit import Check


def published_checks(evidence: Evidence, run_id: str, replay: Replay) -> Iterator[Check]:
    """Yield a check for each registered model of which MLflow has no version with the artifact that the run published."""
    published = dict.fromkeys(
        (operation.registered_model, operation.artifact.digest) for operation, _ in replay.publications()
    )
    for name, digest in published:
        if not is_published(evidence, run_id, name, digest):
            continue  # MLflow has not received it yet, or refused it
        versions = evidence.ask(lambda server, name=name: server.versions(name))  # type: ignore[misc]
        if isinstance(versions, Missing):
            continue  # the check of the parent run reports this
        if any(version.tags.get("vantage.digest") == digest for version in versions):
            continue
        said = (
            f"this run published {digest[:12]} as {name}, and MLflow has no version that says it holds it: it was deleted, "
            "the model was renamed, or its vantage.digest was edited"
        )
        yield Check(subject=f"model {name}", outcome="wrong", detail=said)
