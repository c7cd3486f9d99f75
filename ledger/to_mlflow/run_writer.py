"""Write the changes by a run's operations to MLflow.

Every change may be sent twice; the second time changes nothing, because runs, models and versions are found by our
tags. What was found is cached until an error, since the cache may have caused it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mlflow import entities

from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.expected.changes import (
    RUNNING,
    AliasChange,
    Closing,
    FileChange,
    ListChange,
    PagesChange,
    RunChange,
    ShownArtifact,
    VersionChange,
    changes,
)
from vantage.ledger.expected.texts import fit_tag
from vantage.ledger.notes import ModelPages, model_note, run_links, run_note, stage_note
from vantage.ledger.operations import MetricRow, MoveAlias, OpenRun, Operation, Publish
from vantage.ledger.to_mlflow.aliases import NoteMove, apply_movement
from vantage.ledger.to_mlflow.critic_pages import log_critic_page
from vantage.ledger.to_mlflow.list_of_runs import page_of_runs, write_view
from vantage.ledger.to_mlflow.logged_models import record_model
from vantage.ledger.to_mlflow.mlflow_runs import Runs, close_running
from vantage.ledger.to_mlflow.producers import Producer, Producers, link_to, log_inputs
from vantage.ledger.to_mlflow.registered_models import Published, publish
from vantage.ledger.to_mlflow.samples import example_prompt, log_samples
from vantage.ledger.to_mlflow.server import Server, is_permanent_error
from vantage.ledger.to_mlflow.writing import NOTE, write
from vantage.schemas.kind import MODELS
from vantage.schemas.safe_text import without_secrets

log = logging.getLogger(__name__)


PUBLISHED = "vantage.published"
"""Tag of a stage's run and of its parent run: registered model, alias and version."""
_BETWEEN = "; "


class _OfArtifact(NamedTuple):
    """Tags and metrics by which a stage's run shows its artifact."""

    tags: dict[str, str]
    metrics: list[entities.Metric]


class RunWriter:
    """Writes one run to one experiment of MLflow."""

    def __init__(self, server: Server, opening: OpenRun, note_move: NoteMove) -> None:
        self._server = server
        self._note_move = note_move
        self._client = server.client
        self._run_id = opening.run_id
        self._experiment = server.experiment(opening.experiment)
        self._producers = Producers(server, run_id=self._run_id)
        self._note_is_stale = False
        self._notes: dict[str, str] = {}
        """MLflow's id of a run or a model → the text of its page, if this process has written it."""
        self.runs = Runs(self._client, self._experiment.experiment_id, opening)
        self.published: dict[tuple[str, str], Published] = {}
        """(Registered model, content digest) → its version, if this process has published it."""
        self.unpublished: dict[tuple[str, str], str] = {}
        """(Registered model, content digest) → why it was refused."""
        self.moves: dict[tuple[str, str], str | None] = {}
        """(Registered model, alias) → why a person's movement of the alias was not made; None: it was."""

    @property
    def destination(self) -> str:
        """Identifier of the experiment and its database, independent of the address."""
        return f"{self._experiment.experiment_id} {self._experiment.name} {self._experiment.creation_time}"

    @property
    def page_of_runs(self) -> str:
        """Address of the list of the recipe's runs within MLflow's site."""
        return page_of_runs(self._experiment.experiment_id)

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
        refused = {name for name, _ in self.unpublished}
        links = run_links(entry, all_runs=self.page_of_runs, run_page=self.runs.page(None), refused=refused)
        return run_note(entry, self._pages(entry), self._producers.links(entry), links)

    def _apply(self, entry: RunEntry, operation: Operation) -> None:
        for change in changes(entry, operation):
            match change:
                case RunChange():
                    self._change_run(entry, change)
                case Closing():
                    self._close(change)
                case VersionChange():
                    self._publish(entry, change)
                case AliasChange():
                    self._move_alias(change)
                case FileChange():
                    self._log_file(entry, change)
                case ListChange():
                    write_view(self._client, self._experiment, change.metrics)
                case PagesChange():
                    self._write_pages(entry)

    # Each method below writes one change.

    def _change_run(self, entry: RunEntry, change: RunChange) -> None:
        is_new = change.stage not in self.runs.ids
        run_id = self.runs.run_of(change.stage, change.time)
        tags, metrics = dict(change.tags), _metrics(change.rows)
        if change.inputs is not None:
            tags |= log_inputs(self._client, run_id, change.inputs, change.datasets, self._producers)
        critic_of = None
        if change.shown is not None and change.stage is not None:
            stage = entry.stages[change.stage]
            if (other := self._other_producer(run_id, change.shown)) is not None:
                tags["vantage.reused_from"] = other.mlflow_run_id
            else:
                of_artifact = self._record_artifact(entry, stage, run_id, change.shown)
                tags |= of_artifact.tags
                metrics += of_artifact.metrics
                critic_of = stage
        if change.has_page and change.stage is not None:
            self._write_stage(entry, change.stage, tags, params=change.params, metrics=metrics)
        else:
            if change.has_page:  # the parent's page is written now, since no later operation may come
                tags[NOTE] = self._run_note(entry)
            if tags or change.params or metrics:
                write(self._client, run_id, params=change.params, tags=tags, metrics=metrics)
        if critic_of is not None:
            log_critic_page(self._client, run_id, critic_of)
        if change.status == RUNNING:
            if not is_new:  # one that MLflow has just created is running
                self._client.update_run(run_id, status=RUNNING)
        elif change.status is not None:
            self._client.set_terminated(run_id, change.status, change.ended)

    def _close(self, closing: Closing) -> None:
        if closing.is_own:
            self.forget()
        close_running(
            self._client,
            self._server.experiment_ids(),
            closing.run_id,
            skip=self.runs.run_of(None, closing.time) if closing.is_own else None,
            reason=closing.reason,
            time=closing.time,
        )

    def _write_pages(self, entry: RunEntry) -> None:
        for stage in entry.stages:
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

    def _publish(self, entry: RunEntry, change: VersionChange) -> None:
        operation = change.operation
        name, digest = operation.registered_model, operation.artifact.digest
        producer = self._producers.find(operation.artifact)
        published = publish(
            self._client,
            operation,
            producer,
            tracking_uri=self._server.tracking_uri,
            our_run_id=self._run_id,
            note=self._version_note(entry, operation, producer),
            facts=change.facts,
            note_move=self._note_move,
            example=example_prompt(entry, operation.stage),
        )
        alias = f"@{operation.alias}" if operation.alias else ""
        tags = {PUBLISHED: f"{name}{alias} version {published.version}"}
        write(self._client, self.runs.run_of(operation.stage, operation.time), tags=tags)
        self._list_publication(operation, tags[PUBLISHED])
        self.published[name, digest] = published
        self.unpublished.pop((name, digest), None)

    def _list_publication(self, operation: Publish, text: str) -> None:
        """Show the newest publication of each registered model in the parent run too, which MLflow's list contains."""
        parent = self.runs.run_of(None, operation.time)
        known = self._client.get_run(parent).data.tags.get(PUBLISHED, "").split(_BETWEEN)
        name = operation.registered_model
        others = [each for each in known if each and each.partition(" version ")[0].partition("@")[0] != name]
        write(self._client, parent, tags={PUBLISHED: fit_tag(_BETWEEN.join([*others, text]))})

    def _version_note(
        self, entry: RunEntry, operation: Publish, producer: Producer | None
    ) -> Callable[[int], str] | None:
        """Return version → the text of its page; None: unchanged."""
        if producer is None or operation.stage not in entry.stages:
            return None
        pages = replace(self._model_pages(entry, operation.stage), run=link_to(producer).run or "")
        links = self._producers.links(entry)

        def note(version: int) -> str:
            of_version = replace(pages, registered=f"{operation.registered_model}/{version}")
            return model_note(entry, operation.stage, of_version, links)

        return note

    def _move_alias(self, change: AliasChange) -> None:
        target = (change.operation.registered_model, change.operation.alias)
        self.moves[target] = apply_movement(
            self._client, change.operation, our_run_id=self._run_id, note=self._note_move
        )

    def _log_file(self, entry: RunEntry, change: FileChange) -> None:
        run_id = self.runs.run_of(change.stage, change.time)
        try:
            content = Path(change.path).read_bytes()
        except OSError:  # the file was removed since, or is on another machine
            log.warning("%s is not there any longer, so MLflow has no %s", change.path, change.described)
            return
        self._client.log_text(run_id, content.decode(), change.name)
        if change.has_page and change.stage is not None:
            self._write_stage(entry, change.stage, {})

    # Each method below writes a part of a change.

    def _other_producer(self, run_id: str, shown: ShownArtifact) -> Producer | None:
        """Return another run of MLflow that made a reused artifact; None: this run shows it."""
        if not shown.is_reused:
            return None
        producer = self._producers.find(shown.artifact)
        return None if producer is None or producer.mlflow_run_id == run_id else producer

    def _record_artifact(
        self, entry: RunEntry, stage: StageEntry, run_id: str, shown: ShownArtifact
    ) -> _OfArtifact:
        """Record an artifact as a logged model, or an evaluation's samples; returns its tags and metrics for the stage's
        run."""
        artifact, tags = shown.artifact, dict(shown.tags)
        model_id = None  # the page of this model shows the headline metrics too
        if shown.model is not None:
            links = self._producers.links(entry, besides=artifact)
            model_id = record_model(
                self._client,
                shown.model,
                experiment_id=self._experiment.experiment_id,
                run_id=run_id,
                note=model_note(entry, stage.name, self._model_pages(entry, stage.name), links),
            )
            tags["vantage.model"] = model_id
        elif artifact.kind == "evaluation":
            candidate = self._producers.find(shown.candidate.artifact) if shown.candidate else None
            model_id = candidate.model_id if candidate else None
            log_samples(self._client, run_id, stage)
        producer = Producer(
            self._experiment.experiment_id, run_id, stage.name, self._run_id, tags.get("vantage.model")
        )
        self._producers.remember(artifact, producer)
        dataset = shown.dataset if model_id else None
        return _OfArtifact(tags, _metrics(shown.rows, model_id=model_id, dataset=dataset))

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
            return  # another run made it, and describes it
        note = model_note(entry, stage, self._model_pages(entry, stage), self._producers.links(entry))
        if self._notes.get(producer.model_id) != note:
            self._client.set_logged_model_tags(producer.model_id, {NOTE: fit_tag(note)})
            self._notes[producer.model_id] = note

    def _pages(self, entry: RunEntry) -> dict[str, str]:
        """Return stage → page of its run."""
        return {stage: page for stage in entry.stages if (page := self.runs.page(stage))}

    def _model_pages(self, entry: RunEntry, stage: str) -> ModelPages:
        pages = self._pages(entry)
        return ModelPages(run=pages.get(stage, ""), run_of_all=self.runs.page(None), readers=pages)


def _metrics(
    rows: Iterable[MetricRow], *, model_id: str | None = None, dataset: tuple[str, str] | None = None
) -> list[entities.Metric]:
    """Return rows as MLflow's client takes them; with a model and a dataset, the model's page shows them too."""
    name_of_dataset, digest = dataset or (None, None)
    return [
        entities.Metric(
            name, value, time, step, model_id=model_id, dataset_name=name_of_dataset, dataset_digest=digest
        )
        for name, value, time, step in rows
    ]
