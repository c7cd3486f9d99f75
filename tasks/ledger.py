"""The ledger: what happened in a run, recorded in MLflow without ever holding the run up.

Each call writes one operation to the run's outbox and returns; a background thread connects to MLflow and sends
what waits, in order. A server that is down, slow, or that answers into a cut wire therefore costs nothing but
lateness.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from schemas.artifacts import Artifact
from schemas.verdicts import Verdict
from tasks import journal
from tasks.ledger_entries import (
    CloseRun,
    FinishRun,
    FinishStage,
    Input,
    LogMetrics,
    OpenRun,
    OpenStage,
    Operation,
    Publish,
    RecordReuse,
    RecordVerdicts,
    RunEntry,
    RunOutcome,
    StageOutcome,
    after,
    from_json,
    new_rows,
    to_json,
)
from tasks.outbox import Outbox
from tasks.publishing import PUBLISHABLE, PublishingError

if TYPE_CHECKING:
    from tasks.ledger_mlflow import Sending, Server

log = logging.getLogger(__name__)

MLFLOW_ENVIRONMENT = {
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_ALLOW_MODEL_CODE_EXECUTION": "false",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # A dead server is given up after seconds, not minutes: the outbox waits better than a socket does.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Settings for MLflow, client and server, wherever Vantage starts one; what the user has set wins."""

RETRY_SECONDS = 15.0
"""How long a server that did not answer is left alone, unless somebody asks for a flush."""


class Ledger:
    """The record of one run. Making one is cheap and touches neither MLflow nor the network."""

    def __init__(self, tracking_uri: str | None, workspace: Path, experiment: str) -> None:
        """``tracking_uri`` None: ``MLFLOW_TRACKING_URI``, or else SQLite in the workspace."""
        self.workspace = workspace.absolute()
        self.tracking_uri = (
            tracking_uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{self.workspace / 'mlflow.db'}"
        )
        self.experiment = experiment
        self._outbox: Outbox | None = None
        self._entry: RunEntry | None = None
        self._server: Server | None = None
        self._sending: Sending | None = None
        self._run_ids: dict[str | None, str] = {}
        self._pages: dict[str | None, str | None] = {}
        self._versions: dict[tuple[str, str], str] = {}
        self._thread: threading.Thread | None = None
        # All below is guarded by this condition. Told and sent count operations, asked and tried count flushes.
        self._changed = threading.Condition(threading.RLock())
        self._told = self._sent = 0
        self._asked = self._tried = 0
        self._given_up_at = -1  # of told, at the last attempt that failed
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What happened

    def open_run(self, run_id: str, name: str, recipe: Mapping[str, Any]) -> None:
        """A run starts, or is taken over: then what a dead process left RUNNING in it is closed."""
        self._outbox = Outbox(self.workspace / "runs" / run_id / "ledger")
        try:
            for _, line in self._outbox.read():
                self._entry = after(self._entry, from_json(line))
        except ValueError as error:  # damaged, or written by another version
            self._entry = None
            aside = self._outbox.set_aside()
            log.warning("%s cannot be read and is begun anew (%s)", aside, str(error).splitlines()[0])
        self._tell(
            OpenRun(time=_now(), run_id=run_id, experiment=self.experiment, name=name, recipe=dict(recipe))
        )

    def open_stage(
        self,
        stage: str,
        *,
        kind: str,
        stage_key: str,
        attempt: int,
        params: Mapping[str, Any],
        inputs: Mapping[str, Input],
    ) -> None:
        """An attempt at a stage starts; a later attempt goes on in the same MLflow run."""
        self._tell(
            OpenStage(
                time=_now(),
                stage=stage,
                kind=kind,
                stage_key=stage_key,
                attempt=attempt,
                params=dict(params),
                inputs=dict(inputs),
            )
        )

    def send_metrics(self, stage: str, entries: Iterable[journal.Entry]) -> None:
        """Entries of the stage's journal, up to a committed checkpoint.

        The whole journal may be passed each time: what was told before is left out.
        """
        rows = [
            (name, value, round(entry.time * 1000), entry.step)
            for entry in entries
            for name, value in entry.metrics.items()
        ]
        with self._changed:
            fresh = new_rows(self._entry, stage, rows) if self._entry else []
            if fresh:
                self._tell(LogMetrics(stage=stage, rows=tuple(fresh)))

    def record_verdicts(self, stage: str, verdicts: Sequence[Verdict]) -> None:
        """What the stage's gates said; on disk when this returns, so it can be enforced after."""
        self._tell(RecordVerdicts(time=_now(), stage=stage, verdicts=tuple(verdicts)))

    def finish_stage(
        self,
        stage: str,
        outcome: StageOutcome,
        *,
        artifact: Artifact | None = None,
        provenance: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        """An attempt at a stage ends; headline metrics are those of the artifact."""
        self._tell(
            FinishStage(
                time=_now(),
                stage=stage,
                outcome=outcome,
                artifact=artifact,
                provenance=dict(provenance or {}),
                reason=reason,
            )
        )

    def record_reuse(
        self,
        stage: str,
        *,
        kind: str,
        stage_key: str,
        params: Mapping[str, Any],
        inputs: Mapping[str, Input],
        artifact: Artifact,
    ) -> None:
        """A stage's artifact was there already.

        Where this run's own earlier attempt made it, and died before it could say so, that attempt is completed.
        """
        self._tell(
            RecordReuse(
                time=_now(),
                stage=stage,
                kind=kind,
                stage_key=stage_key,
                params=dict(params),
                inputs=dict(inputs),
                artifact=artifact,
            )
        )

    def finish_run(self, outcome: RunOutcome) -> None:
        """The run ends, for now (``resumable``) or for good."""
        self._tell(FinishRun(time=_now(), outcome=outcome))

    def close_stale(self, run_id: str, *, reason: str) -> None:
        """Another run's process is dead: whatever it left RUNNING in MLflow is closed as KILLED."""
        self._tell(CloseRun(time=_now(), run_id=run_id, reason=reason))

    def publish(
        self,
        stage: str,
        artifact: Artifact,
        folder: Path,
        registered_model: str,
        *,
        alias: str | None,
        timeout_seconds: float = 600.0,
    ) -> str | None:
        """Copy an artifact's files into MLflow as a version of a registered model, and wait for it.

        The same artifact never makes a second version. ``alias`` None moves no alias.

        Returns:
            The version; None where MLflow did not answer, and the outbox will publish later.

        Raises:
            PublishingError: the artifact is neither a policy nor a reward model.
        """
        if artifact.kind not in PUBLISHABLE:
            raise PublishingError(
                f"publish: stage {stage!r} makes a {artifact.kind}; "
                "only a policy or a reward model can be published"
            )
        self._tell(
            Publish(
                time=_now(),
                stage=stage,
                artifact=artifact,
                folder=str(folder.absolute()),
                registered_model=registered_model,
                alias=alias,
            )
        )
        self.flush(timeout_seconds)
        return self._versions.get((registered_model, artifact.digest))

    # The sending of it

    def warm_up(self) -> None:
        """Begin to import MLflow and to make its database ready, beside whatever else is going on."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._send_forever, name="vantage-ledger", daemon=True)
                self._thread.start()

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Try now to send everything that waits, earlier runs' records included; whether that worked.

        Never raises: what could not be sent is sent by a later flush, of this run or of the next.
        """
        self.warm_up()
        with self._changed:
            self._asked += 1
            wanted = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._tried >= wanted or self._closed, timeout_seconds)
            return self._tried >= wanted and self._sent == self._told and self._server is not None

    def close(self, timeout_seconds: float = 60.0) -> bool:
        """Send what was not tried yet and let the background thread end; whether MLflow has everything."""
        with self._changed:
            tried = self._told in (self._sent, self._given_up_at)
        everything = self._told == self._sent if tried else self.flush(timeout_seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return everything

    def mlflow_run_id(self, stage: str | None = None) -> str | None:
        """MLflow's id of a stage's run (None: of the whole run); None while MLflow has not heard of it."""
        return self._run_ids.get(stage)

    def where(self, stage: str | None = None) -> str:
        """Where a person looks: an address, or the command that shows the workspace's own database."""
        if not self.tracking_uri.startswith("http"):
            return f"mlflow server --host 127.0.0.1 --backend-store-uri {self.tracking_uri}"
        page = self._pages.get(stage)
        # Without the kind of work MLflow's menu is that of chats and traces, where nothing of ours is.
        path = f"{page}?workflowType=machine_learning" if page else ""
        return f"{without_password(self.tracking_uri).rstrip('/')}/{path}"

    def _tell(self, operation: Operation) -> None:
        """Operation → disk → sender. A full disk costs a warning and the record, never the run."""
        with self._changed:
            if self._outbox is None:
                raise RuntimeError(f"{operation.operation} before open_run")
            self._entry = after(self._entry, operation)
            try:
                self._outbox.append(to_json(operation))
            except OSError as error:
                log.warning("the ledger's outbox %s cannot be written (%s)", self._outbox.folder, error)
                return
            self._told += 1
            self.warm_up()
            self._changed.notify_all()

    def _send_forever(self) -> None:
        """The sender thread: connect, then send whatever waits whenever something waits."""
        os.environ.update(
            {name: value for name, value in MLFLOW_ENVIRONMENT.items() if name not in os.environ}
        )
        # MLflow's client sends a request again when the answer was lost, and would make a run twice. We look first.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        retry_at = 0.0
        warned = False
        while True:
            with self._changed:
                while not self._closed and not self._has_work(retry_at):
                    self._changed.wait(max(retry_at - time.monotonic(), 0.0) or None)
                if self._closed:
                    return
                told, asked = self._told, self._asked
            error = self._try_to_send()
            with self._changed:
                self._tried = asked
                if error is None:
                    self._sent = told
                else:
                    self._given_up_at = told
                self._changed.notify_all()
            retry_at = 0.0 if error is None else time.monotonic() + RETRY_SECONDS
            if error is not None and not warned:
                log.warning(
                    "MLflow (%s) cannot be reached; the run goes on, and its records wait in %s: %s",
                    without_password(self.tracking_uri),
                    self._outbox.folder if self._outbox else self.workspace,
                    _without_login(str(error).splitlines()[0], self.tracking_uri),
                )
            warned = error is not None

    def _has_work(self, retry_at: float) -> bool:
        if self._asked > self._tried:
            return True
        return (self._sent < self._told or self._server is None) and time.monotonic() >= retry_at

    def _try_to_send(self) -> Exception | None:
        """Everything that waits → MLflow; the error that stopped it."""
        try:
            from tasks.ledger_mlflow import Sending, Server, send_others

            if self._server is None:
                server = Server(self.tracking_uri, artifacts=self.workspace / "mlartifacts")
                send_others(server, self.workspace / "runs", but=self._outbox)
                self._server = server
            if self._sending is None and self._outbox is not None:
                self._sending = Sending(self._server, self._outbox)
            if self._sending is not None:
                self._sending.send()
                self._read_back(self._sending)
        except Exception as error:  # whatever it is, it is no reason to stop a run
            return error
        return None

    def _read_back(self, sending: "Sending") -> None:
        """What MLflow calls our things, so that nobody has to wait for a server to be told."""
        book = sending.book
        if book is not None:
            self._run_ids = dict(book.run_ids)
            self._pages = {stage: book.page(stage) for stage in self._run_ids}
            self._versions = dict(book.versions)


def without_password(tracking_uri: str) -> str:
    """The address as it may be shown and written down."""
    return _without_login(tracking_uri, tracking_uri)


def _without_login(text: str, tracking_uri: str) -> str:
    """The text without the name and password that the address holds."""
    login, at, _ = urlsplit(tracking_uri).netloc.rpartition("@")
    return text.replace(login + at, "") if at else text


def _now() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
