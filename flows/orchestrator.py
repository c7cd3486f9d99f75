"""One run's steps, one attempt at a time: which can start, what an attempt is asked, what follows from its outcome.

Nothing here knows who orders the steps (``flows.pipeline`` has Prefect do it).
"""

import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from flows.attempts.jobs import request_for
from flows.attempts.run_attempt import run_attempt
from flows.launchers.launcher import Launcher
from flows.launchers.stage_process import explain
from flows.machine import Machine, this_machine
from flows.recording import Recording
from flows.retry import Retries
from flows.runs.origin import origin
from flows.runs.run import SUCCEEDED, Run, StageRecord, dead_runs, read_runs
from flows.watching import Watcher
from ledger.run_ledger import Ledger
from schemas.records.artifacts import Artifact
from schemas.records.attempt import (
    RUN_STAGE,
    AttemptOutcome,
    AttemptRequest,
    Share,
)
from schemas.safe_text import without_secrets
from schemas.steps import dependencies, ordered_steps
from storage.store import Store
from tasks.training.progress import StageProgress, read_progress
from tasks.training.scratch import PROGRESS

DIED = "the run's process died"
"""What the next run that begins in the workspace records of one that nobody drives, and of its running stages."""


class Orchestrator:
    """The steps of one run that this process drives."""

    def __init__(
        self,
        run: Run,
        *,
        store: Store,
        ledger: Ledger,
        watcher: Watcher,
        machine: Machine | None = None,
        in_store: Collection[str] = (),
        ended: Callable[[str], None] = lambda step: None,
        stage_function: str = RUN_STAGE,
        launcher: Launcher | None = None,
    ) -> None:
        """Every step of the run waits, until ``attempt`` or ``block``.

        Args:
            run: what is driven; held by this process.
            store: where artifacts lie.
            ledger: what MLflow is told goes here.
            watcher: who looks at the run.
            machine: where steps compute; other runs of this process may share it. None: this one, alone.
            in_store: steps whose artifact is there; they ask the machine for nothing, or they would wait for all who
                compute.
            ended: told of every step that is over, however it ended.
            stage_function: dotted name of the function ``StageJob -> StageResult``.
            launcher: where attempts compute; None: in child processes of this machine.
        """
        self.run = run
        self.recipe = run.record.recipe
        self.store = store
        self.ledger = ledger
        self.watcher = watcher
        self.machine = machine or this_machine()
        self.in_store = in_store
        self.ended = ended
        self.stop = threading.Event()
        """Once set, running stages save their state and end, and no other begins."""
        self.cancelled = False
        """Whether it was Prefect that asked."""
        self.inputs = {step: dependencies(self.recipe)[step] for step in ordered_steps(self.recipe)}
        """Step → role → step that it reads; every step comes after all that it reads."""
        self.artifacts: dict[str, Artifact] = {}
        """What the steps that went well have made."""
        self.stage_function = stage_function
        self._launcher = launcher
        self._retries = Retries(self.recipe)
        self._recording = Recording(
            run, store=store, ledger=ledger, watcher=watcher, inputs=self.inputs, artifacts=self.artifacts
        )
        known = run.record.stages
        waiting = {"status": "waiting", "reason": None, "exit_code": None, "seconds": 0.0, "verdicts": ()}
        run.update(
            unpublished={},
            stages={step: known.get(step, StageRecord()).model_copy(update=waiting) for step in self.inputs},
        )

    # The run

    def begin(self) -> None:
        """Open the run in the ledger, and close what other runs left open when their processes died."""
        recipe = self.recipe.model_dump(mode="json")
        self.ledger.open_run(self.run.record.run_id, self.recipe.recipe, recipe, origin=origin())
        for dead in dead_runs(self.run.workspace):
            self.ledger.close_stale(dead.record.run_id, reason=DIED)
            for step, stage in dead.record.stages.items():
                if stage.status == "running":
                    dead.update_stage(step, status="resumable", reason=DIED)
            dead.update(status="resumable")

    def end(self) -> None:
        """Record how the run came out, and wait a while for MLflow to have heard of it."""
        outcome = self.run.outcome()
        self.run.update(status=outcome)
        self.ledger.finish_run(outcome)
        self.ledger.flush()
        self.run.update(mlflow_run_id=self.ledger.mlflow_run_id())

    def request_stop(self) -> None:
        """Ask running stages to save their state and end."""
        self.watcher.say("  stopping: running stages save their state", "yellow")
        self.stop.set()

    def cancel(self) -> None:
        """The run was cancelled in Prefect."""
        self.cancelled = True
        self.watcher.say("  cancelled in Prefect", "yellow")
        self.request_stop()

    # The order

    def obstacle(self, step: str) -> str | None:
        """Why the step cannot start, now that everything it reads is over; None where it can."""
        if self.stop.is_set():
            return "the run was stopped"
        for read in self.inputs[step].values():
            status = self.run.record.stages[read].status
            if status not in SUCCEEDED:
                return f"reads {read}, which is {status.replace('_', ' ')}"
        for before in self.before_any_stage() if step in self.recipe.stages else ():
            status = self.run.record.stages[before].status
            if status not in SUCCEEDED:
                return f"waits for {before}, which is {status.replace('_', ' ')}"
        return None

    def before_any_stage(self) -> list[str]:
        """The implicit steps: what is refused is refused before anything trains."""
        return [step for step in self.inputs if step not in self.recipe.stages]

    def block(self, step: str, reason: str) -> StageRecord:
        """Record that the step did not start."""
        return self._recording.ended(
            step, status="resumable" if self.stop.is_set() else "blocked", reason=reason
        )

    # One attempt

    def next_attempt(self, step: str) -> int:
        """The number of the attempt that this run would begin at the step, or that made its artifact."""
        known = self.run.record.stages[step]
        return (known.attempt or 0) + (known.digest is None) or 1

    def request(
        self, step: str, share: Share | None = None, *, only_reuse: bool = False
    ) -> AttemptRequest | None:
        """What an attempt at the step is asked; None where that fails, which is then in the step's record.

        Args:
            step: what everything that it reads is there for.
            share: of the machine, to compute on; None: all of it.
            only_reuse: compute nothing.
        """
        began = time.monotonic()
        try:
            request = request_for(
                self.recipe,
                step,
                {role: self.artifacts[read] for role, read in self.inputs[step].items()},
                run_id=self.run.record.run_id,
                storage=str(self.store.root),
                log=self.log_of(step),
                share=share,
                only_reuse=only_reuse,
                microbatch_size=self.run.record.stages[step].microbatch_size,
                function=self.stage_function,
            )
            if not self.store.has_scratch(request.stage_key):
                return request
            return request.model_copy(update={"made_with": self._last_made_with(request.stage_key)})
        except Exception as error:  # a source that cannot be read must not take the stages beside it along
            self._log_traceback(step, error)
            outcome = AttemptOutcome(
                status="failed", failure=explain(error), seconds=time.monotonic() - began
            )
            self._failed(step, outcome)
            return None

    def attempt(self, request: AttemptRequest) -> StageRecord:
        """Make the attempt, and record everything that comes of it; whatever goes wrong is in the record."""
        step = request.step
        began = time.monotonic()
        try:
            outcome = run_attempt(
                request,
                observer=self._recording.observer(request),
                stop=self.stop,
                storage=self.store,
                launcher=self._launcher,
            )
            if outcome.artifact is not None:
                self.artifacts[step] = outcome.artifact
                return self._recording.succeeded(request, outcome, outcome.artifact)
        except Exception as error:  # of ours, or of a disk that takes no record
            self._log_traceback(step, error)
            outcome = AttemptOutcome(
                status="failed", failure=explain(error), seconds=time.monotonic() - began
            )
        if outcome.status == "stopped":
            return self._recording.ended(
                step, status="resumable", reason="the run was stopped before the stage began"
            )
        if outcome.status == "absent":
            return self._recording.ended(
                step, status="resumable", reason="its artifact was lost after the run was planned"
            )
        return self._failed(step, outcome)

    def log_of(self, step: str) -> Path:
        """Where everything that the step's process prints goes."""
        return self.run.folder / "logs" / f"{step}.log"

    def progress(self, step: str) -> StageProgress | None:
        """How far the running step is."""
        key = self.run.record.stages[step].stage_key
        return read_progress(self.store.root / "scratch" / key / PROGRESS) if key else None

    def _failed(self, step: str, outcome: AttemptOutcome) -> StageRecord:
        """Record why the step has no result, and what is tried next."""
        size = self.run.record.stages[step].microbatch_size
        retry = self._retries.after(step, outcome, microbatch_size=size, inputs=self._read(step))
        return self._recording.failed(step, outcome, retry, log=self.log_of(step))

    def _read(self, step: str) -> dict[str, Artifact]:
        """Role → artifact that the step reads, as far as they are there."""
        return {
            role: self.artifacts[read] for role, read in self.inputs[step].items() if read in self.artifacts
        }

    def _last_made_with(self, key: str) -> Mapping[str, str]:
        """What the newest run that began to compute the key, this one first, recorded of how."""
        records = [self.run.record, *read_runs(self.run.workspace)]
        stages = (stage for record in records for stage in record.stages.values())
        return next((stage.provenance for stage in stages if stage.stage_key == key and stage.provenance), {})

    def _log_traceback(self, step: str, error: Exception) -> None:
        log = self.log_of(step)
        with suppress(OSError):  # a disk that is full holds up nothing here
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as file:
                file.write(without_secrets("".join(traceback.format_exception(error))))
