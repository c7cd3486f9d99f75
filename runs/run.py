"""Runs of recipes, stored as ``runs/<id>/run.json`` in a workspace.

A run is found by the digest of its resolved recipe, so the same command resumes an interrupted run. The process that
executes a run holds its lock, which the kernel releases when the process ends. Runs are ordered by their numbers; no
clocks are compared.
"""

import hashlib
import json
import secrets
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vantage.attempts.former_recipes import folder_before, folder_now
from vantage.ledger.operations import RunOutcome
from vantage.runs.answers import with_answers
from vantage.runs.pinning import pinned
from vantage.runs.record import (
    UNFINISHED,
    OpenFlowRun,
    RunRecord,
    StageRecord,
    TaskRunEnd,
)
from vantage.runs.run_ids import number_in
from vantage.runs.run_records import RunLock
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.approvals import PUBLISH_PREFIX, Approval, Question

_READERS = 8


class Run:
    """A run that this process executes; it holds the run's lock until ``close``."""

    def __init__(self, workspace: Workspace, record: RunRecord, lock: RunLock) -> None:
        self.workspace = workspace
        self._record = record
        self._lock = lock
        self._writing = threading.RLock()

    @property
    def record(self) -> RunRecord:
        """The run as it was last written."""
        return self._record

    @property
    def folder(self) -> Path:
        """The run's own folder: ``run.json``, logs, and the ledger's outbox."""
        return self.workspace.folder(self._record.run_id)

    def update(self, **changes: Any) -> None:
        """Change fields of the run and write them."""
        with self._writing:
            self._record = self._record.model_copy(update=changes)
            self.workspace.records.write(self._record)

    def set_stage(self, step: str, stage: StageRecord) -> None:
        """Replace the record of a stage and write it; thread-safe."""
        with self._writing:
            stages = {**self._record.stages, step: stage}
            self._record = self._record.model_copy(update={"stages": stages})
            self.workspace.records.write(self._record)

    def use_key(self, step: str, stage_key: str) -> None:
        """Record the key that an attempt at the step is about to look up; thread-safe."""
        with self._writing:
            if self._record.used_keys.get(step) != stage_key:
                used = {**self._record.used_keys, step: stage_key}
                self._record = self._record.model_copy(update={"used_keys": used})
                self.workspace.records.write(self._record)

    def set_unsigned(self, step: str, reason: str) -> None:
        """Record the reason why the artifact of a step was not signed; thread-safe."""
        with self._writing:
            self._record = self._record.model_copy(
                update={"unsigned": {**self._record.unsigned, step: reason}}
            )
            self.workspace.records.write(self._record)

    def update_stage(self, step: str, **changes: Any) -> None:
        """Change fields of a stage and write them; thread-safe."""
        with self._writing:
            self.set_stage(step, self._record.stages[step].model_copy(update=changes))

    def add_flow_run(self, flow_run_id: str, *, server: str) -> None:
        """Add the id of a new flow run in Prefect, which is open until it is closed; thread-safe."""
        with self._writing:
            self.update(
                prefect_flow_run_ids=(
                    *(each for each in self._record.prefect_flow_run_ids if each != flow_run_id),
                    flow_run_id,
                ),
                open_flow_runs=(
                    *self._record.open_flow_runs,
                    OpenFlowRun(flow_run_id=flow_run_id, server=server),
                ),
            )

    def add_attempt(self, flow_run_id: str, *, server: str, attempt: str) -> None:
        """Add the flow run of an attempt on a pool, which is open until it is closed; thread-safe.

        ``attempt``: the stage key and the number of the request.
        """
        added = OpenFlowRun(flow_run_id=flow_run_id, server=server, attempt=attempt)
        with self._writing:
            if added not in self._record.open_flow_runs:
                self.update(open_flow_runs=(*self._record.open_flow_runs, added))

    def end_flow_run(
        self, flow_run_id: str, status: str, message: str, task_runs: Mapping[str, TaskRunEnd]
    ) -> None:
        """Record how a flow run and its task runs ended, before Prefect records it; thread-safe."""
        ended = {"status": status, "message": message, "task_runs": dict(task_runs)}
        with self._writing:
            self.update(
                open_flow_runs=tuple(
                    each.model_copy(update=ended) if each.flow_run_id == flow_run_id else each
                    for each in self._record.open_flow_runs
                )
            )

    def close_flow_runs(self, flow_run_ids: Collection[str]) -> None:
        """Remove flow runs whose end Prefect has recorded, or that it no longer knows."""
        with self._writing:
            left = (each for each in self._record.open_flow_runs if each.flow_run_id not in flow_run_ids)
            self.update(open_flow_runs=tuple(left))

    def is_cancel_requested(self) -> bool:
        """Return whether ``vantage cancel`` asked for this run's end since this process executes it."""
        return self.workspace.records.is_cancel_requested(self._record.run_id)

    def ask(self, question: Question) -> None:
        """Record the question to a person; an earlier question about the same subject is replaced; thread-safe."""
        with self._writing:
            questions = {**self._record.questions, question.subject: question}
            self._record = self._record.model_copy(update={"questions": questions})
            self.workspace.records.write(self._record)

    def withdraw(self, subject: str) -> None:
        """Remove the question about the subject; thread-safe."""
        with self._writing:
            if subject in self._record.questions:
                left = {name: each for name, each in self._record.questions.items() if name != subject}
                self._record = self._record.model_copy(update={"questions": left})
                self.workspace.records.write(self._record)

    def take_up_answers(self) -> tuple[Approval, ...]:
        """Copy new answers into the record; returns them."""
        with self._writing:
            known = self._record.approvals
            self._record = with_answers(self.workspace, self._record)
            new = self._record.approvals[len(known) :]
            if new:
                self.workspace.records.write(self._record)
        return new

    def outcome(self) -> RunOutcome:
        """Return the outcome of the run, from the status of its stages and the aliases that wait for a person."""
        return outcome_of(self._record)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


def outcome_of(record: RunRecord) -> RunOutcome:
    """Return the outcome of a run, from the status of its stages and the aliases that wait for a person."""
    statuses = {stage.status for stage in record.stages.values()}
    if "failed" in statuses:
        return "failed"
    if statuses & {"resumable", "running", "waiting"}:
        return "resumable"
    if "waiting_approval" in statuses or any(
        subject.startswith(PUBLISH_PREFIX) for subject in record.open_questions
    ):
        return "waiting_approval"
    return "gate_closed" if "gate_closed" in statuses else "completed"


def recipe_digest(recipe: ResolvedRecipe) -> str:
    """Return the sha256 of the resolved recipe as canonical JSON."""
    return _digest(canonical_json(recipe.model_dump(mode="json")))


def recipe_digests(recipe: ResolvedRecipe) -> tuple[str, str]:
    """Return digests under which runs of this recipe are recorded: the present one, and that of an earlier version.

    They differ for a built-in recipe with files beside it, since a resolved recipe has their full paths.
    """
    text = canonical_json(recipe.model_dump(mode="json"))
    now, before = (json.dumps(f"{folder}/")[:-1] for folder in (folder_now(), folder_before()))
    return _digest(text), _digest(text.replace(now, before))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def acquire_run(
    workspace: Workspace,
    recipe: ResolvedRecipe,
    *,
    source: str,
    overrides: Sequence[str] = (),
    part: str | None = None,
) -> Iterator[Run]:
    """Yield the newest unfinished, inactive run of this recipe, or a new one.

    If another process executes the unfinished run, a new run is created: each stage is then computed by the process
    that locks its key first, and reused by the other. A new run pins the registered models and the
    stages of other runs that it reads.
    """
    digests = recipe_digests(recipe)
    with workspace.records.creation_lock():
        run = _acquire_unfinished(workspace, digests) or _create(
            workspace, recipe, digests[0], source, tuple(overrides), part
        )
    try:
        run.update(status="running")
        yield run
    finally:
        run.close()


@contextmanager
def acquire_run_by_id(workspace: Workspace, run_id: str) -> Iterator[Run]:
    """Yield the run with this id, whatever its status. Raises RunError if another process executes it."""
    with workspace.records.creation_lock():
        run = _acquire(workspace, read_run(workspace, run_id))
    if run is None:
        raise RunError(
            f"run {run_id} is being driven by another process; `vantage status` shows how far it is"
        )
    try:
        run.update(status="running")
        yield run
    finally:
        run.close()


@contextmanager
def hold_run(workspace: Workspace, run_id: str) -> Iterator[Run]:
    """Yield the run with this id and its lock; its status stays. Raises RunError if another process executes it."""
    run = _acquire(workspace, read_run(workspace, run_id))
    if run is None:
        raise RunError(
            f"run {run_id} is being driven by another process; `vantage status` shows how far it is"
        )
    try:
        yield run
    finally:
        run.close()


def dead_runs(workspace: Workspace) -> Iterator[Run]:
    """Return runs with status ``running`` that no process executes; each is locked while it is yielded."""
    return inactive_runs(workspace, lambda record: record.status == "running")


def inactive_runs(workspace: Workspace, wanted: Callable[[RunRecord], bool]) -> Iterator[Run]:
    """Yield the wanted runs that no process executes; each is locked while it is yielded.

    No run is created meanwhile: a new run exists for a moment before it is locked. Whether a process executes a run takes
    seconds to see in a bucket, so all are looked at together, before others have to wait.
    """
    found = [record for record in read_runs(workspace) if wanted(record)]
    with ThreadPoolExecutor(_READERS) as readers:
        active = list(readers.map(lambda record: is_active(workspace, record.run_id), found))
    silent = [record for record, is_executed in zip(found, active, strict=True) if not is_executed]
    if not silent:
        return
    with workspace.records.creation_lock():
        for record in silent:
            run = _acquire(workspace, record)
            if run is not None:
                try:
                    if wanted(run.record):
                        yield run
                finally:
                    run.close()


def read_runs(workspace: Workspace) -> list[RunRecord]:
    """Return all runs of a workspace that can be read, the newest first."""
    records, _ = _read_all(workspace)
    return sorted(records, key=lambda record: (record.number, record.run_id), reverse=True)


def damaged_runs(workspace: Workspace) -> list[str]:
    """Return, for each unreadable run (damaged, or of a later version), the reason and the remedy."""
    return _read_all(workspace)[1]


def _read_all(workspace: Workspace) -> tuple[list[RunRecord], list[str]]:
    """Return the runs that can be read, and the reasons of the others."""
    records, damaged = [], []

    def read(run_id: str) -> RunRecord | RunError:
        try:
            return read_run(workspace, run_id)
        except RunError as error:
            return error

    with ThreadPoolExecutor(_READERS) as readers:  # a bucket answers each request after a while
        for found in readers.map(read, sorted(workspace.records.ids())):
            if isinstance(found, RunError):
                damaged.append(str(found))
            else:
                records.append(found)
    return records, damaged


def read_run(workspace: Workspace, run_id: str) -> RunRecord:
    """Return one run, with the answers that people have given. Raises RunError if it does not exist or cannot be read."""
    return with_answers(workspace, workspace.records.read(run_id))


def is_active(workspace: Workspace, run_id: str) -> bool:
    """Return whether a process executes the run; an inactive run with status ``running`` was interrupted."""
    return workspace.records.is_active(run_id)


def next_run(workspace: Workspace, recipe: ResolvedRecipe) -> tuple[ResolvedRecipe, tuple[Approval, ...]]:
    """Return the run that ``acquire_run`` would execute, with the approvals that it has; writes nothing.

    The recipe has the models that its unfinished run has pinned, or else those that are pinned now.
    """
    digests = recipe_digests(recipe)
    for record in read_runs(workspace):
        if record.recipe_digest in digests and record.status in UNFINISHED:
            return record.recipe, record.approvals
    return pinned(recipe, workspace), ()


def _acquire_unfinished(workspace: Workspace, digests: Collection[str]) -> Run | None:
    for record in read_runs(workspace):
        if record.recipe_digest in digests and record.status in UNFINISHED:
            run = _acquire(workspace, record)
            if run is not None and run.record.status in UNFINISHED:
                return run
            if run is not None:  # the run was finished between reading and locking
                run.close()
    return None


def _create(
    workspace: Workspace,
    recipe: ResolvedRecipe,
    digest: str,
    source: str,
    overrides: tuple[str, ...],
    part: str | None,
) -> Run:
    number = max((number_in(run_id) for run_id in workspace.records.ids()), default=0) + 1
    run_id = f"{number:04d}-{recipe.recipe}-{secrets.token_hex(3)}"
    record = RunRecord(
        run_id=run_id,
        number=number,
        recipe_digest=digest,
        recipe=pinned(recipe, workspace),
        source=source,
        overrides=overrides,
        part=part,
        started=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    workspace.records.create(record)
    run = _acquire(workspace, record)
    assert run is not None, "created under the lock"
    return run


def _acquire(workspace: Workspace, record: RunRecord) -> Run | None:
    """Return the run with its lock, or None if another process has the lock."""
    lock = workspace.records.lock(record.run_id)
    # Read again: the previous holder of the lock may have written since.
    return None if lock is None else Run(workspace, read_run(workspace, record.run_id), lock)
