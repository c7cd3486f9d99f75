"""Make one attempt on a worker of a Prefect work pool; this module runs in the process of the run that asks for the
attempt.

The requests for a stage key are numbered, and the attempt's Prefect flow run has that number as its idempotency key. So a
restarted run, or another run that needs the same artifact, finds the flow run that is under way. The outcome is read from
the storage. Prefect only shows that a flow run will never start, or was cancelled.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from uuid import UUID

from httpx import HTTPError
from obstore.exceptions import BaseError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkPoolStatus
from prefect.deployments.flow_runs import arun_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelled, Crashed

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.run_attempt import Observer
from vantage.attempts.stopping import Stop
from vantage.flows.pools.deployments import UnknownPool, attempt_deployment, deploy_attempts
from vantage.flows.pools.job_variables import job_variables
from vantage.flows.prefect_server.outages import Outage, Outages
from vantage.schemas.frozen import Frozen
from vantage.schemas.records.attempt import AttemptBegun, AttemptOutcome, AttemptRequest, Failure
from vantage.storage.durable_files import make_folder
from vantage.storage.messages import Messages, logs_before, logs_with, messages_of, newest_number
from vantage.storage.storage import Storage
from vantage.tasks.training.scratch import REPORTS

POLL_SECONDS = 1.0
SECONDS_BETWEEN_REPORTS = 5.0
SILENT_SECONDS = 60.0
"""Seconds without a heartbeat after which a process on a worker counts as lost."""
PENDING_SECONDS = 900.0
"""Seconds after which a flow run that a worker took but did not start counts as lost; loading a container's image may
take minutes."""
QUEUED_SECONDS = 10.0
"""Seconds without a worker after which the run prints what it waits for."""
OUTAGE_SECONDS = 900.0
"""Longest wait for a Prefect server or a storage that does not answer."""
STOP_SECONDS = 40.0
"""Seconds after the grace period until the outcome of an attempt that was asked to stop is in the storage."""
WITHDRAWN = "Vantage withdrew the request"
"""Message of a flow run that Vantage cancelled; a flow run that a person cancelled has another message, or none."""
CANCELLED_IN_PREFECT = Failure(
    exit_code=ExitCode.RESUME,
    cause="cancelled",
    message="its flow run was cancelled in Prefect",
    remedy="run the same command again: the stage goes on from its last checkpoint",
)
_CANCELLED = (StateType.CANCELLING, StateType.CANCELLED)


def run_on_pool(
    request: AttemptRequest,
    *,
    pool: str,
    storage: Storage,
    observer: Observer,
    stop: threading.Event,
    outages: Outages,
    started: Callable[..., None] = lambda *_, **__: None,
) -> AttemptOutcome:
    """Make one attempt on a worker of the pool, or join the one that is under way; errors are in the outcome.

    Args:
        request: the work; its log receives the attempt's output.
        pool: name of the work pool.
        storage: the opened ``request.storage``, which the workers must reach at the same address.
        observer: called in this thread.
        stop: when set, the attempt is asked to save its state and stop.
        outages: reports that Prefect or the storage does not answer.
        started: called with the id of the attempt's flow run, and with ``attempt``, the name of its messages.
    """
    began = time.monotonic()
    with get_client(sync_client=True) as client:
        ask = partial(_ask_prefect, client, request, pool, storage, observer, stop, outages)
        while True:
            attempt = _patiently(ask, stop, outages.prefect)
            if attempt is not None:
                started(attempt.flow_run_id, attempt=attempt.name)
            outcome = AttemptOutcome(status="stopped") if attempt is None else attempt.wait()
            # The worker was asked to end before the attempt began, or another run has moved it to its own pool: ask
            # again.
            if outcome.status != "stopped" or stop.is_set():
                return outcome.model_copy(update={"seconds": time.monotonic() - began})


def _patiently(ask: Callable[[], "_Attempt"], stop: threading.Event, outage: Outage) -> "_Attempt | None":
    """Repeat ``ask`` until Prefect answers, and return its result; None if a stop was requested before.

    Raises:
        HTTPError, PrefectException: Prefect has not answered for ``OUTAGE_SECONDS``.
    """
    give_up = time.monotonic() + OUTAGE_SECONDS
    while not stop.is_set():
        try:
            attempt = ask()
            outage.is_over()
            return attempt
        except (ObjectNotFound, UnknownPool):
            raise
        except (HTTPError, PrefectException) as error:
            if time.monotonic() >= give_up:
                raise
            outage.noticed(error)
            stop.wait(SECONDS_BETWEEN_REPORTS)
    return None


def _ask_prefect(
    client: SyncPrefectClient,
    request: AttemptRequest,
    pool: str,
    storage: Storage,
    observer: Observer,
    stop: threading.Event,
    outages: Outages,
) -> "_Attempt":
    """Ask for the attempt, or find the one that is under way."""
    deploy_attempts(client, pool)
    number = max(1, newest_number(storage.remote, request.stage_key))
    while True:
        messages = messages_of(storage.remote, request.stage_key, number)
        if messages.read("outcome.json") is None:
            asked = _ask(messages, request, pool)
            flow_run = _flow_run_of(asked, messages, request, pool)
            if flow_run is not None:
                attempt = _Attempt(
                    client, flow_run, request, messages, asked, pool, storage, observer, stop, outages
                )
                if not attempt.was_moved():
                    return attempt
        number += 1


class Asked(Frozen):
    """The first request for a numbered attempt: which run made it, and on which pool."""

    run_id: str
    pool: str = ""
    token: str
    """Random part of the idempotency key, so that no flow run of another storage, or from before, is found."""


def _ask(messages: Messages, request: AttemptRequest, pool: str) -> Asked:
    """Ask for the attempt, unless another run or an earlier process of this run has asked already."""
    ours = Asked(run_id=request.run_id, pool=pool, token=secrets.token_hex(8))
    if messages.create("request.json", ours.model_dump_json().encode()):
        return ours
    return Asked.model_validate_json(messages.read("request.json") or b"")


def _flow_run_of(asked: Asked, messages: Messages, request: AttemptRequest, pool: str) -> FlowRun | None:
    """Return the requested flow run, on the pool of the run that asked first; that run may not have started it yet.

    Whichever run comes first creates the flow run on that pool. On another pool it would wait for that pool's workers,
    and each run would take it for the other's. Returns None if the pool no longer exists, and closes the request.
    """
    where = asked.pool or pool
    try:
        return asyncio.run(_start_flow_run(request, messages.number, asked.token, where))
    except ObjectNotFound:
        if where == pool:
            raise
        stopped = AttemptOutcome(status="stopped")
        messages.create("outcome.json", stopped.model_dump_json().encode())
        return None


async def _start_flow_run(request: AttemptRequest, number: int, token: str, pool: str) -> FlowRun:
    """Return the flow run of a numbered attempt; Prefect creates it unless it exists.

    Run this in a separate event loop: in the flow's loop, Prefect would wait for the flow run.
    """
    name = f"{request.step} · {request.run_id} · {number}"
    return await arun_deployment(
        attempt_deployment(pool),
        parameters={
            "request": request.model_dump_json(),  # as text: PostgreSQL stores 1e30 as a number that cannot be read back
            "number": number,
            "name": name,
        },
        flow_run_name=name,
        idempotency_key=f"{request.stage_key}.{number}.{token}",
        job_variables=job_variables(request.resources),
        tags=[f"run:{request.run_id}", f"stage:{request.step}"],
        timeout=0,
    )


class _Attempt:
    """Waits for one numbered attempt."""

    def __init__(
        self,
        client: SyncPrefectClient,
        flow_run: FlowRun,
        request: AttemptRequest,
        messages: Messages,
        asked: Asked,
        pool: str,
        storage: Storage,
        observer: Observer,
        stop: threading.Event,
        outages: Outages,
    ) -> None:
        """Hold an attempt on a pool; ``pool``: pool of the waiting run; ``asked.pool``: pool of the run that asked
        first."""
        self._client = client
        self._flow_run = flow_run
        self._request = request
        self._messages = messages
        self._asked = asked
        self._pool = pool
        self._storage = storage
        self._observer = observer
        self._stop = stop
        self._outages = outages
        self._begun = False
        self._has_warned = False
        self._beat: bytes | None = None
        self._state_type: StateType | None = None
        self._started = time.monotonic()
        self._reported = 0.0
        self._heard = time.monotonic()
        """Time when the attempt's heartbeat or its flow run's state last changed, or when it was last seen waiting for
        a worker."""

    @property
    def flow_run_id(self) -> str:
        """Id of the attempt's flow run."""
        return str(self._flow_run.id)

    @property
    def name(self) -> str:
        """Name of the attempt's messages: its stage key and number."""
        return self._messages.name

    def wait(self) -> AttemptOutcome:
        """Wait for the outcome; the attempt is given up when its process is lost.

        Raises:
            BaseError: obstore's error, if the storage has not answered for ``OUTAGE_SECONDS``.
        """
        answered = time.monotonic()
        while True:
            try:
                outcome = self._look()
                answered = time.monotonic()
                self._outages.storage.is_over()
            except BaseError as error:
                if time.monotonic() - answered >= OUTAGE_SECONDS:
                    raise
                outcome = None
                self._heard = time.monotonic()  # the storage may have unread heartbeats
                self._outages.storage.noticed(error)
            if outcome is not None:
                return self._ours(outcome)
            self._stop.wait(POLL_SECONDS)

    def _ours(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Return the meaning of the attempt's outcome for this run."""
        if outcome.artifact is not None:
            by_us = self._asked.run_id == self._request.run_id
            return outcome if by_us else outcome.model_copy(update={"status": "reused"})
        was_interrupted = outcome.failure is None or outcome.failure.cause in ("preempted", "killed")
        if was_interrupted and not self._stop.is_set() and self._was_cancelled_in_prefect():
            return outcome.model_copy(update={"status": "failed", "failure": CANCELLED_IN_PREFECT})
        return outcome

    def _was_cancelled_in_prefect(self) -> bool:
        """Return whether a person cancelled the flow run in Prefect, and not Vantage or a worker that is asked to end."""
        with _server_faults_ignored(self._outages.prefect), suppress(ObjectNotFound):
            self._flow_run = self._client.read_flow_run(self._flow_run.id)
        state = self._flow_run.state
        return state is not None and state.type in _CANCELLED and state.message != WITHDRAWN

    def _look(self) -> AttemptOutcome | None:
        """Look once for the outcome; None: the attempt goes on."""
        outcome = self._outcome()
        if outcome is not None:
            self._report()
            return outcome
        if self._stop.is_set():
            return self._stopped()
        now = time.monotonic()
        if now - self._reported >= SECONDS_BETWEEN_REPORTS:
            self._reported = now
            if (ended := self._ended()) is not None:
                return self._give_up(ended)
            if self.was_moved():
                return AttemptOutcome(status="stopped")
            self._report()
        if (
            not self._has_warned
            and not self._begun
            and now - self._started >= QUEUED_SECONDS
            and self._is_queued()
        ):
            self._has_warned = True
            self._observer.queued(self._asked.pool or self._pool)
        return None

    def was_moved(self) -> bool:
        """Close another run's request that waits for a pool without workers, if our pool has workers; then we ask again
        on our pool."""
        state, theirs = self._flow_run.state, self._asked.pool
        if theirs in ("", self._pool) or state is None or state.type != StateType.SCHEDULED:
            return False
        with _server_faults_ignored(self._outages.prefect):
            if self._has_workers(theirs) or not self._has_workers(self._pool):
                return False
            return self._close()
        return False

    def _has_workers(self, pool: str) -> bool:
        try:
            return self._client.read_work_pool(pool).status == WorkPoolStatus.READY
        except ObjectNotFound:
            return False

    def _close(self) -> bool:
        stopped = AttemptOutcome(status="stopped")
        if self._messages.create("outcome.json", stopped.model_dump_json().encode()):
            self._messages.write("stop", b"")
            self._end_flow_run(self._flow_run.id, crashed=False)
        return True

    def _outcome(self) -> AttemptOutcome | None:
        data = self._messages.read("outcome.json")
        return None if data is None else AttemptOutcome.model_validate_json(data)

    def _report(self) -> None:
        """Report to the observer that the computation has begun, and its progress."""
        folder = self._storage.reports(self._request.stage_key, REPORTS)
        data = self._messages.read("begun.json")
        if data is not None and not self._begun:
            self._begun = True
            begun = AttemptBegun.model_validate_json(data)
            self._observer.begun(begun.model_copy(update={"scratch": folder}))
        if self._begun:
            self._observer.polled()
        if (log := self._messages.read("log.txt")) is not None:
            self._write_log(log)

    def _write_log(self, log: bytes) -> None:
        """Write the run's copy of the log, which also contains the logs of earlier attempts."""
        file = self._request.log
        make_folder(file.parent)
        number = self._messages.number
        before = logs_before(file.read_bytes(), number) if file.exists() else b""
        file.write_bytes(logs_with(before, number, log))

    def _is_queued(self) -> bool:
        state = self._flow_run.state
        return state is not None and state.type in (StateType.SCHEDULED, StateType.PENDING)

    def _ended(self) -> str | None:
        """Return why there will be no outcome; None: there may be one."""
        with _server_faults_ignored(self._outages.prefect):
            try:
                self._flow_run = self._client.read_flow_run(self._flow_run.id)
            except ObjectNotFound:
                return "its flow run was deleted from Prefect"
            if self._is_queued() and self._flow_run.work_pool_name is None:
                return "its work pool was deleted"
        beat = self._messages.read("beat")
        state = self._flow_run.state
        state_type = None if state is None else state.type
        if (beat, state_type) != (self._beat, self._state_type) or state_type in (None, StateType.SCHEDULED):
            self._beat, self._state_type, self._heard = beat, state_type, time.monotonic()
        if state is not None and state.is_final() and self._outcome() is None:
            return f"its flow run is {state.name}{f': {state.message}' if state.message else ''}"
        patience = PENDING_SECONDS if self._is_queued() else SILENT_SECONDS
        if time.monotonic() - self._heard >= patience:
            return f"its process has sent no heartbeat for {patience:g} s"
        return None

    def _give_up(self, reason: str) -> AttemptOutcome:
        """Record the attempt as lost, so that nobody waits for it, unless it has ended after all."""
        lost = AttemptOutcome(
            status="failed",
            failure=Failure(
                exit_code=ExitCode.RESUME,
                cause="killed",
                message=f"the attempt on pool {self._pool} was lost: {reason}",
                remedy="another worker goes on from its last checkpoint",
            ),
        )
        if not self._messages.create("outcome.json", lost.model_dump_json().encode()):
            return self._outcome() or lost
        # the worker may only have been cut off, and would continue to train
        self._messages.write("stop", b"")
        self._end_flow_run(self._flow_run.id, crashed=True)
        return lost

    def _stopped(self) -> AttemptOutcome:
        """Ask the attempt to save and stop, and wait for that; an attempt that has not started is cancelled."""
        if isinstance(self._stop, Stop) and self._stop.leaves_pools:
            return AttemptOutcome(status="stopped")
        self._messages.write("stop", b"")
        patience = STOP_SECONDS + self._request.resources.grace_seconds
        deadline = time.monotonic() + patience
        while (outcome := self._outcome()) is None and time.monotonic() < deadline:
            ended = self._ended()
            if self._is_queued():
                stopped = AttemptOutcome(status="stopped")
                if self._messages.create("outcome.json", stopped.model_dump_json().encode()):
                    self._end_flow_run(self._flow_run.id, crashed=False)
                    return stopped
            elif ended is not None:
                return self._give_up(ended)
            time.sleep(POLL_SECONDS)
        self._report()
        return outcome or self._give_up(f"it did not stop within {patience:g} s")

    def _end_flow_run(self, flow_run_id: UUID, *, crashed: bool) -> None:
        """Give the flow run a final state, so that its slot in the pool is free, unless it has one."""
        if self._flow_run.state is not None and self._flow_run.state.is_final():
            return
        lost: State[None] = Crashed(message="its process was lost")
        state = lost if crashed else Cancelled(message=WITHDRAWN)
        with _server_faults_ignored(self._outages.prefect):
            self._client.set_flow_run_state(flow_run_id, state, force=True)


@contextmanager
def _server_faults_ignored(outage: Outage) -> Iterator[None]:
    """Ignore server faults: an unreachable Prefect server ends no attempt, since the outcome comes through the
    storage."""
    try:
        yield
        outage.is_over()
    except ObjectNotFound:
        raise
    except (HTTPError, PrefectException) as error:
        outage.noticed(error)
