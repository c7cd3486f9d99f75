"""The Prefect flow that a worker runs: one attempt at a stage, as plain JSON.

The attempt writes its messages to the storage (``vantage.storage.messages``): the run that asked for it may have died, and
another run may be waiting for the same artifact.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import Field, WithJsonSchema

from vantage.attempts.launchers.local_process import warm_up
from vantage.attempts.launchers.stage_process import explain
from vantage.attempts.run_attempt import Unobserved, run_attempt
from vantage.attempts.stopping import stopping
from vantage.flows.pools.share import share_of_this_machine
from vantage.flows.prefect_server.flow_runs import state_of, status_of_attempt
from vantage.flows.prefect_server.outages import errors_of_logging_are_quiet
from vantage.runs.shown_warnings import warnings_shown
from vantage.schemas.records.attempt import AttemptBegun, AttemptOutcome, AttemptRequest
from vantage.storage.key_locks import Locked
from vantage.storage.messages import Messages, messages_of
from vantage.storage.storage import Storage, open_storage
from vantage.tasks.training.watched import ask_to_finish

BEAT_SECONDS = 5.0
LOG_BYTES = 2**20
"""Bytes of a log that is sent with every heartbeat; a log of twice this size is sent with every second heartbeat."""

# A number beyond 64 bits in a form of Prefect breaks its pages for everyone.
_Number = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Request = Annotated[str | dict[str, Any], WithJsonSchema({"type": "string"})]


@flow(name="vantage-attempt", flow_run_name="{name}", persist_result=False)
async def attempt(request: _Request, number: _Number, name: str) -> State[None]:
    """Make one attempt at a stage of a run.

    Args:
        request: an ``AttemptRequest`` as JSON. Earlier versions sent it as an object, whose numbers a database may change.
        number: of the request, among those for its stage key.
        name: shown in Prefect: run, stage and number.
    """
    errors_of_logging_are_quiet()
    stop = threading.Event()
    with stopping(stop.set), warnings_shown(lambda text: print(f"vantage: warning: {text}", flush=True)):
        outcome = await asyncio.to_thread(_make, _read(request), number, stop)
    return state_of(*status_of_attempt(outcome))


def _read(request: str | dict[str, Any]) -> AttemptRequest:
    if isinstance(request, str):
        return AttemptRequest.model_validate_json(request)
    return AttemptRequest.model_validate(request)


def _make(request: AttemptRequest, number: int, stop: threading.Event) -> AttemptOutcome:
    """Make the attempt, and write its progress to the storage."""
    warm_up()
    storage = open_storage(request.storage)
    messages = messages_of(storage.remote, request.stage_key, number)
    with tempfile.TemporaryDirectory(prefix="vantage-attempt-") as folder:
        log = Path(folder) / "log.txt"
        scratch = storage.scratch_folder(request.stage_key)
        with _Reporter(messages, log, stop, scratch=scratch, run_id=request.run_id):
            try:
                with share_of_this_machine(request.resources, stop=stop) as share:
                    outcome = run_attempt(
                        request.model_copy(update={"log": log, "share": share}),
                        observer=_Observer(messages),
                        stop=stop,
                        storage=storage,
                    )
            except ValueError as error:  # the attempt asks for more than this machine has
                outcome = AttemptOutcome(status="failed", failure=explain(error))
    if outcome.artifact is not None:
        _make_room(storage, request)
    messages.create("outcome.json", outcome.model_dump_json().encode())
    return outcome


def _make_room(storage: Storage, request: AttemptRequest) -> None:
    """Remove the checkpoints of a committed artifact from this machine; the run reads the journal in the bucket.

    Called before the run knows the outcome, since the run needs the key itself then.
    """
    with (
        _network_faults_ignored(),
        suppress(Locked),
        storage.exclusive(request.stage_key, holder=f"run {request.run_id}", timeout=0.0),
    ):
        storage.discard_local_scratch(request.stage_key)


class _Observer(Unobserved):
    """Write to the storage that the computation begins."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def begun(self, begun: AttemptBegun) -> None:
        self._messages.write("begun.json", begun.model_dump_json().encode())


class _Reporter:
    """A thread that writes heartbeats and the attempt's output to the storage every few seconds, and reads requests to
    stop or finish."""

    def __init__(
        self, messages: Messages, log: Path, stop: threading.Event, *, scratch: Path, run_id: str
    ) -> None:
        self._messages = messages
        self._scratch, self._run_id = scratch, run_id
        self._log = log
        self._stop = stop
        self._sent = 0
        self._send_at = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._send_log()

    def _run(self) -> None:
        beat = 0
        while True:
            beat += 1
            with _network_faults_ignored():
                self._messages.write("beat", str(beat).encode())
                if time.monotonic() >= self._send_at:
                    self._send_log()
                    # The whole log is sent, so a longer one is sent less often
                    self._send_at = time.monotonic() + BEAT_SECONDS * self._sent / LOG_BYTES
                if self._messages.read("stop") is not None:
                    self._stop.set()
                if (reason := self._messages.read("finish")) is not None:
                    ask_to_finish(self._scratch, run_id=self._run_id, reason=reason.decode(errors="replace"))
            if self._done.wait(BEAT_SECONDS):
                return

    def _send_log(self) -> None:
        with suppress(FileNotFoundError):
            size = self._log.stat().st_size
            if size != self._sent:
                with _network_faults_ignored():
                    self._messages.write("log.txt", self._log.read_bytes())
                    self._sent = size


@contextmanager
def _network_faults_ignored() -> Iterator[None]:
    """Ignore faults of the network: a bucket that does not answer costs a report or room on the disk, not the computation."""
    from obstore.exceptions import BaseError

    with suppress(BaseError, OSError):
        yield
