"""Write the bill of materials of a step of a run, on request, and for MLflow when a model is published.

A bill describes the artifact and not the run that asks: names and inputs are those of the runs that made them, and
licences are the newest that any run of the workspace names.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress

from vantage.attempts.jobs import work_of
from vantage.ledger.run_ledger import Ledger
from vantage.review.exports.bill_of_materials import Material, bill_of_materials
from vantage.runs.record import RunRecord
from vantage.runs.run import Run, read_runs
from vantage.runs.view import Broken, Maker, Missing, RunView
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.work import copied_stage
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.extensions import state_key
from vantage.schemas.steps import dependencies
from vantage.storage.durable_files import make_folder, replace_file
from vantage.storage.environments import read_environment
from vantage.storage.refs import DamagedRef

FOLDER = "bills"
"""Folder of a run: ``STAGE.cdx.json`` of each published stage."""


def bill_of(workspace: Workspace, record: RunRecord, step: str) -> str | None:
    """Return the bill as CycloneDX in JSON; None: there is no artifact, or its environment is not recorded.

    Args:
        record: any run that made or reused the artifact.
        step: its step.
    """
    run = RunView.of(workspace, record)
    storage, digest = workspace.existing_storage, record.stages[step].provenance.get("environment")
    environment = None if digest is None or storage is None else read_environment(storage, digest)
    artifact = run.artifact(step)
    if environment is None or isinstance(artifact, Missing | Broken):
        return None
    licences = _licences(workspace)
    facts = {f"provenance.{part}": text for part, text in record.stages[step].provenance.items()}
    subject, *inputs = (
        _material(maker, made, licences, facts if made.digest == artifact.digest else {})
        for maker, made in _made_of(run, step, workspace, set())
    )
    return bill_of_materials(subject, inputs, environment)


def tell_bill(run: Run, step: str, *, ledger: Ledger) -> None:
    """Write the bill of a step into the run's folder, and log it to MLflow; does nothing if it cannot be made.

    Raises:
        OSError: the disk fails.
    """
    bill = bill_of(run.workspace, run.record, step)
    if bill is not None:
        file = run.folder / FOLDER / f"{step}.cdx.json"
        make_folder(file.parent)
        replace_file(file, bill.encode())
        ledger.log_bill(step, file)


def _made_of(
    run: RunView, step: str, workspace: Workspace, seen: set[str]
) -> Iterator[tuple[Maker, Artifact]]:
    """Yield the step's artifact and all that it was made of, at any depth, each once and with the step that made it."""
    artifact = run.artifact(step)
    if isinstance(artifact, Missing | Broken) or artifact.digest in seen:
        return
    seen.add(artifact.digest)
    found = run.maker(step)
    # without a maker, the record of the run that made it is gone
    maker = found if isinstance(found, Maker) else Maker(run, step)
    yield maker, artifact
    record = maker.run.record
    if isinstance(record, RunRecord):
        for read in dependencies(record.recipe)[maker.step].values():
            yield from _made_of(maker.run, read, workspace, seen)
        if (copied := copied_stage(work_of(record.recipe, maker.step))) is not None:
            yield from _made_of(RunView(workspace, copied.run), copied.step, workspace, seen)
        for gone_on_from in _shorter(record, maker.step, workspace, seen):
            yield maker, gone_on_from


def _shorter(record: RunRecord, step: str, workspace: Workspace, seen: set[str]) -> Iterator[Artifact]:
    """Yield the artifacts and the training states of the shorter stages that a step goes on from, as far as they are there."""
    storage = workspace.existing_storage
    shorter = record.stages[step].shorter if step in record.stages else ()
    for key in (key for each in shorter for key in (each.stage_key, state_key(each.stage_key))):
        with suppress(DamagedRef):
            ref = None if storage is None else storage.find(key)
            if ref is not None and ref.artifact.digest not in seen:
                seen.add(ref.artifact.digest)
                yield ref.artifact


def _licences(workspace: Workspace) -> dict[str, str]:
    """Return content digest → licence, from the newest run that names one."""
    found: dict[str, str] = {}
    for record in read_runs(workspace):
        for step, licence in record.recipe.licenses.items():
            digest = record.stages[step].digest if step in record.stages else None
            if digest is not None:
                found.setdefault(digest, licence)
    return found


def _material(
    maker: Maker, artifact: Artifact, licences: Mapping[str, str], facts: Mapping[str, str]
) -> Material:
    record = maker.run.record
    recipe = record.recipe.recipe if isinstance(record, RunRecord) else "unknown"
    return Material(
        name=f"{recipe}/{maker.step}",
        kind=artifact.kind,
        digest=artifact.digest,
        parents=frozenset(artifact.parents.values()),
        facts={"stage_key": artifact.stage_key, **facts},
        license=licences.get(artifact.digest, ""),
    )
