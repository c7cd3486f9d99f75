"""Resolve ``vantage audit TARGET``: a registered model, one of MLflow's runs, a run, a digest, a folder."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vantage.ledger import tracking
from vantage.ledger.replay import Replay
from vantage.review.audit.aliases import moved_away
from vantage.review.audit.decisions import deciding_runs, decision_checks
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.folders import add_folder
from vantage.review.audit.mlflow_tags import shown
from vantage.review.audit.publications import publications, required_steps
from vantage.review.audit.versions import version_checks
from vantage.review.audit.walk import Walk
from vantage.review.audit.whole_runs import run_checks
from vantage.runs.loosened import known_loosened
from vantage.runs.meanings import (
    MADE,
    Command,
    DigestNamed,
    FolderNamed,
    MlflowRunNamed,
    ModelOfRun,
    RegisteredNamed,
    RunNamed,
    StageNamed,
)
from vantage.runs.names import Names
from vantage.runs.record import RunRecord
from vantage.runs.view import Broken, Missing
from vantage.runs.workspace import RunError
from vantage.schemas.records.audit import AuditReport, Check, Hashing
from vantage.signing.lineage import lineage
from vantage.storage.digests import is_digest

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowVersion

AUDIT = Command("audit", (*MADE, MlflowRunNamed, DigestNamed, FolderNamed))


class _Registry:
    """Registered models of the audited server."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def has(self, named: RegisteredNamed) -> bool:
        """Return whether the version exists. Raises ConnectionError if MLflow does not answer."""
        if tracking.is_missing_database(tracking.address(None, self._evidence.workspace.root)):
            return False
        version = _version(self._evidence, named)
        if isinstance(version, Missing):
            raise ConnectionError(f"{version}; start or repair it, or set MLFLOW_TRACKING_URI")
        return version is not None


def audit(evidence: Evidence, target: str) -> AuditReport:
    """Return every check of the target and of its inputs at any depth.

    Raises:
        RunError: there is no such target; the message lists the accepted names.
        ConnectionError: the target is in MLflow, which does not answer.
    """
    walk = Walk(evidence)
    described, checks = _begin(evidence, walk, target)
    artifacts = walk.audited()
    inner = {edge.parent for artifact in artifacts for edge in artifact.parents} - walk.first
    runs = [run_checks(evidence, run_id) for run_id in walk.runs()]
    clock = evidence.clock
    report = AuditReport(
        target=target,
        described=described,
        checks=tuple(checks),
        roots=tuple(artifact.id for artifact in artifacts if artifact.id not in inner),
        artifacts=tuple(artifacts),
        runs=tuple(runs),
        hashing=Hashing(
            num_bytes=clock.num_bytes,
            seconds=clock.seconds,
            read_seconds=clock.read_seconds,
            hash_seconds=clock.hash_seconds,
        ),
    )
    return _with_unanswered(evidence, report)


def _with_unanswered(evidence: Evidence, report: AuditReport) -> AuditReport:
    """Return the report with a check that could not be made, if MLflow has stopped answering and no other check names it.

    A check of several answers goes on without those that are missing, so that it still finds what the others show.
    """
    why = evidence.unanswered
    if why is None or any(
        each.outcome == "unchecked" and why[:1000] in each.detail for _, each in report.every_check()
    ):
        return report
    return report.model_copy(update={"checks": (*report.checks, check_of("MLflow", why))})


def _begin(evidence: Evidence, walk: Walk, target: str) -> tuple[str, list[Check]]:
    """Add the target to the walk; returns its description in words, and the checks of the target itself."""
    names = Names(evidence.workspace, registry=_Registry(evidence), digests=lambda: _known_digests(evidence))
    match names.resolve(target, AUDIT):
        case FolderNamed(path):
            return add_folder(evidence, walk, path)
        case RegisteredNamed() as named:
            return _registered(evidence, walk, named)
        case MlflowRunNamed(mlflow_run_id):
            return _mlflow_run(evidence, walk, mlflow_run_id)
        case DigestNamed(digest):
            walk.add_digest(digest)
            return f"artifact {digest}", []
        case RunNamed(run_id):
            return _run(evidence, walk, run_id, "")
        case StageNamed(run_id, step) | ModelOfRun(run_id, step):
            return _run(evidence, walk, run_id, step)
        case other:
            raise AssertionError(f"{other} is not accepted")


def _run(evidence: Evidence, walk: Walk, run_id: str, step: str) -> tuple[str, list[Check]]:
    record = evidence.record(run_id)
    if isinstance(record, Missing | Broken):
        return _without_record(evidence, walk, run_id, step, record)
    made = [name for name, stage in record.stages.items() if stage.digest and stage.stage_key]
    if step and step not in record.stages:
        raise RunError(f"run {run_id} has no step {step}; it has {', '.join(record.stages) or 'none yet'}")
    if step and step not in made:
        raise RunError(
            f"{step} of run {run_id} has made nothing yet; audit one of {', '.join(made) or 'its parents'}"
        )
    if not made:
        raise RunError(f"run {run_id} has made nothing yet, so there is nothing to audit; resume it first")
    for name in [step] if step else made:
        stage = record.stages[name]
        walk.add(str(stage.digest), stage.stage_key, asked=(run_id, name))
    if step:
        return f"{step} of run {run_id}", []
    status = record.status.replace("_", " ")
    return f"run {run_id} of {record.recipe.recipe}, {status}", list(moved_away(evidence, run_id))


def _without_record(
    evidence: Evidence, walk: Walk, run_id: str, step: str, problem: Missing | Broken
) -> tuple[str, list[Check]]:
    """Audit a run whose ``run.json`` is lost or cannot be read, by the operations in its outbox."""
    replay = evidence.replay(run_id)
    stages = replay.entry.stages if isinstance(replay, Replay) else {}
    for name, stage in stages.items():
        if stage.artifact is not None and step in ("", name):
            walk.add(stage.artifact.digest, stage.stage_key, asked=(run_id, name))
    said = str(problem).partition("; ")[0]
    return f"run {run_id}", [Check(subject="run record", outcome="wrong", detail=said)]


def _known_digests(evidence: Evidence) -> list[str]:
    """Return digests of the store, and those that runs recorded."""
    stored = evidence.store.digests() if evidence.store is not None else []
    records = [evidence.record(run_id) for run_id in evidence.run_ids]
    recorded = {
        stage.digest
        for record in records
        if isinstance(record, RunRecord)
        for stage in record.stages.values()
        if stage.digest
    }
    return sorted({*stored, *recorded})


def _mlflow_run(evidence: Evidence, walk: Walk, mlflow_run_id: str) -> tuple[str, list[Check]]:
    tags = evidence.ask(lambda server: server.tags_of(mlflow_run_id))
    if isinstance(tags, Missing):
        raise ConnectionError(f"{tags}; start or repair it, or set MLFLOW_TRACKING_URI")
    if tags is None:
        raise RunError(
            f"MLflow at {evidence.server.address} has no run {mlflow_run_id}; name another, or set MLFLOW_TRACKING_URI"
        )
    if "vantage.run_id" not in tags:
        raise RunError(
            f"MLflow's run {mlflow_run_id} has no tag vantage.run_id: Vantage did not make it, or it was edited; name what it "
            "made by a run, a digest or a registered model"
        )
    run_id, step = tags["vantage.run_id"], tags.get("vantage.stage", "")
    if run_id not in evidence.run_ids:
        raise RunError(
            f"MLflow's run {mlflow_run_id} is {step or 'the whole'} of run {run_id}, which {evidence.workspace.address} does "
            "not have; name its workspace with --workspace"
        )
    described, checks = _run(evidence, walk, run_id, step)
    return f"MLflow's run {mlflow_run_id}: {described}", [
        *checks,
        *_is_its_entry(evidence, run_id, step, mlflow_run_id),
    ]


def _is_its_entry(evidence: Evidence, run_id: str, step: str, mlflow_run_id: str) -> list[Check]:
    """Check that the named run of MLflow is the one that is compared: a copy would only claim to be it."""
    record = evidence.record(run_id)
    experiment = record.recipe.recipe if isinstance(record, RunRecord) else ""
    runs = evidence.mlflow_runs(experiment, run_id)
    if isinstance(runs, Missing):
        return [check_of("MLflow's run", runs)]
    entries = runs.get(step or None, [])
    if entries and entries[0].run_id == mlflow_run_id:
        return [Check(subject="MLflow's run", detail=f"the entry of {step or 'the run'}")]
    said = f"it claims to be {step or 'the run'}, whose own entry is another"
    return [Check(subject="MLflow's run", outcome="wrong", detail=said)]


def _version(evidence: Evidence, named: RegisteredNamed) -> "MlflowVersion | Missing | None":
    """Return the named version, asking MLflow once; None: it does not exist."""
    return evidence.once(
        named, lambda: evidence.ask(lambda server: server.version(named.name, named.version, named.alias))
    )


def _registered(evidence: Evidence, walk: Walk, named: RegisteredNamed) -> tuple[str, list[Check]]:
    name, alias = named.name, named.alias
    version = _version(evidence, named)
    if isinstance(version, Missing):
        raise ConnectionError(f"{version}; start or repair it, or set MLFLOW_TRACKING_URI")
    if version is None:
        raise RunError(
            f"{named} is no run, no digest, no folder, and no registered model of MLflow at {evidence.server.address}; give "
            "NAME@ALIAS, NAME/VERSION, a run, a digest of 8 letters or more, or a folder (--workspace PLACE: where the runs are)"
        )
    described = f"{name} version {version.version}" + (f", which {alias} points to" if alias else "")
    if "vantage.digest" not in version.tags:
        said = f"version {version.version} has no tag vantage.digest: Vantage did not publish it, or the tag was removed"
        return described, [Check(subject=f"version {name}/{version.version}", outcome="wrong", detail=said)]
    walk.checked_versions.add((version.name, version.version))
    digest, key = version.tags["vantage.digest"], version.tags.get("vantage.stage_key")
    if not is_digest(digest):
        said = f"the tag vantage.digest of version {version.version} is {shown(digest)}, which is no digest: it was edited"
        return described, [Check(subject=f"version {name}/{version.version}", outcome="wrong", detail=said)]
    if key is not None and any(ref.artifact.stage_key == key for ref in evidence.refs_of.get(digest, [])):
        walk.add(digest, key)
    else:
        walk.add_digest(digest)
    walk.first = {next(iter(walk.found.values())).id}  # the target itself comes before its evaluations
    _add_what_held_it_back(evidence, walk, name, digest)
    return described, [
        *version_checks(evidence, version),
        *_loosened_for(evidence, name, digest),
        *_decisions_for(evidence, walk, named, digest),
    ]


def _decisions_for(evidence: Evidence, walk: Walk, named: RegisteredNamed, digest: str) -> Iterator[Check]:
    """Yield the decisions of the runs that published a version or moved its alias; the others are checked with their runs."""
    walked = walk.runs()
    for run_id in deciding_runs(evidence, named.name, digest, named.alias):
        if run_id not in walked:
            for check in decision_checks(evidence, run_id):
                yield check.model_copy(update={"subject": f"{check.subject} of run {run_id}"})


def _loosened_for(evidence: Evidence, name: str, digest: str) -> Iterator[Check]:
    """Yield a note for each gate that was loosened in a run that published the model, for the model's inputs at any depth."""
    reported: set[str] = set()
    for recorded in publications(evidence, name):
        record = evidence.record(recorded.run_id)
        if recorded.digest != digest or not isinstance(record, RunRecord):
            continue
        steps = [step for step in lineage(record, *required_steps(recorded)) if step in record.stages]
        for step, gate in known_loosened(record, steps, evidence.earlier_verdicts(record)):
            detail = f"loosened in {step} of run {record.run_id}: {gate}"
            if detail not in reported:
                reported.add(detail)
                yield Check(subject="gates", outcome="note", detail=detail)


def _add_what_held_it_back(evidence: Evidence, walk: Walk, name: str, digest: str) -> None:
    """Add the evaluations whose gates decided on the alias; they are no parents of the model, but of its publication."""
    for recorded in publications(evidence, name):
        if recorded.digest != digest:
            continue
        for step in required_steps(recorded):
            entry = recorded.entry.stages.get(step)
            if entry is not None and entry.artifact is not None and step != recorded.operation.stage:
                walk.add(entry.artifact.digest, entry.artifact.stage_key, asked=(recorded.run_id, step))
