"""Writes the operations of a run to MLflow.

Every operation may be sent twice; the second time changes nothing, because runs, models and versions are found by our
tags. They are cached until an error, since the cache may have caused it.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mlflow import entities

from vantage.ledger.entries import RunEntry
from vantage.ledger.notes import (
    BILL,
    ModelPages,
    model_note,
    model_tags,
    run_note,
    stage_note,
)
from vantage.ledger.operations import (
    CloseRun,
    FinishRun,
    FinishStage,
    LogBill,
    LogMetrics,
    LogReport,
    MoveAlias,
    OpenRun,
    OpenStage,
    Operation,
    Publish,
    RecordApproval,
    RecordReuse,
    RecordVerdicts,
)
from vantage.ledger.remarks import remark_on
from vantage.ledger.to_mlflow.aliases import apply_movement
from vantage.ledger.to_mlflow.answer_tags import alias_tags, answer_tags
from vantage.ledger.to_mlflow.critic_pages import log_critic_page
from vantage.ledger.to_mlflow.energy_tags import energy_tags
from vantage.ledger.to_mlflow.lineage import (
    Producer,
    Producers,
    link_to,
    log_inputs,
    measured_dataset,
)
from vantage.ledger.to_mlflow.logged_models import record_model
from vantage.ledger.to_mlflow.registered_models import Published, publish
from vantage.ledger.to_mlflow.runs import Runs, close_running
from vantage.ledger.to_mlflow.samples import example_prompt, log_samples
from vantage.ledger.to_mlflow.server import Server, is_permanent_error
from vantage.ledger.to_mlflow.system_metrics import system_metrics
from vantage.ledger.to_mlflow.writing import NOTE, fit_tag, flatten, write
from vantage.schemas.kind import MODELS
from vantage.schemas.kinds import KINDS
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.metric_warnings import warnings_of
from vantage.schemas.safe_text import without_secrets

log = logging.getLogger(__name__)

_RUN_STATUS = {
    "completed": "FINISHED",
    "gate_closed": "FAILED",
    "waiting_approval": "SCHEDULED",
    "failed": "FAILED",
    "resumable": "KILLED",
}
_STAGE_STATUS = {
    **_RUN_STATUS,
    "gate_closed": "FINISHED",
    "waiting_approval": "FINISHED",
    "reused": "FINISHED",
}


class _OfArtifact(NamedTuple):
    """What a stage's run shows of its artifact."""

    tags: dict[str, str]
    metrics: list[entities.Metric]


class RunWriter:
    """Writes one run to one experiment of MLflow."""

    def __init__(self, server: Server, opening: OpenRun) -> None:
        self._server = server
        self._client = server.client
        self._run_id = opening.run_id
        self._experiment = server.experiment(opening.experiment)
        self._producers = Producers(server, run_id=self._run_id)
        self._note_is_stale = False
        self._notes: dict[str, str] = {}
        """MLflow's id of a run or a model → the text of its page, where this process has written it."""
        self.runs = Runs(
            self._client,
            self._experiment.experiment_id,
            run_id=self._run_id,
            recipe=opening.name,
            origin=opening.origin,
        )
        self.published: dict[tuple[str, str], Published] = {}
        """(Registered model, content digest) → its version, if it was published here."""
        self.unpublished: dict[tuple[str, str], str] = {}
        """(Registered model, content digest) → why it was refused."""
        self.moves: dict[tuple[str, str], str | None] = {}
        """(Registered model, alias) → why a person's movement of it was not made; None: it was."""

    @property
    def destination(self) -> str:
        """Identifies the experiment and its database, independent of the address."""
        return f"{self._experiment.experiment_id} {self._experiment.name} {self._experiment.creation_time}"

    def apply(self, entry: RunEntry, operation: Operation) -> None:
        """Write one operation; ``entry`` is the run's state after it."""
        try:
            self._apply(entry, operation)
        except Exception as error:
            self.forget()
            if not is_permanent_error(error):
                raise
            self._apply(entry, operation)  # a cached run may have been deleted by hand
        self._note_is_stale = True

    def record_refusal(self, operation: Operation, why: str) -> None:
        """Store why a model was not published, for ``Ledger.publish``."""
        if isinstance(operation, Publish):
            self.unpublished[operation.registered_model, operation.artifact.digest] = why
        if isinstance(operation, MoveAlias):
            self.moves[operation.registered_model, operation.alias] = why

    def forget(self) -> None:
        """Clear the caches: other processes may have written or deleted."""
        self.runs.forget()
        self._producers.forget()
        self._notes.clear()

    def write_run_note(self, entry: RunEntry) -> None:
        """Update the table of stages on the run's page."""
        if self._note_is_stale and None in self.runs.ids:
            self._client.set_tag(self.runs.ids[None], NOTE, fit_tag(self._run_note(entry)))
            self._note_is_stale = False

    def _run_note(self, entry: RunEntry) -> str:
        return run_note(entry, self._pages(entry), self._producers.links(entry))

    def _apply(self, entry: RunEntry, operation: Operation) -> None:
        match operation:
            case OpenRun():
                self._open_run(entry, operation)
            case OpenStage():
                self._open_stage(entry, operation)
            case LogMetrics():
                self._log_metrics(operation)
            case RecordVerdicts():
                self._record_verdicts(entry, operation)
            case FinishStage():
                self._finish_stage(entry, operation)
            case RecordReuse():
                self._record_reuse(entry, operation)
            case FinishRun():
                self._finish_run(entry, operation)
            case CloseRun():
                close_running(
                    self._client,
                    self._server.experiment_ids(),
                    operation.run_id,
                    reason=operation.reason,
                    time=operation.time,
                )
            case Publish():
                self._publish(entry, operation)
            case LogReport():
                self._log_report(operation)
            case LogBill():
                self._log_bill(entry, operation)
            case RecordApproval():
                self._record_approval(entry, operation)
            case MoveAlias():
                self._move_alias(operation)

    # One operation each

    def _open_run(self, entry: RunEntry, operation: OpenRun) -> None:
        self.forget()
        run_id = self.runs.parent_run(operation.time)
        if entry.openings > 1:
            close_running(
                self._client,
                self._server.experiment_ids(),
                self._run_id,
                skip=run_id,
                reason="its process died; the run was taken over",
                time=operation.time,
            )
            self._client.update_run(run_id, status="RUNNING")
        params, tags = flatten(operation.recipe), {"vantage.status": "running", **operation.origin}
        write(self._client, run_id, params=params, tags=tags)

    def _open_stage(self, entry: RunEntry, operation: OpenStage) -> None:
        is_new = operation.stage not in self.runs.ids
        run_id = self.runs.stage_run(operation.stage, operation.time)
        tags = log_inputs(self._client, run_id, entry, operation.stage, self._producers) | entry.origin
        tags |= {"vantage.status": "running", "vantage.attempt": str(operation.attempt)}
        self._write_stage(entry, operation.stage, tags, params=flatten(operation.params))
        if not is_new:  # one that MLflow has just created is running
            self._client.update_run(run_id, status="RUNNING")

    def _log_metrics(self, operation: LogMetrics) -> None:
        run_id = self.runs.stage_run(operation.stage, min(time for _, _, time, _ in operation.rows))
        rows = (entities.Metric(name, value, time, step) for name, value, time, step in operation.rows)
        write(self._client, run_id, metrics=rows)

    def _record_verdicts(self, entry: RunEntry, operation: RecordVerdicts) -> None:
        tags = {}
        if operation.verdicts:
            passed = all(verdict.passed for verdict in operation.verdicts)
            tags["vantage.verdict"] = "passed" if passed else "closed"
        for verdict in operation.verdicts:
            tags[f"vantage.gate.{verdict.metric}"] = str(verdict)
            tags[f"vantage.gate.{verdict.metric}.evidence"] = json.dumps(verdict.evidence, sort_keys=True)
        self.runs.stage_run(operation.stage, operation.time)
        self._write_stage(entry, operation.stage, tags)

    def _finish_stage(self, entry: RunEntry, operation: FinishStage) -> None:
        run_id = self.runs.stage_run(operation.stage, operation.time)
        tags: dict[str, str] = {"vantage.status": operation.outcome}
        tags |= {f"vantage.provenance.{part}": value for part, value in operation.provenance.items()}
        tags |= energy_tags(operation.energy)
        metrics = list(system_metrics(operation.usage))
        if operation.artifact is not None:
            of_artifact = self._record_artifact(entry, operation.stage, operation.artifact)
            tags |= of_artifact.tags
            metrics += of_artifact.metrics
        self._write_stage(entry, operation.stage, tags, metrics=metrics)
        if operation.artifact is not None:
            log_critic_page(self._client, run_id, entry.stages[operation.stage])
            self._copy_metrics_to_parent(entry, operation.stage, operation.artifact)
        self._client.set_terminated(run_id, _STAGE_STATUS[operation.outcome], operation.time)

    def _record_reuse(self, entry: RunEntry, operation: RecordReuse) -> None:
        stage = operation.stage
        run_id = self.runs.stage_run(stage, operation.time)
        tags = log_inputs(self._client, run_id, entry, stage, self._producers)
        outcome = entry.stages[stage].outcome
        other = self._producers.find(operation.artifact)
        if outcome != "reused" or (other is not None and other.mlflow_run_id == run_id):
            other = None  # an earlier attempt of this run made it
        metrics: list[entities.Metric] = []
        if other is not None:
            tags |= {
                "vantage.reused_from": other.mlflow_run_id,
                "vantage.digest": operation.artifact.digest,
            }
        else:  # this run made it, or one that this server does not have: record it here
            of_artifact = self._record_artifact(entry, stage, operation.artifact)
            tags |= of_artifact.tags
            metrics = of_artifact.metrics
        tags["vantage.status"] = outcome
        self._write_stage(entry, stage, tags, params=flatten(operation.params), metrics=metrics)
        if other is None:
            log_critic_page(self._client, run_id, entry.stages[stage])
        self._copy_metrics_to_parent(entry, stage, operation.artifact)
        self._client.set_terminated(run_id, _STAGE_STATUS[outcome], entry.stages[stage].made)

    def _finish_run(self, entry: RunEntry, operation: FinishRun) -> None:
        run_id = self.runs.parent_run(operation.time)
        # the note too: no later operation may come
        write(self._client, run_id, tags={"vantage.status": operation.outcome, NOTE: self._run_note(entry)})
        self._client.set_terminated(run_id, _RUN_STATUS[operation.outcome], operation.time)
        for stage in entry.stages:  # each names those that have read it since
            if stage not in self.runs.ids:
                continue
            try:
                self._write_stage(entry, stage, {})
                self._write_model_note(entry, stage)
            except Exception as error:
                if not is_permanent_error(error):
                    raise
                log.warning(
                    "the page of %s stays as it was: %s",
                    stage,
                    without_secrets(str(error)).partition("\n")[0],
                )

    def _publish(self, entry: RunEntry, operation: Publish) -> None:
        name, digest = operation.registered_model, operation.artifact.digest
        producer = self._producers.find(operation.artifact)
        published = publish(
            self._client,
            operation,
            producer,
            tracking_uri=self._server.tracking_uri,
            our_run_id=self._run_id,
            note=self._version_note(entry, operation, producer),
            facts=model_tags(entry, operation.stage),
            example=example_prompt(entry, operation.stage),
        )
        alias = f"@{operation.alias}" if operation.alias else ""
        tags = {"vantage.published": f"{name}{alias} version {published.version}"}
        write(self._client, self.runs.stage_run(operation.stage, operation.time), tags=tags)
        self.published[name, digest] = published
        self.unpublished.pop((name, digest), None)

    def _version_note(
        self, entry: RunEntry, operation: Publish, producer: Producer | None
    ) -> Callable[[int], str] | None:
        """Version → the text of its page; None: it stays as it is."""
        if producer is None or operation.stage not in entry.stages:
            return None
        pages = replace(self._model_pages(entry, operation.stage), run=link_to(producer).run or "")
        links = self._producers.links(entry)

        def note(version: int) -> str:
            of_version = replace(pages, registered=f"{operation.registered_model}/{version}")
            return model_note(entry, operation.stage, of_version, links)

        return note

    def _log_report(self, operation: LogReport) -> None:
        run_id = self.runs.parent_run(operation.time)
        if not Path(operation.file).is_file():  # removed since, or sent by another machine
            log.warning("%s is not there any longer, so MLflow has no report of this run", operation.file)
            return
        self._client.log_artifact(run_id, operation.file)

    def _log_bill(self, entry: RunEntry, operation: LogBill) -> None:
        run_id = self.runs.stage_run(operation.stage, operation.time)
        try:
            bill = Path(operation.file).read_text(encoding="utf-8")
        except OSError:
            log.warning("%s is not there any longer, so MLflow has no bill of materials", operation.file)
            return
        self._client.log_text(run_id, bill, BILL)
        if operation.stage in entry.stages:
            self._write_stage(entry, operation.stage, {})

    def _record_approval(self, entry: RunEntry, operation: RecordApproval) -> None:
        """Tags of the stage's run: the answer in words, and all of it as JSON."""
        answer = operation.approval
        question, tags = answer.question, answer_tags(answer)
        self.runs.stage_run(question.stage, answer.time)
        if question.stage in entry.stages:
            tags["vantage.status"] = entry.stages[question.stage].outcome
            self._write_stage(entry, question.stage, tags)
        else:
            write(self._client, self.runs.ids[question.stage], tags=tags)

    def _move_alias(self, operation: MoveAlias) -> None:
        target = (operation.registered_model, operation.alias)
        self.moves[target] = apply_movement(self._client, operation, our_run_id=self._run_id)
        run_id = self.runs.stage_run(operation.stage, operation.time)
        write(self._client, run_id, tags=alias_tags(operation))

    # Parts of them

    def _record_artifact(self, entry: RunEntry, stage: str, artifact: Artifact) -> _OfArtifact:
        """Record a stage's artifact, as a logged model with its parents if it is one; returns what its run shows of it."""
        made = entry.stages[stage].made
        assert made is not None, "whoever tells of an artifact tells when"
        run_id = self.runs.ids[stage]
        tags = {"vantage.digest": artifact.digest, "vantage.uri": artifact.uri}
        if warnings := warnings_of(artifact.metrics):
            tags["vantage.warnings"] = "\n".join(warnings)
        if tokenizer := getattr(artifact, "tokenizer_digest", None):
            tags["vantage.tokenizer_digest"] = tokenizer
        model_id = None
        if artifact.kind in MODELS:
            model_id = record_model(
                self._client,
                entry.stages[stage],
                artifact,
                experiment_id=self._experiment.experiment_id,
                run_id=run_id,
                our_run_id=self._run_id,
                note=model_note(
                    entry,
                    stage,
                    self._model_pages(entry, stage),
                    self._producers.links(entry, besides=artifact),
                ),
            )
            tags["vantage.model"] = model_id
        elif artifact.kind == "evaluation":
            # An evaluation's metrics are those of its candidate: show them on the model's page too.
            candidate = entry.stages[stage].inputs.get("candidate")
            producer = self._producers.find(candidate.artifact) if candidate else None
            model_id = producer.model_id if producer else None
            log_samples(self._client, run_id, entry.stages[stage])
        # A headline metric is of the kept weights: its step is one after the last of the curve with its name.
        # Its time is the artifact's: MLflow would store the same number at two times twice.
        last_steps = {name: step for (of, name), step in entry.last_steps.items() if of == stage}
        dataset = measured_dataset(entry.stages[stage]) if model_id else None
        dataset_name, dataset_digest = dataset or (None, None)
        metrics = [
            entities.Metric(
                name,
                value,
                made,
                last_steps.get(name, -1) + 1,
                model_id=model_id,
                dataset_name=dataset_name,
                dataset_digest=dataset_digest,
            )
            for name, value in artifact.metrics.items()
            if value is not None
        ]
        producer = Producer(
            self._experiment.experiment_id, run_id, stage, self._run_id, tags.get("vantage.model")
        )
        self._producers.remember(artifact, producer)
        return _OfArtifact(tags, metrics)

    def _copy_metrics_to_parent(self, entry: RunEntry, stage: str, artifact: Artifact) -> None:
        """Copy a stage's headline metrics to the parent run, as ``stage.metric``, to compare runs in MLflow's list."""
        if KINDS[entry.stages[stage].kind].is_implicit:  # its numbers do not measure a run's quality
            return
        made = entry.stages[stage].made
        assert made is not None, "whoever tells of an artifact tells when"
        metrics = [
            entities.Metric(f"{stage}.{name}", value, made, 0)
            for name, value in artifact.metrics.items()
            if value is not None
        ]
        write(self._client, self.runs.parent_run(made), metrics=metrics)

    def _write_stage(
        self,
        entry: RunEntry,
        stage: str,
        tags: Mapping[str, str],
        *,
        params: Mapping[str, str] | None = None,
        metrics: Sequence[entities.Metric] = (),
    ) -> None:
        """Write the stage's tags, params and metrics, and update its page."""
        links, pages = self._producers.links(entry), self._pages(entry)
        note = stage_note(entry, stage, self.runs.page(None) or "", links, pages)
        entry_of_stage = entry.stages[stage]
        if entry_of_stage.artifact and (remark := remark_on(entry_of_stage.artifact, entry_of_stage.inputs)):
            tags = {**tags, "vantage.remark": remark}
        run_id = self.runs.ids[stage]
        if not tags and not params and not metrics and self._notes.get(run_id) == note:
            return
        write(self._client, run_id, params=params, tags={**tags, NOTE: note}, metrics=metrics)
        self._notes[run_id] = note

    def _write_model_note(self, entry: RunEntry, stage: str) -> None:
        """Update the page of the model that the stage has made in this run."""
        artifact = entry.stages[stage].artifact
        if artifact is None or artifact.kind not in MODELS:
            return
        producer = self._producers.find(artifact)
        if producer is None or producer.model_id is None or producer.mlflow_run_id != self.runs.ids[stage]:
            return  # another run has made it, and describes it
        note = model_note(entry, stage, self._model_pages(entry, stage), self._producers.links(entry))
        if self._notes.get(producer.model_id) != note:
            self._client.set_logged_model_tags(producer.model_id, {NOTE: fit_tag(note)})
            self._notes[producer.model_id] = note

    def _pages(self, entry: RunEntry) -> dict[str, str]:
        """Stage → page of its run."""
        return {stage: page for stage in entry.stages if (page := self.runs.page(stage))}

    def _model_pages(self, entry: RunEntry, stage: str) -> ModelPages:
        pages = self._pages(entry)
        return ModelPages(run=pages.get(stage, ""), run_of_all=self.runs.page(None), readers=pages)
