"""The ledger's operations as MLflow sees them: the only module that imports mlflow (about a second).

Every operation may be sent twice, and the second time changes nothing: runs, models and versions are found again
by our own tags. What was found is remembered until the first error, since what is remembered may be the error.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from mlflow import entities
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from schemas.artifacts import Artifact, Dataset
from tasks.durable_files import locked, make_folder
from tasks.ledger_entries import (
    CloseRun,
    FinishRun,
    FinishStage,
    Input,
    Link,
    LogMetrics,
    OpenRun,
    OpenStage,
    Operation,
    Publish,
    RecordReuse,
    RecordVerdicts,
    RunEntry,
    StageEntry,
    after,
    artifact_note,
    flatten,
    from_json,
    run_note,
    stage_note,
)
from tasks.outbox import Outbox
from tasks.publishing import WEIGHTS, PublishingError, write_description

log = logging.getLogger(__name__)

MARK = "vantage"
"""Tag by which the ledger's experiments are found among a server's others."""

MODELS = frozenset({"policy", "reward_model", "value_model"})
"""Kinds of artifact that stand under Models in MLflow."""

_RUN_STATUS = {"completed": "FINISHED", "gate_closed": "FAILED", "failed": "FAILED", "resumable": "KILLED"}
_STAGE_STATUS = {**_RUN_STATUS, "gate_closed": "FINISHED", "reused": "FINISHED"}

_REFUSALS = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "BAD_REQUEST",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
    }
)
"""Error codes that will be the same tomorrow."""

# MLflow's limits.
_PARAM_LENGTH, _TAG_LENGTH, _INPUT_TAG_LENGTH, _DATASET_DIGEST_LENGTH = 6000, 8000, 500, 36
_PARAMS_AND_TAGS_AT_ONCE, _METRICS_AT_ONCE = 100, 1000

_EXPERIMENT_TAGS = {
    MARK: "true",
    "mlflow.experimentKind": "custom_model_development",  # or else MLflow opens it as one of chats and traces
}
_NOTE = "mlflow.note.content"
_EXTERNAL = "mlflow.model.isExternal"
_VERSIONS = "mlflow.modelVersions"

_LOCK_PATIENCE_SECONDS = 5.0


class Busy(RuntimeError):
    """Another process is sending this outbox; it will not take long."""


class Server:
    """An MLflow server, or a database, that has answered."""

    def __init__(self, tracking_uri: str, *, artifacts: Path) -> None:
        """Connect; ``artifacts`` is where a database keeps what a server would keep at its own place.

        Making a SQLite database takes seconds and must not be done twice at once, hence the lock.
        """
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._opened: dict[str, entities.Experiment] = {}
        database = _sqlite_file(tracking_uri)
        self._artifacts = artifacts.as_uri() if database else None
        with _making(database):
            self.client = MlflowClient(tracking_uri=tracking_uri)
            self.client.search_experiments(max_results=1)

    def experiment(self, name: str) -> entities.Experiment:
        """The experiment of this name, made if there is none."""
        if name not in self._opened:
            found = self.client.get_experiment_by_name(name) or self._create_experiment(name)
            if found.lifecycle_stage == "deleted":
                log.warning("MLflow's experiment %r was deleted; it is restored for this run", name)
                self.client.restore_experiment(found.experiment_id)
            for tag, value in _EXPERIMENT_TAGS.items():
                if tag not in found.tags:
                    self.client.set_experiment_tag(found.experiment_id, tag, value)
            self._opened[name] = found
        return self._opened[name]

    def experiment_ids(self) -> list[str]:
        """Every experiment that a ledger writes to: an artifact may have been made under another recipe."""
        found = self.client.search_experiments(filter_string=f"tags.{MARK} = 'true'")
        return [experiment.experiment_id for experiment in found]

    def _create_experiment(self, name: str) -> entities.Experiment:
        try:
            experiment_id = self.client.create_experiment(name, self._artifacts, tags=_EXPERIMENT_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = self.client.get_experiment_by_name(name)  # another process has made it in the meantime
            assert found is not None
            return found
        return self.client.get_experiment(experiment_id)


def send_others(server: Server, runs: Path, *, but: Outbox | None) -> None:
    """Send what earlier runs of the workspace could not, the oldest run first."""
    for folder in sorted(runs.glob("*/ledger")):
        if but is not None and folder == but.folder:
            continue
        try:
            Sending(server, Outbox(folder)).send(wait_seconds=0.0)
        except Busy:
            continue  # its own driver sends it
        except ValueError as error:
            log.warning("%s cannot be read (%s); its run is missing in MLflow", folder, error)


class Sending:
    """One outbox on its way to one server."""

    def __init__(self, server: Server, outbox: Outbox) -> None:
        self._server = server
        self._outbox = outbox
        self._end = 0
        self._entry: RunEntry | None = None
        self.book: Book | None = None

    def send(self, *, wait_seconds: float = _LOCK_PATIENCE_SECONDS) -> None:
        """Send everything that the outbox holds now, in order.

        What the server refuses for good is set aside, with a warning.

        Raises:
            Busy: another process is at it.
            MlflowException, OSError: the server did not answer, or cannot now; the rest waits.
            ValueError: the outbox does not begin with the opening of a run.
        """
        if self.book is None:
            first = next(self._outbox.read(), None)
            if first is None:
                return
            opening = from_json(first[1])
            if not isinstance(opening, OpenRun):
                raise ValueError(f"the outbox begins with {opening.operation}, not with open_run")
            self.book = Book(self._server, opening)
        destination = self.book.destination
        if not self._outbox.is_pending(destination):
            return
        with self._outbox.sending(wait_seconds=wait_seconds) as ours:
            if not ours:
                raise Busy(f"{self._outbox.folder} is being sent by another process")
            try:
                self._send_rest(self.book, already_sent=self._outbox.sent(destination))
            except Exception:
                # The entry has seen an operation that was not sent: begin again from the start next time.
                self._end, self._entry = 0, None
                raise

    def _send_rest(self, book: "Book", *, already_sent: int) -> None:
        for end, line in self._outbox.read(self._end):
            operation = from_json(line)
            self._entry = after(self._entry, operation)
            self._end = end
            if end <= already_sent:
                continue
            try:
                book.apply(self._entry, operation)
            except Exception as error:
                if not _is_refusal(error):
                    raise
                self._outbox.mark_refused(book.destination, line, f"{type(error).__name__}: {error}")
                log.warning("MLflow refused %s: %s", operation.operation, str(error).partition("\n")[0])
            self._outbox.mark_sent(book.destination, end)
        if self._entry is not None:
            book.write_run_note(self._entry)


class Maker(NamedTuple):
    """The run that made an artifact, and its logged model if it has one."""

    run: entities.Run
    model_id: str | None


class Book:
    """One run of ours in one experiment of MLflow's."""

    def __init__(self, server: Server, opening: OpenRun) -> None:
        self._server = server
        self._client = server.client
        self._run_id = opening.run_id
        self._experiment = server.experiment(opening.experiment)
        self._experiments: list[str] = []
        self._makers: dict[str, Maker] = {}
        self._run_ids: dict[str | None, str] | None = None
        self._note_is_stale = False
        self.versions: dict[tuple[str, str], str] = {}
        """(Registered model, content digest) → version, of what was published here."""

    @property
    def destination(self) -> str:
        """Names the experiment and its database, whatever address it is reached by."""
        return f"{self._experiment.experiment_id} {self._experiment.name} {self._experiment.creation_time}"

    @property
    def run_ids(self) -> Mapping[str | None, str]:
        """Stage → MLflow's id of its run; None → that of the whole run."""
        if self._run_ids is None:
            runs = list(self._search([self._experiment.experiment_id], "vantage.run_id", self._run_id))
            self._run_ids = {run.data.tags.get("vantage.stage"): run.info.run_id for run in reversed(runs)}
        return self._run_ids

    def page(self, stage: str | None) -> str | None:
        """The page of a stage's run (None: of the whole run) within MLflow's own site."""
        run_id = self.run_ids.get(stage)
        return self._run_page(self._experiment.experiment_id, run_id) if run_id else None

    def apply(self, entry: RunEntry, operation: Operation) -> None:
        """Record one operation; ``entry`` is what is known after it."""
        if not self._experiments:
            self._forget()
        try:
            self._apply(entry, operation)
        except Exception as error:
            self._run_ids = None
            if not _is_refusal(error):
                raise
            self._forget()
            self._apply(entry, operation)  # a run may have been deleted by hand since we found it
        self._note_is_stale = True

    def write_run_note(self, entry: RunEntry) -> None:
        """Bring the table of stages on the run's page up to date."""
        if self._note_is_stale and None in self.run_ids:
            pages = {stage: page for stage in entry.stages if (page := self.page(stage))}
            note = run_note(entry, pages, self._links(entry))
            self._client.set_tag(self.run_ids[None], _NOTE, _cut_lines(note, _TAG_LENGTH))
            self._note_is_stale = False

    def _apply(self, entry: RunEntry, operation: Operation) -> None:
        match operation:
            case OpenRun():
                self._open_run(entry, operation)
            case OpenStage():
                self._open_stage(entry, operation)
            case LogMetrics():
                self._log_metrics(entry, operation)
            case RecordVerdicts():
                self._record_verdicts(entry, operation)
            case FinishStage():
                self._finish_stage(entry, operation)
            case RecordReuse():
                self._record_reuse(entry, operation)
            case FinishRun():
                run_id = self._whole_run(entry, operation.time)
                self._write(run_id, tags={"vantage.status": operation.outcome})
                self._note_is_stale = True
                self.write_run_note(entry)  # now: nothing may come after that would write it
                self._client.set_terminated(run_id, _RUN_STATUS[operation.outcome], operation.time)
            case CloseRun():
                for run in self._running(operation.run_id):
                    self._close(run, operation.reason, operation.time)
            case Publish():
                self._publish(entry, operation)

    # One operation each

    def _open_run(self, entry: RunEntry, operation: OpenRun) -> None:
        self._forget()
        run_id = self._whole_run(entry, operation.time)
        if entry.openings > 1:
            for run in self._running(self._run_id):
                if run.info.run_id != run_id:
                    self._close(run, "its process died; the run was taken over", operation.time)
            self._client.update_run(run_id, status="RUNNING")
        self._write(run_id, params=flatten(operation.recipe), tags={"vantage.status": "running"})

    def _open_stage(self, entry: RunEntry, operation: OpenStage) -> None:
        run_id = self._stage_run(entry, operation.stage, operation.time)
        tags = self._log_inputs(run_id, entry.stages[operation.stage])
        tags |= {"vantage.status": "running", "vantage.attempt": str(operation.attempt)}
        self._write_stage_note(entry, operation.stage, tags, params=flatten(operation.params))
        self._client.update_run(run_id, status="RUNNING")

    def _log_metrics(self, entry: RunEntry, operation: LogMetrics) -> None:
        run_id = self._stage_run(entry, operation.stage, min(time for _, _, time, _ in operation.rows))
        rows = [entities.Metric(name, value, time, step) for name, value, time, step in operation.rows]
        for some in _batches(rows, _METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=some)

    def _record_verdicts(self, entry: RunEntry, operation: RecordVerdicts) -> None:
        tags = {}
        if operation.verdicts:
            passed = all(verdict.passed for verdict in operation.verdicts)
            tags["vantage.verdict"] = "passed" if passed else "closed"
        for verdict in operation.verdicts:
            tags[f"vantage.gate.{verdict.metric}"] = str(verdict)
            tags[f"vantage.gate.{verdict.metric}.evidence"] = json.dumps(verdict.evidence, sort_keys=True)
        self._stage_run(entry, operation.stage, operation.time)
        self._write_stage_note(entry, operation.stage, tags)

    def _finish_stage(self, entry: RunEntry, operation: FinishStage) -> None:
        run_id = self._stage_run(entry, operation.stage, operation.time)
        tags: dict[str, str] = {"vantage.status": operation.outcome}
        tags |= {f"vantage.provenance.{part}": value for part, value in operation.provenance.items()}
        if operation.artifact is not None:
            self._record_artifact(entry, operation.stage, operation.artifact, operation.time)
        self._write_stage_note(entry, operation.stage, tags)
        self._client.set_terminated(run_id, _STAGE_STATUS[operation.outcome], operation.time)

    def _record_reuse(self, entry: RunEntry, operation: RecordReuse) -> None:
        stage, digest = operation.stage, operation.artifact.digest
        run_id = self._stage_run(entry, stage, operation.time)
        tags = self._log_inputs(run_id, entry.stages[stage])
        outcome = entry.stages[stage].outcome
        maker = self._maker(digest)
        if outcome == "reused" and maker is not None and maker.run.info.run_id != run_id:
            tags |= {"vantage.reused_from": maker.run.info.run_id, "vantage.digest": digest}
        else:
            # Our own earlier attempt made it, or someone whom this server never heard of: here it is recorded.
            self._record_artifact(entry, stage, operation.artifact, operation.time)
        tags["vantage.status"] = outcome
        self._write_stage_note(entry, stage, tags, params=flatten(operation.params))
        self._client.set_terminated(run_id, "FINISHED", operation.time)

    def _publish(self, entry: RunEntry, operation: Publish) -> None:
        digest, name = operation.artifact.digest, operation.registered_model
        maker = self._maker(digest)
        if maker is None or maker.model_id is None:
            raise PublishingError(f"stage {operation.stage!r}: no run of this server made {digest}")
        self._create_registered_model(name)
        found = self._client.search_model_versions(f"name = '{name}' AND tags.`vantage.digest` = '{digest}'")
        if found:
            version = min(int(each.version) for each in found)
        else:
            version = self._create_version(entry, operation, maker)
        if operation.alias is not None:
            self._client.set_registered_model_alias(name, operation.alias, str(version))
        alias = f"@{operation.alias}" if operation.alias else ""
        published = {"vantage.published": f"{name}{alias} version {version}"}
        self._write(self._stage_run(entry, operation.stage, operation.time), tags=published)
        self.versions[name, digest] = str(version)

    # Parts of them

    def _whole_run(self, entry: RunEntry, time: int) -> str:
        """MLflow's id of the run above all stages, made if there is none."""
        return self.run_ids.get(None) or self._create_run(None, time, {"vantage.recipe": entry.name})

    def _stage_run(self, entry: RunEntry, stage: str, time: int) -> str:
        """MLflow's id of the stage's run, made if there is none."""
        if stage in self.run_ids:
            return self.run_ids[stage]
        tags = {"vantage.stage": stage, "mlflow.parentRunId": self._whole_run(entry, time)}
        return self._create_run(stage, time, tags)

    def _create_run(self, stage: str | None, time: int, tags: dict[str, str]) -> str:
        tags = {
            "vantage.run_id": self._run_id,
            "mlflow.source.name": "vantage",
            "mlflow.source.type": "LOCAL",
            **tags,
        }
        run = self._client.create_run(
            self._experiment.experiment_id, start_time=time, tags=tags, run_name=stage or self._run_id
        )
        self._run_ids = {**self.run_ids, stage: run.info.run_id}
        return str(run.info.run_id)

    def _log_inputs(self, run_id: str, stage: StageEntry) -> dict[str, str]:
        """Datasets and models that the stage reads; returns the tags that say what it is and what it is made of."""
        tags = {"vantage.kind": stage.kind, "vantage.stage_key": stage.stage_key}
        datasets, models = [], []
        for role, given in stage.inputs.items():
            tags[f"vantage.parent.{role}"] = given.artifact.digest
            maker = self._maker(given.artifact.digest)
            if maker is not None:
                tags[f"vantage.parent.{role}.run"] = maker.run.info.run_id
                if maker.model_id is not None:
                    models.append(entities.LoggedModelInput(maker.model_id))
            if isinstance(given.artifact, Dataset):
                datasets.append(_dataset_input(role, given, stage.kind))
        if datasets or models:
            self._client.log_inputs(run_id, datasets, models)
        return tags

    def _record_artifact(self, entry: RunEntry, stage: str, artifact: Artifact, time: int) -> None:
        """What the stage made: tags, headline metrics, and a logged model with its parents."""
        run_id = self.run_ids[stage]
        tags = {"vantage.digest": artifact.digest, "vantage.uri": artifact.uri}
        if tokenizer := getattr(artifact, "tokenizer_digest", None):
            tags["vantage.tokenizer_digest"] = tokenizer
        model_id = None
        if artifact.kind in MODELS:
            model_id = self._logged_model(entry, stage, artifact)
            tags["vantage.model"] = model_id
        # A headline metric is of the kept weights: it stands one step after the curve of its name, where there is one.
        last_steps = {name: step for (of, name), step in entry.last_steps.items() if of == stage}
        metrics = [
            entities.Metric(name, value, time, last_steps.get(name, -1) + 1, model_id=model_id)
            for name, value in artifact.metrics.items()
            if value is not None
        ]
        self._write(run_id, tags=tags)
        for some in _batches(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=some)
        self._makers[artifact.digest] = Maker(self._client.get_run(run_id), model_id)

    def _logged_model(self, entry: RunEntry, stage: str, artifact: Artifact) -> str:
        """MLflow's id of the artifact's logged model, whose files stay in our store."""
        run_id = self.run_ids[stage]
        inputs = entry.stages[stage].inputs
        found = self._client.search_logged_models(
            [self._experiment.experiment_id],
            filter_string=f"source_run_id = '{run_id}' AND tags.`vantage.digest` = '{artifact.digest}'",
        )
        if found:
            model = found[0]
        else:
            tags = {
                "vantage.digest": artifact.digest,
                "vantage.stage_key": artifact.stage_key,
                "vantage.stage": stage,
                "vantage.run_id": self._run_id,
                _EXTERNAL: "true",
                **{f"vantage.parent.{role}": digest for role, digest in artifact.parents.items()},
            }
            parents = {
                f"parent.{role}": f"{given.stage} {given.artifact.digest[:12]}"
                for role, given in inputs.items()
            }
            model = self._client.create_logged_model(
                self._experiment.experiment_id,
                name=_model_name(stage),
                source_run_id=run_id,
                tags=tags,
                params=parents,
                model_type=artifact.kind,
            )
        note = artifact_note(entry.stages[stage], self.page(stage) or "", self._links(entry))
        self._client.set_logged_model_tags(model.model_id, {_NOTE: _cut_lines(note, _TAG_LENGTH)})
        self._client.finalize_logged_model(model.model_id, "READY")
        outputs = self._client.get_run(run_id).outputs
        if outputs is None or model.model_id not in {output.model_id for output in outputs.model_outputs}:
            self._client.log_outputs(run_id, [entities.LoggedModelOutput(model.model_id, step=0)])
        return str(model.model_id)

    def _create_version(self, entry: RunEntry, operation: Publish, maker: Maker) -> int:
        """Copy the files, then make the version; a kill in between leaves files, which are then written again."""
        assert maker.model_id is not None
        run_id, artifact = maker.run.info.run_id, operation.artifact
        tags = {
            "vantage.digest": artifact.digest,
            "vantage.stage_key": artifact.stage_key,
            "vantage.stage": maker.run.data.tags.get("vantage.stage", operation.stage),
            "vantage.run_id": maker.run.data.tags.get("vantage.run_id", self._run_id),
        }
        with tempfile.TemporaryDirectory(prefix="vantage-publish-") as temporary:
            description = Path(temporary) / "description"
            write_description(
                Path(operation.folder),
                description,
                kind=artifact.kind,
                run_id=run_id,
                model_id=maker.model_id,
                metadata=tags,
            )
            self._client.log_model_artifacts(maker.model_id, operation.folder, WEIGHTS)
            self._client.log_model_artifacts(maker.model_id, str(description))
        model = self._client.get_logged_model(maker.model_id)
        if _EXTERNAL in model.tags:
            self._client.delete_logged_model_tag(maker.model_id, _EXTERNAL)
        stage = entry.stages.get(operation.stage)
        version = self._client.create_model_version(
            operation.registered_model,
            model.artifact_location,
            run_id,
            tags=tags,
            description=artifact_note(stage, self._maker_link(maker).run or "", self._links(entry))
            if stage
            else None,
            model_id=maker.model_id,
        )
        known = json.loads(model.tags.get(_VERSIONS, "[]"))
        this = {"name": operation.registered_model, "version": int(version.version)}
        self._client.set_logged_model_tags(maker.model_id, {_VERSIONS: json.dumps([*known, this])})
        return int(version.version)

    def _create_registered_model(self, name: str) -> None:
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _running(self, our_run_id: str) -> list[entities.Run]:
        runs = self._search(self._experiments, "vantage.run_id", our_run_id)
        return [run for run in runs if run.info.status == "RUNNING"]

    def _close(self, run: entities.Run, reason: str, time: int) -> None:
        self._client.set_tag(run.info.run_id, "vantage.interrupted", reason)
        self._client.set_terminated(run.info.run_id, "KILLED", time)

    def _write(
        self, run_id: str, *, params: Mapping[str, str] | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        """Params and tags in as few calls as MLflow's limits allow."""
        all_params = [entities.Param(name, _fit_param(value)) for name, value in (params or {}).items()]
        all_tags = [
            entities.RunTag(name, _cut_lines(value, _TAG_LENGTH)) for name, value in (tags or {}).items()
        ]
        while all_params or all_tags:
            some_params, all_params = (
                all_params[:_PARAMS_AND_TAGS_AT_ONCE],
                all_params[_PARAMS_AND_TAGS_AT_ONCE:],
            )
            some_tags, all_tags = all_tags[:_PARAMS_AND_TAGS_AT_ONCE], all_tags[_PARAMS_AND_TAGS_AT_ONCE:]
            self._client.log_batch(run_id, params=some_params, tags=some_tags)

    def _write_stage_note(
        self, entry: RunEntry, stage: str, tags: Mapping[str, str], *, params: Mapping[str, str] | None = None
    ) -> None:
        note = stage_note(entry, stage, self.page(None) or "", self._links(entry))
        self._write(self.run_ids[stage], params=params, tags={**tags, _NOTE: note})

    # Looking things up

    def _maker(self, digest: str) -> Maker | None:
        """The earliest run that made the artifact; this run's own, where it did."""
        if digest not in self._makers:
            made = [
                run
                for run in self._search(self._experiments, "vantage.digest", digest)
                if "vantage.reused_from" not in run.data.tags
            ]
            if not made:
                return None
            run = next((run for run in made if run.data.tags.get("vantage.run_id") == self._run_id), made[0])
            self._makers[digest] = Maker(run, run.data.tags.get("vantage.model"))
        return self._makers[digest]

    def _links(self, entry: RunEntry) -> dict[str, Link]:
        """Content digest → where its maker stands, for every artifact that the run knows of."""
        digests = {
            given.artifact.digest for stage in entry.stages.values() for given in stage.inputs.values()
        }
        digests |= {stage.artifact.digest for stage in entry.stages.values() if stage.artifact}
        return {digest: self._maker_link(maker) for digest in digests if (maker := self._maker(digest))}

    def _maker_link(self, maker: Maker) -> Link:
        experiment_id, tags = maker.run.info.experiment_id, maker.run.data.tags
        return Link(
            run=self._run_page(experiment_id, maker.run.info.run_id),
            run_name=f"{tags.get('vantage.stage')} of run {tags.get('vantage.run_id')}",
            model=f"#/experiments/{experiment_id}/models/{maker.model_id}" if maker.model_id else None,
        )

    def _run_page(self, experiment_id: str, run_id: str) -> str:
        return f"#/experiments/{experiment_id}/runs/{run_id}"

    def _search(self, experiments: Sequence[str], tag: str, value: str) -> Iterator[entities.Run]:
        """Every run with the tag, the earliest first."""
        token = None
        while True:
            runs = self._client.search_runs(
                list(experiments),
                filter_string=f"tags.`{tag}` = '{value}'",
                max_results=500,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
            yield from runs
            token = runs.token
            if not token:
                return

    def _forget(self) -> None:
        self._experiments = self._server.experiment_ids()
        self._run_ids = None
        self._makers.clear()


@contextmanager
def _making(database: Path | None) -> Iterator[None]:
    """One process at a time looks whether the database is there, and makes it or brings it up to date."""
    if database is None:
        yield
        return
    make_folder(database.parent)
    with locked(database.with_name(f"{database.name}.lock")):
        yield


def _dataset_input(role: str, given: Input, kind: str) -> entities.DatasetInput:
    """A dataset with our own digest: MLflow keeps 36 characters of it, the tag keeps all."""
    artifact = given.artifact
    context = "evaluation" if kind == "evaluation" else "training"
    tags = {"mlflow.data.context": context, "vantage.role": role, "vantage.digest": artifact.digest}
    return entities.DatasetInput(
        entities.Dataset(
            name=given.stage.removeprefix("data."),
            digest=artifact.digest[:_DATASET_DIGEST_LENGTH],
            source_type="vantage",
            source=json.dumps({"uri": artifact.uri, "sha256": artifact.digest}),
            profile=json.dumps(artifact.metrics),
        ),
        [entities.InputTag(name, value[:_INPUT_TAG_LENGTH]) for name, value in tags.items()],
    )


def _sqlite_file(tracking_uri: str) -> Path | None:
    """The database's file; None for a server."""
    parts = urlsplit(tracking_uri)
    return Path(unquote(parts.path)[1:]) if parts.scheme.startswith("sqlite") else None


def _is_refusal(error: Exception) -> bool:
    """Whether trying again is no use; what is neither MLflow's nor the network's error is our own."""
    if isinstance(error, MlflowException):
        return error.error_code in _REFUSALS
    return not isinstance(error, OSError)


def _fit_param(value: str) -> str:
    """A param's value, or as much of it as MLflow takes and the sha256 of the whole."""
    if len(value) <= _PARAM_LENGTH:
        return value
    whole = f"… sha256 {hashlib.sha256(value.encode()).hexdigest()}"
    return value[: _PARAM_LENGTH - len(whole)] + whole


def _cut_lines(text: str, length: int) -> str:
    """Whole lines of a text that is too long."""
    if len(text) <= length:
        return text
    end = "\n…"
    return text[: length - len(end)].rpartition("\n")[0][:length] + end


def _model_name(stage: str) -> str:
    """MLflow allows no dots, slashes, colons, percents or quotes in the name of a logged model."""
    return "".join(letter if letter.isalnum() or letter in "_-" else "-" for letter in stage)


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = list(items)
    while rest:
        yield rest[:size]
        rest = rest[size:]
