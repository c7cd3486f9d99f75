"""Find damage of a run's artifacts in the store, and of MLflow's copies of published ones."""

from vantage.ledger import tracking
from vantage.ledger.published_copies import local_folder, problems_in
from vantage.runs.record import REMOVED, PublishedCopy, RunRecord, StageRecord
from vantage.runs.view import Broken, Missing, NotMade, Replaced, RunView
from vantage.runs.workspace import Workspace
from vantage.storage.refs import Ref
from vantage.storage.storage import Storage


def damage_of(workspace: Workspace, record: RunRecord, *, verify: bool) -> dict[str, tuple[str, ...]]:
    """Return step or registered model → its problems, one line each; intact artifacts are omitted.

    Args:
        verify: True: read every byte (about 1 GB/s from a disk; a server's copies are downloaded). False: compare
            manifests, sets of files and sizes on this machine, which is fast but does not find changed bytes.

    Raises:
        OSError: the MLflow server does not answer (only with ``verify``).
    """
    store = workspace.existing_storage
    if store is None:
        return {}
    stages = {} if record.status == REMOVED else record.stages
    run = RunView.of(workspace, record)
    found = {step: _of_stage(store, run, step, stage, verify=verify) for step, stage in stages.items()}
    found |= {name: _of_copy(workspace, copy, verify=verify) for name, copy in record.copies.items()}
    return {what: tuple(problems) for what, problems in found.items() if problems}


def _of_stage(store: Storage, run: RunView, step: str, stage: StageRecord, *, verify: bool) -> list[str]:
    match run.ref(step):
        case NotMade() | Replaced():
            return []  # an artifact that was replaced since, by other bytes, is not kept
        case Missing():
            return [f"the store has no artifact for its key {str(stage.stage_key)[:12]} any longer"]
        case Broken(cause=cause):
            return [cause]
        case Ref(artifact=artifact):
            problems = store.verify(artifact) if verify else store.check_sizes(artifact)
            return [f"{artifact.uri}: {problem}" for problem in problems]


def _of_copy(workspace: Workspace, copy: PublishedCopy, *, verify: bool) -> list[str]:
    if (folder := local_folder(copy.location)) is not None:
        problems = problems_in(folder, copy.digest, read=verify)
    elif verify:
        tracking.set_up_client()
        from vantage.ledger.to_mlflow.copies import problems_of_copy  # imports MLflow

        address = tracking.address(None, workspace.root)
        problems = problems_of_copy(copy.location, tracking_uri=address, digest=copy.digest)
    else:
        problems = []
    return [f"MLflow's copy: {problem}" for problem in problems]
