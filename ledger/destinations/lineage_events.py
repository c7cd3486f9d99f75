"""Events of OpenLineage about a run: a pure function of its operations, with the same ids and times whenever they are sent.

A run of OpenLineage starts once and ends once, so each opening of a Vantage run is one, and so is each attempt at a
stage. An attempt whose process died is aborted when the run is opened again. Datasets are named by their content
digest. Events contain no recipes, parameters or sources, since these may hold confidential values.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from uuid import UUID, uuid5

from openlineage.client.event_v2 import (
    InputDataset,
    Job,
    OutputDataset,
    Run,
    RunEvent,
    RunState,
    set_producer,
)
from openlineage.client.facet_v2 import (
    DatasetFacet,
    JobFacet,
    RunFacet,
    dataset_type_dataset,
    dataset_version_dataset,
    documentation_dataset,
    error_message_run,
    job_type_job,
    parent_run,
    processing_engine_run,
    tags_run,
)

from vantage.ledger.entries import RunEntry
from vantage.ledger.operations import (
    FinishRun,
    FinishStage,
    Input,
    OpenRun,
    OpenStage,
    Operation,
    RecordReuse,
)
from vantage.schemas.kind import MODELS
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.safe_text import safe_text, without_secrets

_ENDS = {
    "completed": RunState.COMPLETE,
    "gate_closed": RunState.COMPLETE,
    "waiting_approval": RunState.COMPLETE,
    "failed": RunState.FAIL,
    "resumable": RunState.ABORT,
}
"""Outcome → the event that ends a run. A closed gate is a result: the artifact is there, and the tag has the outcome."""
_DATASETS = "vantage"
"""Namespace of all datasets: a digest names its content wherever it is."""
_NAMESPACE = UUID("2b6a0a4e-52c5-5c0c-8d0e-4c7b5a3f9e21")
_VERSION = version("vantage-rlhf")
_DIED = "its process died; the run was opened again"
_LONGEST_REASON = 2000

set_producer(f"urn:vantage-rlhf:{_VERSION}")


class LineageEvents:
    """The events of one run, operation by operation."""

    def __init__(self, opening: OpenRun, *, namespace: str) -> None:
        """Begin the events of a run; ``namespace`` is the namespace of the jobs."""
        self._run_id = opening.run_id
        self._recipe = opening.name
        self._namespace = namespace
        self._counts: Counter[str | None] = Counter()
        """Stage → number of attempts that have begun; None → number of times that the run was opened."""
        self._running: dict[str | None, str] = {}
        """Stage → id of the attempt that has started and not ended; None → id of the opening of the run."""

    def after(self, entry: RunEntry, operation: Operation) -> list[RunEvent]:
        """Return the events of an operation; ``entry`` is the run after it. Every operation is passed once, in order."""
        match operation:
            case OpenRun():
                died = [
                    self._end(stage, operation.time, RunState.ABORT, reason=_DIED)
                    for stage in sorted(self._running, key=lambda stage: (stage is None, stage))
                ]
                return [*died, self._start(None, operation.time)]
            case OpenStage():
                died = self._died(operation.stage, operation.time)
                return [*died, self._start(operation.stage, operation.time, operation)]
            case FinishStage():
                if operation.stage not in self._running:
                    return []
                inputs = entry.stages[operation.stage].inputs
                return [
                    self._end(
                        operation.stage,
                        operation.time,
                        _ENDS[operation.outcome],
                        reason=operation.reason,
                        tags={"vantage.outcome": operation.outcome},
                        inputs=_inputs(inputs, entry.stages[operation.stage].source_sha256),
                        outputs=_outputs(operation.artifact, operation.stage),
                    )
                ]
            case RecordReuse():
                return self._reused(operation)
            case FinishRun():
                if None not in self._running:  # `vantage publish` ends the run again
                    return []
                left = [stage for stage in self._running if stage is not None]
                ended = [self._end(stage, operation.time, RunState.ABORT) for stage in sorted(left)]
                tags = {"vantage.outcome": operation.outcome}
                return [*ended, self._end(None, operation.time, _ENDS[operation.outcome], tags=tags)]
            case _:
                return []

    def _died(self, stage: str, time: int) -> list[RunEvent]:
        if stage not in self._running:
            return []
        return [self._end(stage, time, RunState.ABORT, reason="another attempt began")]

    def _reused(self, operation: RecordReuse) -> list[RunEvent]:
        """Return the end of the attempt that made the artifact and died, else the start and the end of the reuse."""
        made_here = operation.stage in self._running
        started = [] if made_here else [self._start(operation.stage, operation.time, operation)]
        ended = self._end(
            operation.stage,
            operation.time,
            RunState.COMPLETE,
            tags={"vantage.outcome": "completed" if made_here else "reused"},
            inputs=_inputs(operation.inputs, operation.source_sha256),
            outputs=_outputs(operation.artifact, operation.stage),
        )
        return [*started, ended]

    def _start(
        self, stage: str | None, time: int, operation: OpenStage | RecordReuse | None = None
    ) -> RunEvent:
        self._counts[stage] += 1
        self._running[stage] = str(uuid5(_NAMESPACE, f"{self._run_id}/{stage or ''}/{self._counts[stage]}"))
        tags = {"vantage.run_id": self._run_id}
        inputs: list[InputDataset] = []
        if operation is not None:
            tags |= {"vantage.kind": operation.kind, "vantage.stage_key": operation.stage_key}
            inputs = _inputs(operation.inputs, operation.source_sha256)
        return self._event(stage, time, RunState.START, tags=tags, inputs=inputs)

    def _end(
        self,
        stage: str | None,
        time: int,
        state: RunState,
        *,
        reason: str | None = None,
        tags: Mapping[str, str] | None = None,
        inputs: list[InputDataset] | None = None,
        outputs: list[OutputDataset] | None = None,
    ) -> RunEvent:
        event = self._event(
            stage, time, state, tags=tags or {}, reason=reason, inputs=inputs, outputs=outputs
        )
        del self._running[stage]
        return event

    def _event(
        self,
        stage: str | None,
        time: int,
        state: RunState,
        *,
        tags: Mapping[str, str],
        reason: str | None = None,
        inputs: list[InputDataset] | None = None,
        outputs: list[OutputDataset] | None = None,
    ) -> RunEvent:
        facets: dict[str, RunFacet] = {
            "processing_engine": processing_engine_run.ProcessingEngineRunFacet(
                version=_VERSION, name="Vantage"
            )
        }
        if tags:
            fields = [tags_run.TagsRunFacetFields(name, value, "VANTAGE") for name, value in tags.items()]
            facets["tags"] = tags_run.TagsRunFacet(tags=fields)
        if stage is not None and None in self._running:
            facets["parent"] = self._parent(self._running[None])
        if reason:
            text = without_secrets(safe_text(reason))[:_LONGEST_REASON]
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(text, "Python")
        kind: dict[str, JobFacet] = {
            "jobType": job_type_job.JobTypeJobFacet("BATCH", "VANTAGE", "RUN" if stage is None else "STAGE")
        }
        return RunEvent(
            eventTime=datetime.fromtimestamp(time / 1000, UTC).isoformat(timespec="milliseconds"),
            run=Run(runId=self._running[stage], facets=facets),
            job=Job(namespace=self._namespace, name=self._job(stage), facets=kind),
            eventType=state,
            inputs=inputs or [],
            outputs=outputs or [],
        )

    def _job(self, stage: str | None) -> str:
        return self._recipe if stage is None else f"{self._recipe}.{stage}"

    def _parent(self, run_id: str) -> parent_run.ParentRunFacet:
        return parent_run.ParentRunFacet(
            run=parent_run.Run(runId=run_id),
            job=parent_run.Job(namespace=self._namespace, name=self._recipe),
            root=parent_run.Root(
                run=parent_run.RootRun(runId=run_id),
                job=parent_run.RootJob(namespace=self._namespace, name=self._recipe),
            ),
        )


def _inputs(inputs: Mapping[str, Input], source_sha256: str | None) -> list[InputDataset]:
    """Return each artifact that a step reads once, and the source that an implicit step reads."""
    read = {given.artifact.digest: given for given in inputs.values()}
    found = [
        InputDataset(_DATASETS, digest, facets=_facets(given.artifact, given.stage))
        for digest, given in sorted(read.items())
    ]
    if source_sha256 is not None:
        found.append(InputDataset(_DATASETS, source_sha256, facets={}))
    return found


def _outputs(artifact: Artifact | None, stage: str) -> list[OutputDataset]:
    if artifact is None:
        return []
    return [OutputDataset(_DATASETS, artifact.digest, facets=_facets(artifact, stage))]


def _facets(artifact: Artifact, stage: str) -> dict[str, DatasetFacet]:
    is_model = artifact.kind in MODELS
    return {
        "version": dataset_version_dataset.DatasetVersionDatasetFacet(artifact.digest),
        "datasetType": dataset_type_dataset.DatasetTypeDatasetFacet(
            "MODEL" if is_model else "FILE", artifact.kind
        ),
        "documentation": documentation_dataset.DocumentationDatasetFacet(
            f"{artifact.kind} made by the step {stage}"
        ),
    }
