"""The ledger of one run: record what happens in MLflow, without blocking the run.

Each call writes one operation to the run's outbox and returns; the sender sends the outbox, in order.
"""

import logging
import os
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vantage.ledger import journal, tracking
from vantage.ledger.conclusions import conclusion_of
from vantage.ledger.destinations.delivery import Destinations
from vantage.ledger.entries import RunEntry, apply_operation, new_rows
from vantage.ledger.operations import (
    CloseRun,
    FinishRun,
    FinishStage,
    Input,
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
    RunOutcome,
    StageOutcome,
    from_json,
    to_json,
)
from vantage.ledger.outbox import Outbox
from vantage.ledger.sender import Sender
from vantage.ledger.steady_clock import SteadyClock
from vantage.ledger.to_mlflow.model_description import PUBLISHABLE, PublishingError
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.facts import Facts
from vantage.schemas.records.loosened_gates import LoosenedGate
from vantage.schemas.records.usage import Usage
from vantage.schemas.records.verdicts import Verdict

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopyStatus:
    """MLflow's copy of a published artifact."""

    location: str | None
    """Address of the copy; None: there is none."""
    repaired: tuple[str, ...]
    """Problems of an existing copy, which was replaced from the store."""
    refused: str | None
    """Reason why the artifact was not published, or its copy could not be replaced."""
    alias_stays: str | None = None
    """Reason why the alias did not move although the artifact was published with one."""


class Ledger:
    """The record of one run. Creating it is cheap: it uses neither MLflow nor the network."""

    def __init__(self, tracking_uri: str | None, workspace: Path, experiment: str) -> None:
        """Open the ledger; ``tracking_uri`` None means ``MLFLOW_TRACKING_URI``, or else SQLite in the workspace."""
        self.workspace = workspace.absolute()
        self.tracking_uri = tracking.address(tracking_uri, workspace)
        self.experiment = experiment
        self._sender = Sender(self.tracking_uri, self.workspace)
        self._destinations = Destinations(self.workspace)
        self._outbox: Outbox | None = None
        self._entry: RunEntry | None = None
        self._clock = SteadyClock()
        self._recording = threading.RLock()
        self.unwritten = ""
        """After ``close``, the reason why the last records are not even on the disk; empty: they are."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What happened

    def open_run(
        self, run_id: str, name: str, recipe: Mapping[str, Any], *, origin: Mapping[str, str] | None = None
    ) -> None:
        """Record that a run starts or resumes; when it resumes, MLflow runs left RUNNING by a dead process are closed.

        ``origin``: tag → value, for the user and the version of the code.
        """
        self._read_outbox(run_id)
        self._record(
            OpenRun(
                time=self._clock.now(),
                run_id=run_id,
                experiment=self.experiment,
                name=name,
                recipe=dict(recipe),
                origin=dict(origin or {}),
            )
        )

    def attach(
        self, run_id: str, name: str, recipe: Mapping[str, Any], *, outcome: RunOutcome | None = None
    ) -> None:
        """Record more operations of a run that has ended: it is not opened again, and keeps its outcome in MLflow.

        ``outcome``: outcome of a run whose outbox is gone.
        """
        self._read_outbox(run_id)
        if self._entry is None:
            opening = OpenRun(
                time=self._clock.now(),
                run_id=run_id,
                experiment=self.experiment,
                name=name,
                recipe=dict(recipe),
            )
            self._record(opening)
            self.finish_run(outcome or "completed")

    def _read_outbox(self, run_id: str) -> None:
        """Open the run's outbox, and read the recorded operations."""
        self._outbox = Outbox(self.workspace / "runs" / run_id / "ledger")
        try:
            for _, line in self._outbox.read():
                operation = from_json(line)
                self._entry = apply_operation(self._entry, operation)
                self._clock.follow(getattr(operation, "time", 0))
        except ValueError as error:  # damaged, or written by another version
            self._entry = None
            aside = self._outbox.set_aside()
            log.warning("%s cannot be read and is begun anew (%s)", aside, str(error).splitlines()[0])

    def open_stage(
        self,
        stage: str,
        *,
        kind: str,
        stage_key: str,
        attempt: int,
        params: Mapping[str, Any],
        inputs: Mapping[str, Input],
        source_sha256: str | None = None,
    ) -> None:
        """Record that an attempt at a stage starts; later attempts use the same MLflow run.

        ``source_sha256``: digest of the source that an implicit step reads.
        """
        self._record(
            OpenStage(
                time=self._clock.now(),
                stage=stage,
                kind=kind,
                stage_key=stage_key,
                attempt=attempt,
                params=dict(params),
                inputs=dict(inputs),
                source_sha256=source_sha256,
            )
        )

    def send_metrics(self, stage: str, entries: Iterable[journal.Entry]) -> None:
        """Send the entries of the stage's journal, up to a committed checkpoint.

        The whole journal may be passed each time: recorded steps are skipped.
        """
        rows = [
            (name, value, round(entry.time * 1000), entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
        ]
        with self._recording:
            fresh = new_rows(self._entry, stage, rows) if self._entry else []
            if fresh:
                self._record(LogMetrics(stage=stage, rows=tuple(fresh)))

    def record_verdicts(
        self, stage: str, verdicts: Sequence[Verdict], *, loosened: Sequence[LoosenedGate] = ()
    ) -> None:
        """Record the verdicts of the stage's gates; they are on disk when this returns, before they are enforced."""
        self._record(
            RecordVerdicts(
                time=self._clock.now(), stage=stage, verdicts=tuple(verdicts), loosened=tuple(loosened)
            )
        )

    def finish_stage(
        self,
        stage: str,
        outcome: StageOutcome,
        *,
        artifact: Artifact | None = None,
        folder: Path | None = None,
        provenance: Mapping[str, str] | None = None,
        reason: str | None = None,
        energy: Energy | None = None,
        usage: Usage | None = None,
        facts: Facts | None = None,
    ) -> None:
        """Record that an attempt at a stage ends; ``folder`` has the files of the artifact."""
        self._record(
            FinishStage(
                time=self._clock.now(),
                stage=stage,
                outcome=outcome,
                artifact=artifact,
                provenance=dict(provenance or {}),
                reason=reason,
                folder=str(folder.absolute()) if folder else None,
                energy=energy,
                usage=usage,
                first_reading=self._readings(stage) if usage else 0,
                facts=facts or {},
            )
        )

    def _readings(self, stage: str) -> int:
        known = self._entry.stages.get(stage) if self._entry else None
        return known.readings if known else 0

    def record_reuse(
        self,
        stage: str,
        *,
        kind: str,
        stage_key: str,
        params: Mapping[str, Any],
        inputs: Mapping[str, Input],
        artifact: Artifact,
        folder: Path | None = None,
        source_sha256: str | None = None,
    ) -> None:
        """Record that a stage's artifact was in the store.

        If an earlier attempt of this run made it and died before it was recorded, that attempt becomes completed.
        """
        self._record(
            RecordReuse(
                time=self._clock.now(),
                stage=stage,
                kind=kind,
                stage_key=stage_key,
                params=dict(params),
                inputs=dict(inputs),
                artifact=artifact,
                folder=str(folder.absolute()) if folder else None,
                source_sha256=source_sha256,
            )
        )

    def record_approval(self, approval: Approval) -> None:
        """Record a person's answer to a question of the run; an answer that is recorded already changes nothing."""
        with self._recording:
            known = self._entry.approvals if self._entry else ()
            if approval not in known:
                self._record(RecordApproval(approval=approval))

    def finish_run(self, outcome: RunOutcome) -> None:
        """Record that the run ends; ``resumable``: it can be resumed."""
        with self._recording:
            conclusion = None if self._entry is None else conclusion_of(self._entry, outcome)
            self._record(FinishRun(time=self._clock.now(), outcome=outcome, conclusion=conclusion))

    def log_report(self, file: Path) -> None:
        """Record the report of the run: the file, as it is when it is sent, becomes an artifact of the run in
        MLflow."""
        self._record(LogReport(time=self._clock.now(), file=str(file.absolute())), can_wait=True)

    def log_bill(self, stage: str, file: Path) -> None:
        """Record the bill of materials of a stage's artifact: it becomes an artifact of the stage's run in MLflow."""
        self._record(LogBill(time=self._clock.now(), stage=stage, file=str(file.absolute())), can_wait=True)

    def close_stale(self, run_id: str, *, reason: str) -> None:
        """Record that the process of another run is dead: its MLflow runs that are still RUNNING are closed as KILLED."""
        self._record(CloseRun(time=self._clock.now(), run_id=run_id, reason=reason))

    def publish(
        self,
        stage: str,
        artifact: Artifact,
        folder: Path,
        registered_model: str,
        *,
        alias: str | None,
        by: str | None = None,
        newest: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> str | None:
        """Copy an artifact's files into MLflow as a version of a registered model, and wait for it.

        The same artifact never makes a second version. ``alias`` None moves no alias; ``by``: the login name of who
        publishes after the run's end. ``newest``: the order of the alias's last movement so far, if one is known. MLflow's
        copy is read and compared with the artifact's manifest, both after copying and if the version exists already.
        ``copy_status`` has the result.

        Returns:
            The version; None if MLflow did not answer (it is published later from the outbox) or refused it.

        Raises:
            PublishingError: the artifact is neither a policy nor a reward model.
        """
        if artifact.kind not in PUBLISHABLE:
            raise PublishingError(
                f"publish: stage {stage!r} makes a {artifact.kind}; "
                "only a policy or a reward model can be published"
            )
        time, after = self._time_after(newest)
        self._record(
            Publish(
                time=time,
                after=after,
                stage=stage,
                artifact=artifact,
                folder=str(folder.absolute()),
                registered_model=registered_model,
                alias=alias,
                by=by,
            )
        )
        self.flush(timeout_seconds)
        published = self._sender.published.get((registered_model, artifact.digest))
        return published.version if published else None

    def copy_status(self, registered_model: str, artifact: Artifact) -> CopyStatus:
        """Return the result of the last ``publish`` of the artifact under this name."""
        which = (registered_model, artifact.digest)
        published = self._sender.published.get(which)
        return CopyStatus(
            location=published.location if published else None,
            repaired=published.repaired if published else (),
            refused=self._sender.unpublished.get(which),
            alias_stays=published.alias_stays if published else None,
        )

    def move_alias(
        self,
        stage: str,
        digest: str,
        registered_model: str,
        alias: str,
        *,
        from_version: str,
        to_version: str,
        by: str,
        login: str,
        reason: str,
        newest: int | None = None,
    ) -> None:
        """Record that a person moves an alias to a version that this run has published; see ``MoveAlias``.

        ``newest``: the order of the alias's last movement so far, if one is known.
        """
        time, after = self._time_after(newest)
        self._record(
            MoveAlias(
                time=time,
                after=after,
                stage=stage,
                digest=digest,
                registered_model=registered_model,
                alias=alias,
                from_version=from_version,
                to_version=to_version,
                by=by,
                login=login,
                reason=reason,
            )
        )

    def _time_after(self, newest: int | None) -> tuple[int, int | None]:
        """Return the time, and the order of the last movement if its clock was ahead of this one, else None."""
        now = self._clock.now()
        return now, newest if newest is not None and newest >= now else None

    def why_not_moved(self, registered_model: str, alias: str) -> str | None:
        """Return why the last ``move_alias`` did not move the alias, once it was sent; None: it did."""
        return self._sender.moves.get((registered_model, alias))

    # Sending

    def warm_up(self) -> None:
        """Start importing MLflow and preparing its database in the background."""
        self._sender.warm_up()

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Send everything in the outboxes now, including those of earlier runs; returns whether that worked.

        Never raises: operations that could not be sent are sent by a later flush, of this run or of the next.
        """
        return self._sender.flush(timeout_seconds)

    def close(self, timeout_seconds: float = 60.0) -> bool:
        """Send operations that were not tried yet, and stop sending; returns whether MLflow has everything."""
        self._write_rest()
        has_everything = self._sender.close(timeout_seconds)
        self._destinations.close(timeout_seconds)
        return has_everything and not self.unwritten

    def _write_rest(self) -> None:
        """Write the last operations again if the disk refused them, since no later operation will do that."""
        if self._outbox is None:
            return
        try:
            left = self._outbox.write_rest()
        except OSError as error:
            self.unwritten = f"{self._outbox.folder} cannot be written ({error.strerror or error})"
            return
        for _ in range(left):
            self._sender.notify(self._outbox)
            self._destinations.notify(self._outbox)

    def why_unsent(self) -> str:
        """Return the address of the server and why it lacks records, after ``close`` has returned False."""
        return self._sender.why_unsent()

    @property
    def folder(self) -> Path:
        """The folder of the records, which wait there until they are sent."""
        return self.workspace if self._outbox is None else self._outbox.folder

    def mlflow_run_id(self, stage: str | None = None) -> str | None:
        """Return MLflow's id of a stage's run (``stage`` None: of the parent run); None: not sent yet."""
        return self._sender.run_ids.get(stage)

    def where(self, stage: str | None = None, *, artifact: str | None = None) -> str:
        """Return the address of the run's page, or the command that shows the workspace's own database.

        ``artifact``: a file among the run's artifacts to show instead of the run's overview.
        """
        shown = tracking.without_password(self.tracking_uri)
        if not self.tracking_uri.startswith("http"):
            # A login is not printed: the shell inserts the address from its variable.
            is_variable = (
                self.tracking_uri == os.environ.get("MLFLOW_TRACKING_URI") and shown != self.tracking_uri
            )
            store = '"$MLFLOW_TRACKING_URI"' if is_variable else shlex.quote(shown)
            return f"mlflow server --host 127.0.0.1 --backend-store-uri {store}"
        page = self._sender.pages.get(stage)
        of = f"/artifacts/{artifact}" if artifact else ""
        # Without the parameter, MLflow opens its menu for chats and traces, which has none of our runs.
        path = f"{page}{of}?workflowType=machine_learning" if page else ""
        return f"{shown.rstrip('/')}/{path}"

    def where_all(self) -> str | None:
        """Return the address of the list of the recipe's runs on a server; None without a server, or if nothing was sent."""
        page = self._sender.page_of_runs
        if page is None or not self.tracking_uri.startswith("http"):
            return None
        return f"{tracking.without_password(self.tracking_uri).rstrip('/')}/{page}"

    def model_page(self, registered_model: str) -> str:
        """Return the address of a registered model's page on a server."""
        return f"{tracking.without_password(self.tracking_uri).rstrip('/')}/#/models/{registered_model}?workflowType=machine_learning"

    def _record(self, operation: Operation, *, can_wait: bool = False) -> None:
        """Write an operation to disk and notify the sender. A full disk gives a warning, and does not stop the run."""
        with self._recording:
            if self._outbox is None:
                raise RuntimeError(f"{operation.operation} before open_run")
            self._entry = apply_operation(self._entry, operation)
            try:
                self._outbox.append(to_json(operation))
            except OSError as error:
                log.warning("the ledger's outbox %s cannot be written (%s)", self._outbox.folder, error)
                return
            self._sender.notify(self._outbox, can_wait=can_wait)
            self._destinations.notify(self._outbox)
