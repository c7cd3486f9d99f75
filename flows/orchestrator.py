"""The orchestrator of one run: it decides which steps can start, requests attempts, and handles their outcomes.

It knows nothing of Prefect; ``vantage.flows.pipeline`` calls it from Prefect's tasks.
"""

import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.jobs import request_for, steps_of, with_bases
from vantage.attempts.launchers.launcher import Launcher
from vantage.attempts.launchers.stage_process import explain
from vantage.attempts.machine import Machine, this_machine
from vantage.attempts.run_attempt import Observer, reused, run_attempt
from vantage.attempts.stopping import Stop
from vantage.flows.extending import Extending
from vantage.flows.prefect_server.outages import outages_of
from vantage.flows.prefect_server.server import server_name
from vantage.flows.prefect_server.task_runs import TaskRuns
from vantage.flows.recording import Recording
from vantage.flows.retry import Retries
from vantage.ledger.run_ledger import Ledger
from vantage.review.reports.at_end import ReportProcess, is_wanted
from vantage.runs.origin import origin
from vantage.runs.record import SUCCEEDED, StageRecord
from vantage.runs.run import Run, dead_runs, read_runs
from vantage.runs.watching import Watcher
from vantage.schemas.recipe.extending import length_in_words, length_of, unit_of
from vantage.schemas.records.approvals import answer_to
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import RUN_STAGE, AttemptOutcome, AttemptRequest, Failure, Share
from vantage.schemas.safe_text import without_secrets
from vantage.storage.durable_files import make_folder
from vantage.storage.storage import Storage
from vantage.storage.store import Store
from vantage.tasks.training.progress import StageProgress, read_progress
from vantage.tasks.training.scratch import PROGRESS

_CAUSES_OF_DAMAGE = frozenset({"refused", "diverged", "internal"})
"""Causes of failures that a damaged input may lead to."""
DIED = "the run's process died"
"""Reason that the next run in the workspace records for a run whose process is gone, and for its running stages."""


class _InputLost(Exception):
    """An input of an attempt has changed since the attempt was requested."""


class Orchestrator:
    """The steps of one run of this process."""

    def __init__(
        self,
        run: Run,
        *,
        store: Storage,
        ledger: Ledger,
        watcher: Watcher,
        machine: Machine | None = None,
        in_store: Collection[str] = (),
        ended: Callable[[str], None] = lambda step: None,
        stage_function: str = RUN_STAGE,
        launcher: Launcher | None = None,
        makes_report: bool = False,
    ) -> None:
        """Begin with all steps as ``waiting``; ``attempt`` and ``block`` change that.

        Args:
            run: the run; this process holds its lock.
            store: the store of artifacts.
            ledger: the run's ledger, which sends records to MLflow.
            watcher: shows progress.
            machine: resources for the steps, perhaps shared with other runs of this process; None: this whole machine.
            in_store: steps whose artifact exists; they reserve no resources, so they do not wait for computing stages.
            ended: called with each step that is over.
            stage_function: dotted name of the function ``StageJob -> StageResult``.
            launcher: launcher of the computations; None: child processes on this machine.
            makes_report: make the run's report at its end, unless ``VANTAGE_REPORT`` is 0.
        """
        self.run = run
        self.recipe = run.record.recipe
        self.store = store
        self.ledger = ledger
        self.watcher = watcher
        self.machine = machine or this_machine()
        self.in_store = in_store
        self.ended = ended
        self.stop = Stop()
        """When set, running stages save their state and stop, and no new stage starts."""
        self.cancelled = False
        """Whether the stop was requested in Prefect, or by ``vantage cancel``."""
        self.steps = steps_of(self.recipe)
        """Step → its part of the recipe, in topological order."""
        self.inputs = {name: step.reads for name, step in self.steps.items()}
        """Step → role → input step, in topological order."""
        self.artifacts: dict[str, Artifact] = {}
        """Step → artifact, of the steps that succeeded."""
        self.stage_function = stage_function
        self._launcher = launcher
        self.retries = False
        """Whether the caller of ``attempt`` calls it again as long as ``tries_again``."""
        self._retries = Retries(self.recipe)
        self.outages = outages_of(store.address, lambda text: watcher.say(f"  {text}", "yellow"))
        self.task_runs = TaskRuns()
        self._mending = threading.RLock()
        self._answering = threading.Lock()
        """Held while answers are taken up: a thread that finds none goes on only after another thread has recorded its
        answers."""
        self.makes_report = makes_report and is_wanted()
        """Whether the run's report is made at its end."""
        self._report: ReportProcess | None = None
        self._recording = Recording(
            run, store=store, ledger=ledger, watcher=watcher, inputs=self.inputs, artifacts=self.artifacts
        )
        self._extending = Extending(run, store, watcher.say)
        known = run.record.stages
        waiting = {
            "status": "waiting",
            "reason": None,
            "exit_code": None,
            "seconds": 0.0,
            "verdicts": (),
            "loosened": (),
        }
        run.update(
            unpublished={},
            unsigned={},
            refused_aliases={},
            stages={step: known.get(step, StageRecord()).model_copy(update=waiting) for step in self.inputs},
        )

    # The run

    def begin(self) -> None:
        """Open the run in the ledger, and close runs that dead processes left open."""
        recipe = self.recipe.model_dump(mode="json")
        self.ledger.open_run(self.run.record.run_id, self.recipe.recipe, recipe, origin=origin())
        for answer in self.run.record.approvals:
            self.ledger.record_approval(answer)
        for dead in dead_runs(self.run.workspace):
            self.ledger.close_stale(dead.record.run_id, reason=DIED)
            for step, stage in dead.record.stages.items():
                if stage.status == "running":
                    dead.update_stage(step, status="resumable", reason=DIED)
            dead.update(status="resumable")

    def end(self) -> None:
        """Record the run's outcome, and wait a limited time until MLflow has received it.

        Its report, if it makes one, is written meanwhile; ``send_report`` waits for it.
        """
        outcome = self.run.outcome()
        self.run.update(status=outcome)
        self.ledger.finish_run(outcome)
        if self._report is None:
            self.draw_report()
        if self._report is not None:
            self._report.write()
        self.ledger.flush()
        self.run.update(mlflow_run_id=self.ledger.mlflow_run_id())

    def draw_report(self) -> None:
        """Let a process draw the present parts of the run's report, if the run makes one."""
        if self._report is not None:
            self._report.draw()
        elif self.makes_report:
            self._report = ReportProcess(self.run)

    def send_report(self) -> Path | None:
        """Wait for the report that ``end`` has requested, and log it; returns None if there is none, and the run goes
        on."""
        return None if self._report is None else self._report.finish(self.ledger, self.watcher)

    def request_stop(self) -> None:
        """Ask running stages to save their state and stop."""
        self.watcher.say("  stopping: running stages save their state", "yellow")
        self.stop.set()

    def drain(self) -> None:
        """Stop because this process's worker ends; another worker goes on with the run, and joins its attempts on
        pools."""
        if not self.stop.is_set():
            self.stop.leaves_pools = True
            self.request_stop()

    def cancel(self) -> None:
        """Cancel the run, as requested in Prefect or by ``vantage cancel``."""
        self.cancelled = True
        self.stop.leaves_pools = False
        self.watcher.say("  cancelled", "yellow")
        self.request_stop()

    def take_up_answers(self) -> bool:
        """Take up people's new answers; returns whether there were any.

        This includes an answer that another step's thread took up before its stage was recorded as waiting.
        """
        with self._answering:
            new = self.run.take_up_answers()
            record = self.run.record
            early = [
                answer
                for subject, question in record.questions.items()
                if subject in record.stages
                and record.stages[subject].status == "waiting_approval"
                and (answer := answer_to(question, record.approvals)) is not None
                and answer not in new
            ]
            for answer in (*new, *early):
                self._recording.answered(answer)
            return bool(new or early)

    def blocked(self) -> list[str]:
        """Return the steps that did not start because of another step, in order."""
        return [step for step in self.inputs if self.run.record.stages[step].status == "blocked"]

    # The order

    def obstacle(self, step: str) -> str | None:
        """Return why the step cannot start, once its inputs are over; None: it can."""
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
        """Return the implicit steps that read no stage; all of them run first, so that bad input is refused before anything trains."""
        return [
            step
            for step, read in self.inputs.items()
            if step not in self.recipe.stages and not set(read.values()) & set(self.recipe.stages)
        ]

    def block(self, step: str, reason: str) -> StageRecord:
        """Record that the step did not start."""
        return self._recording.ended(
            step, status="resumable" if self.stop.is_set() else "blocked", reason=reason
        )

    # One attempt

    def tries_again(self, step: str) -> bool:
        """Return whether this process starts another attempt at the step if the last one is resumable."""
        return self.retries and not self.stop.is_set() and self._retries.is_another_allowed(step)

    def attempt_name(self, request: AttemptRequest) -> str:
        """Return the step and the number of the attempt, and the stage's length if it goes on from a shorter stage."""
        is_same = self.run.record.stages[request.step].stage_key in (None, request.stage_key)
        number = self.next_attempt(request.step) if is_same else 1
        length = (
            ""
            if request.extends is None
            else f" · {length_in_words(length_of(request.work), unit_of(request.work))}"
        )
        return f"{request.step}{length} · attempt {number}"

    def next_attempt(self, step: str) -> int:
        """Return the number of the attempt that made the step's artifact, or of the next attempt."""
        known = self.run.record.stages[step]
        return (known.attempt or 0) + (known.digest is None) or 1

    def request(
        self, step: str, share: Share | None = None, *, only_reuse: bool = False
    ) -> AttemptRequest | None:
        """Return the request for an attempt at the step; None if it cannot be made, with the reason in the step's record.

        Args:
            step: a step all of whose inputs exist.
            share: resources to compute on; None: the whole machine.
            only_reuse: whether the attempt may only reuse a stored artifact.
        """
        began, known = time.monotonic(), self.run.record.stages[step]
        try:
            read = self._read_by(step)
            place = self._extending.place(self.steps[step], read)
            self._recording.goes_on_from(step, place)
            request = request_for(
                place.step,
                {**with_bases(read, self.artifacts.values()), **place.inputs},
                run_id=self.run.record.run_id,
                storage=self.store.address,
                log=self.log_of(step),
                share=share,
                only_reuse=only_reuse,
                microbatch_tokens=known.microbatch_tokens,
                microbatch_size=known.microbatch_size,
                extends=place.extends,
                function=self.stage_function,
            )
            self.run.use_key(step, request.stage_key)
            if not self.store.has_scratch(request.stage_key):
                return request
            return request.model_copy(update={"made_with": self._last_made_with(request.stage_key)})
        except Exception as error:  # a source that cannot be read must not fail the stages that run beside it
            self._log_traceback(step, error)
            outcome = AttemptOutcome(
                status="failed", failure=explain(error), seconds=time.monotonic() - began
            )
            self._failed(step, outcome)
            return None

    def extends(self, step: str) -> bool:
        """Return whether a closed gate asks to train the step further now; a run that is asked to stop does that
        later."""
        if self._extending.next_place(self.steps[step], self._read_by(step)) is None:
            return False
        if self.stop.is_set():
            self._recording.ended(
                step, status="resumable", reason="the run was stopped before it was extended"
            )
            return False
        return True

    def _read_by(self, step: str) -> dict[str, Artifact]:
        return {role: self.artifacts[read] for role, read in self.inputs[step].items()}

    def attempt(self, request: AttemptRequest) -> StageRecord:
        """Make the attempt and record its outcome; errors are recorded, never raised."""
        step = request.step
        began = time.monotonic()
        self._retries.begins(step)
        try:
            if self._is_last(step):
                self.draw_report()
            pool, observer = self.steps[step].pool, self._recording.observer(request)
            # A worker checks files that it fetches from a bucket, but reads a folder in place.
            reads_folders = pool is None or isinstance(self.store, Store)
            for _ in range(2):
                if reads_folders:
                    self._mend_inputs(request)  # inputs are compared before anything parses them
                if pool is None:
                    outcome = run_attempt(
                        request,
                        observer=observer,
                        stop=self.stop,
                        storage=self.store,
                        launcher=self._launcher,
                    )
                else:
                    outcome = self._attempt_on_pool(request, pool, observer)
                if not reads_folders or not self._has_read_damage(request, outcome):
                    break
            if outcome.artifact is not None:
                self.artifacts[step] = outcome.artifact
                return self._recording.succeeded(request, outcome, outcome.artifact)
        except _InputLost as lost:  # the next attempt takes the inputs that exist by then
            remedy = "run the same command again"
            failure = Failure(exit_code=ExitCode.RESUME, cause="killed", message=str(lost), remedy=remedy)
            outcome = AttemptOutcome(status="failed", failure=failure, seconds=time.monotonic() - began)
        except Exception as error:  # a fault of ours, or a full disk
            self._log_traceback(step, error)
            outcome = AttemptOutcome(
                status="failed", failure=explain(error), seconds=time.monotonic() - began
            )
        if outcome.status == "stopped":
            left = self.steps[step].pool is not None and self.stop.leaves_pools
            reason = (
                "it goes on without this process" if left else "the run was stopped before the stage began"
            )
            return self._recording.ended(step, status="resumable", reason=reason)
        if outcome.status == "absent":
            return self._recording.ended(
                step, status="resumable", reason="its artifact was lost after the run was planned"
            )
        return self._failed(step, outcome)

    def _is_last(self, step: str) -> bool:
        """Return whether all other steps are over, so that only text changes in their part of the report."""
        others = (stage.status for other, stage in self.run.record.stages.items() if other != step)
        return not {"waiting", "running"} & set(others)

    def _has_read_damage(self, request: AttemptRequest, outcome: AttemptOutcome) -> bool:
        """Return whether a damaged input may have made the attempt fail, and there is one."""
        failure = outcome.failure
        return (
            failure is not None and failure.cause in _CAUSES_OF_DAMAGE and bool(self._damaged_inputs(request))
        )

    def _damaged_inputs(self, request: AttemptRequest) -> dict[str, str]:
        """Set aside damaged artifacts among the inputs of the request; returns step → damage."""
        found = {}
        for read in () if request.only_reuse else dict.fromkeys(self.inputs[request.step].values()):
            artifact = self.artifacts[read]
            there = self.store.lookup(artifact.stage_key)
            if there.ref is None or there.ref.artifact.digest != artifact.digest:
                found[read] = "; ".join(there.damage) or "it is not in the store any longer"
        return found

    def _mend_inputs(self, request: AttemptRequest) -> None:
        """Make damaged inputs again; raises _InputLost if the new bits differ from those in the request."""
        with self._mending:  # several running stages may read the same artifact
            for read, problem in self._damaged_inputs(request).items():
                wanted = self.artifacts[read].digest
                self._recording.observer(request).input_damaged(read, problem)
                again = self.request(read, request.share)
                record = None if again is None else self.attempt(again)
                if record is None or record.status not in SUCCEEDED:
                    raise _InputLost(f"its input {read} is damaged and could not be made again")
                if record.digest != wanted:
                    raise _InputLost(
                        f"its input {read} was damaged, and was made again with other bits ({str(record.digest)[:12]}, not "
                        f"{wanted[:12]})"
                    )

    def _attempt_on_pool(self, request: AttemptRequest, pool: str, observer: Observer) -> AttemptOutcome:
        """Reuse the artifact, or have a worker of the pool make it."""
        # An existing artifact is not fetched to this machine; workers verify the files that they read.
        found = self.store.inspect(request.stage_key)
        if found.ref is not None and found.ref.serves(request.run_id):
            return reused(request, found.ref, self.store)
        if request.only_reuse:
            return AttemptOutcome(status="absent")
        from vantage.flows.pools.run_on_pool import run_on_pool  # imports Prefect

        server = server_name(self.run.workspace.root)
        return run_on_pool(
            request,
            pool=pool,
            storage=self.store,
            observer=observer,
            stop=self.stop,
            outages=self.outages,
            started=partial(self.run.add_attempt, server=server),
        )

    def log_of(self, step: str) -> Path:
        """Return the file that receives all output of the step's process."""
        return self.run.folder / "logs" / f"{step}.log"

    def progress(self, step: str) -> StageProgress | None:
        """Return the progress of the running step."""
        key = self.run.record.stages[step].stage_key
        return read_progress(self.store.reports(key, (PROGRESS,)) / PROGRESS) if key else None

    def _failed(self, step: str, outcome: AttemptOutcome) -> StageRecord:
        """Record why the step failed, and how it is retried."""
        progress, known = self.progress(step), self.run.record.stages[step]
        retry = self._retries.after(
            step,
            outcome,
            attempt=known.attempt,
            goes_on=self.tries_again(step),
            microbatch_tokens=known.microbatch_tokens,
            pass_rows=None if progress is None else progress.pass_rows,
            pass_tokens=None if progress is None else progress.pass_tokens,
        )
        return self._recording.failed(step, outcome, retry, log=self.log_of(step))

    def _last_made_with(self, key: str) -> Mapping[str, str]:
        """Return the provenance recorded by the newest run that computed this key; this run comes first."""
        records = [self.run.record, *read_runs(self.run.workspace)]
        stages = (stage for record in records for stage in record.stages.values())
        return next((stage.provenance for stage in stages if stage.stage_key == key and stage.provenance), {})

    def _log_traceback(self, step: str, error: Exception) -> None:
        log = self.log_of(step)
        with suppress(OSError):  # a full disk must not hide the error
            make_folder(log.parent)
            with log.open("a") as file:
                file.write(without_secrets("".join(traceback.format_exception(error))))
