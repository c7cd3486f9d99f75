"""One stage's life: key → lock → reuse or run → commit → verdict recorded, then enforced → ledger.

Nothing here knows who orders the stages. Every line may be the last one before a kill: what the store holds then
is whole, and the same command goes on from it.
"""

import json
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.attempts.dataset_check import check_dataset
from flows.attempts.jobs import (
    gates_of,
    job_for,
    key_parts_of,
    resources_of,
    threads_of,
    work_of,
)
from flows.attempts.micro_batches import in_micro_batches, remedy_for_memory, rows_at_once
from flows.attempts.provenance import drift, provenance
from flows.attempts.watching import Watcher, feed, journal_entries
from flows.exit_codes import ExitCode, has_second_chance, may_be_retried
from flows.launchers.local_process import (
    RUN_STAGE,
    StageFailed,
    launch,
    result_left,
)
from flows.launchers.stage_process import explain
from flows.machine import Share
from flows.runs.origin import origin
from flows.runs.run import (
    GOOD,
    Run,
    RunError,
    StageRecord,
    dead_runs,
    read_run,
    read_runs,
)
from ledger.operations import Input, StageOutcome
from ledger.run_ledger import Ledger
from ledger.sameness import compared_with_itself, remark_on
from schemas.kinds import KINDS, MODELS
from schemas.recipe.work import PrepareData
from schemas.records.artifacts import Artifact
from schemas.records.job import StageJob, StageResult
from schemas.records.metric_warnings import left_out, warnings_of
from schemas.records.stage_key import stage_key
from schemas.records.verdicts import judge_artifact
from schemas.safe_text import safe_text, without_secrets
from schemas.steps import dependencies, order
from storage.refs import Ref
from storage.store import Locked, Store
from tasks.training.progress import StageProgress, read_progress
from tasks.training.scratch import PROGRESS, read_committed

DIED = "the run's process died"
"""What the next run that begins in the workspace records of one that nobody drives, and of its running stages."""
_PATIENCE_SECONDS = 1.0
"""How long another holder of a stage key is waited for before asking whether the run was stopped."""


class Stopped(Exception):
    """The run was asked to stop before the stage began."""


class Gone(Exception):
    """An artifact that was to be reused is damaged or removed."""


@dataclass(frozen=True)
class Obtained:
    """A step's artifact, and how it came about."""

    artifact: Artifact
    reused: bool
    """It was in the store."""
    untold: bool
    """This run made it, and the ledger has not heard of that yet."""
    made_with: dict[str, str]
    """Its provenance."""
    samples: tuple[dict[str, Any], ...] = ()


class StageLife:
    """The lives of all steps of one run."""

    def __init__(
        self, run: Run, *, store: Store, ledger: Ledger, watcher: Watcher, stage_function: str = RUN_STAGE
    ) -> None:
        self.run = run
        self.recipe = run.record.recipe
        self.store = store
        self.ledger = ledger
        self.watcher = watcher
        self.stage_function = stage_function
        self.stop = threading.Event()
        """Once set, running stages save their state and end, and no other begins."""
        self.cancelled = False
        """Whether it was Prefect that asked."""
        self.inputs = {step: dependencies(self.recipe)[step] for step in order(self.recipe)}
        """Step → role → step that it reads; every step comes after all that it reads."""
        self.artifacts: dict[str, Artifact] = {}
        """What the steps that went well have made."""
        self._second_chances: set[tuple[str, int]] = set()
        """Steps that were begun again after an end that allows it once, with its exit code."""
        known = run.record.stages
        waiting = {"status": "waiting", "reason": None, "exit_code": None, "seconds": 0.0, "verdicts": ()}
        run.update(
            unpublished={},
            stages={step: known.get(step, StageRecord()).model_copy(update=waiting) for step in self.inputs},
        )

    def attempt(self, step: str) -> int:
        """The number of the attempt that this run would begin at the step, or that made its artifact."""
        known = self.run.record.stages[step]
        return (known.attempt or 0) + (known.digest is None) or 1

    def request_stop(self) -> None:
        """Ask running stages to save their state and end."""
        self.watcher.say("  stopping: running stages save their state", "yellow")
        self.stop.set()

    def cancel(self) -> None:
        """The run was cancelled in Prefect."""
        self.cancelled = True
        self.watcher.say("  cancelled in Prefect", "yellow")
        self.request_stop()

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

    def progress(self, step: str) -> StageProgress | None:
        """How far the running step is."""
        key = self.run.record.stages[step].stage_key
        return read_progress(self.store.root / "scratch" / key / PROGRESS) if key else None

    def obstacle(self, step: str) -> str | None:
        """Why the step cannot start, now that everything it reads is over; None where it can."""
        if self.stop.is_set():
            return "the run was stopped"
        for read in self.inputs[step].values():
            status = self.run.record.stages[read].status
            if status not in GOOD:
                return f"reads {read}, which is {status.replace('_', ' ')}"
        for before in self.before_any_stage() if step in self.recipe.stages else ():
            status = self.run.record.stages[before].status
            if status not in GOOD:
                return f"waits for {before}, which is {status.replace('_', ' ')}"
        return None

    def before_any_stage(self) -> list[str]:
        """The implicit steps: what is refused is refused before anything trains."""
        return [step for step in self.inputs if step not in self.recipe.stages]

    def block(self, step: str, reason: str) -> StageRecord:
        """Record that the step did not start."""
        return self._end(step, status="resumable" if self.stop.is_set() else "blocked", reason=reason)

    def live(self, step: str, share: Share | None = None, *, from_store: bool = False) -> StageRecord:
        """One attempt at the step, from its key to its ledger entry; whatever goes wrong is in the record.

        Args:
            share: of the machine, to compute on; None: all of it.
            from_store: compute nothing; an artifact that is not there leaves the step resumable.
        """
        began = time.monotonic()
        try:
            # 1. What the step's result depends on
            inputs = {
                role: Input(stage=read, artifact=self.artifacts[read])
                for role, read in self.inputs[step].items()
            }
            parts = key_parts_of(
                self.recipe, step, {role: given.artifact.digest for role, given in inputs.items()}
            )
            key = stage_key(parts)
            with self._exclusive(step, key):
                # 2. An artifact, from the store or from a child process
                obtained = self._find(step, key, parts, inputs)
                if obtained is None:
                    if from_store:
                        raise Gone
                    obtained = self._make(step, key, parts, inputs, share)
                artifact = self.artifacts[step] = obtained.artifact
                # 3. What its gates say, recorded before anything follows from it
                equal = compared_with_itself(inputs)
                verdicts = tuple(
                    judge_artifact(gate, artifact, equal=equal) for gate in gates_of(self.recipe, step)
                )
                closed = any(not verdict.passed and verdict.on_fail == "stop" for verdict in verdicts)
                if verdicts:
                    self.ledger.record_verdicts(step, verdicts)
                stage = StageRecord(
                    status="gate_closed" if closed else "reused" if obtained.reused else "completed",
                    attempt=self.run.record.stages[step].attempt,
                    stage_key=key,
                    digest=artifact.digest,
                    metrics=artifact.metrics,
                    remark=remark_on(artifact, inputs),
                    left_out=left_out(artifact.metrics, self._reasons(artifact)),
                    warnings=warnings_of(artifact.metrics),
                    verdicts=verdicts,
                    seconds=0.0 if obtained.reused else time.monotonic() - began,
                    key_parts=parts,
                    provenance=obtained.made_with,
                    samples=obtained.samples,
                    microbatch_size=self.run.record.stages[step].microbatch_size,
                )
                self.run.set_stage(step, stage)
                # 4. The ledger
                if obtained.untold:
                    self._tell(step, obtained, "gate_closed" if closed else "completed")
        except Stopped:
            return self._end(step, status="resumable", reason="the run was stopped before the stage began")
        except Gone:
            return self._end(
                step, status="resumable", reason="its artifact was lost after the run was planned"
            )
        except Exception as error:  # a stage that fails must not take those beside it along
            return self._fail(step, error, seconds=time.monotonic() - began)
        self.watcher.ended(step, stage)
        return stage

    def log_of(self, step: str) -> Path:
        """Where everything that the step's process prints goes."""
        return self.run.folder / "logs" / f"{step}.log"

    # From key to artifact

    @contextmanager
    def _exclusive(self, step: str, key: str) -> Iterator[None]:
        """Be the only one who works on the key; Stopped if the run is stopped while another does."""
        told: set[str] = set()

        def tell(holder: str) -> None:
            if holder not in told:
                told.add(holder)
                self.watcher.say(f"  {step}: waits for {holder}, which makes the same artifact", "dim")

        holder = f"run {self.run.record.run_id}"
        with ExitStack() as held:
            while not self.stop.is_set():
                turn = self.store.exclusive(key, holder=holder, on_wait=tell, timeout=_PATIENCE_SECONDS)
                try:
                    held.enter_context(turn)
                except Locked:
                    continue
                yield
                return
            raise Stopped

    def _find(
        self, step: str, key: str, parts: Mapping[str, Any], inputs: Mapping[str, Input]
    ) -> Obtained | None:
        """The artifact that the store has for the key, every file of it checked; damage is told, never used."""
        found = self.store.lookup(key)
        for damage in found.damage:
            self.watcher.say(f"  {step}: the stored artifact is damaged and made again: {damage}", "red")
        if found.ref is None:
            return None
        untold = found.ref.run_id == self.run.record.run_id and self._has_scratch(key)
        told = self._told(step, key, parts, inputs)
        if untold:  # this run made it, and was killed before it had told everything
            self.ledger.open_stage(step, attempt=found.ref.attempt, **told)
        else:
            folder = self.store.folder(found.ref.artifact)
            self.ledger.record_reuse(step, artifact=found.ref.artifact, folder=folder, **told)
        return Obtained(
            found.ref.artifact,
            reused=True,
            untold=untold,
            made_with=found.ref.provenance,
            samples=self._samples_of(found.ref),
        )

    def _make(
        self, step: str, key: str, parts: dict[str, Any], inputs: Mapping[str, Input], share: Share | None
    ) -> Obtained:
        """Run the step in a child process and commit what it made."""
        attempt = self.store.next_attempt(key)
        made_with = self._provenance(step, key, share)
        smaller = self.run.record.stages[step].microbatch_size
        begun = StageRecord(
            status="running",
            attempt=attempt,
            stage_key=key,
            key_parts=parts,
            provenance=made_with,
            microbatch_size=smaller,
        )
        self.run.set_stage(step, begun)
        self.ledger.open_stage(step, attempt=attempt, **self._told(step, key, parts, inputs))
        self.watcher.started(step, attempt)
        job = job_for(
            self.recipe,
            step,
            run_id=self.run.record.run_id,
            attempt=attempt,
            stage_key=key,
            inputs={role: self.store.folder(given.artifact) for role, given in inputs.items()},
            scratch=self.store.scratch_folder(key),
            output=self.store.staging_folder(key, attempt),
            threads=threads_of(share),
            source_sha256=parts["inputs"].get("source"),
        )
        job = job.model_copy(update={"work": in_micro_batches(job.work, smaller)})
        result = launch(
            job,
            log=self.log_of(step),
            share=share,
            stop=self.stop,
            on_poll=feed(step, job.scratch, watcher=self.watcher, ledger=self.ledger),
            stage=self.stage_function,
            hang_seconds=resources_of(self.recipe, step).hang_seconds,
        )
        if (content := KINDS[job.work.kind].content) is not None:
            check_dataset(job.output, content, step=step)
        artifact = self.store.commit(
            job.output,
            stage_key=key,
            attempt=attempt,
            run_id=job.run_id,
            description=_description(job, result, inputs),
            key_parts=parts,
            provenance=made_with,
        )
        return Obtained(artifact, reused=False, untold=True, made_with=made_with, samples=result.samples)

    def _provenance(self, step: str, key: str, share: Share | None) -> dict[str, str]:
        """What the step is about to be made with, and how that differs from an attempt that it goes on from."""
        present = provenance(work_of(self.recipe, step).kind, threads=threads_of(share))
        step_reached, _ = read_committed(self.store.scratch_folder(key))
        before = self._last_made_with(key) if step_reached else {}
        changed = drift(before, present) if before else []
        if changed:
            present["resumed_across"] = "; ".join(changed)
        if smaller := self.run.record.stages[step].microbatch_size:
            asked = rows_at_once(work_of(self.recipe, step), self._read(step))
            present["microbatch_size"] = f"{smaller} in place of {asked}: memory ran out"
        return present

    def _last_made_with(self, key: str) -> Mapping[str, object]:
        """What the newest run that began to compute the key, this one first, recorded of how."""
        records = [self.run.record, *read_runs(self.run.workspace)]
        stages = (stage for record in records for stage in record.stages.values())
        return next((stage.provenance for stage in stages if stage.stage_key == key and stage.provenance), {})

    def _samples_of(self, ref: Ref) -> tuple[dict[str, Any], ...]:
        """The texts that the run which made the artifact has kept, or that were left when it was killed before it could."""
        key = ref.artifact.stage_key
        with suppress(RunError):
            stages = read_run(self.run.workspace, ref.run_id).stages.values()
            if kept := next((stage.samples for stage in stages if stage.stage_key == key), ()):
                return kept
        left = result_left(self.store.root / "scratch" / key, ref.attempt)
        return left.samples if left else ()

    def _reasons(self, artifact: Artifact) -> dict[str, int]:
        """Why rows of a dataset were dropped → how many."""
        report = self.store.folder(artifact) / "report.json"
        if artifact.kind != "dataset" or not report.is_file():
            return {}
        reasons: dict[str, int] = json.loads(report.read_text()).get("dropped", {})
        return reasons

    def _has_scratch(self, key: str) -> bool:
        return (self.store.root / "scratch" / key).is_dir()

    # What is recorded

    def _told(
        self, step: str, key: str, parts: Mapping[str, Any], inputs: Mapping[str, Input]
    ) -> dict[str, Any]:
        """What the ledger is told of every stage."""
        work = work_of(self.recipe, step)
        return {
            "kind": work.kind,
            "stage_key": key,
            "params": work.model_dump(mode="json"),
            "inputs": inputs,
            "source_sha256": parts["inputs"].get("source"),
        }

    def _tell(self, step: str, obtained: Obtained, outcome: StageOutcome) -> None:
        """Tell the ledger the rest of the metrics and the artifact; the scratch folder has then done its duty."""
        key = obtained.artifact.stage_key
        self.ledger.send_metrics(step, journal_entries(self.store.scratch_folder(key)))
        self.ledger.finish_stage(
            step,
            outcome,
            artifact=obtained.artifact,
            folder=self.store.folder(obtained.artifact),
            provenance=obtained.made_with,
        )
        self.store.discard_scratch(key)

    def _fail(self, step: str, error: Exception, *, seconds: float) -> StageRecord:
        """Record why the step has no result, and whether it can be resumed."""
        if isinstance(error, StageFailed):
            exit_code, message, remedy = error.exit_code, error.message, error.remedy
        else:
            failure = explain(error)
            exit_code, message, remedy = failure.exit_code, failure.message, failure.remedy
            self._log_traceback(step, error)
        status: StageOutcome = "resumable" if may_be_retried(exit_code) else "failed"
        if isinstance(error, StageFailed) and has_second_chance(exit_code):
            status, remedy = self._second_chance(step, error)
        reason = safe_text(f"{message}; {remedy} ({self.log_of(step)})")
        if self.run.record.stages[step].status == "running":
            self.ledger.finish_stage(step, status, reason=reason)
        return self._end(step, status=status, reason=reason, exit_code=exit_code, seconds=seconds)

    def _second_chance(self, step: str, error: StageFailed) -> tuple[StageOutcome, str]:
        """(Status, what is done next) after memory ran out or the stage hung.

        One more attempt in this process, after a lack of memory with half the micro-batch; then a person has to look.
        """
        given = (step, error.exit_code) in self._second_chances
        self._second_chances.add((step, error.exit_code))
        stage = self.run.record.stages[step]
        at_step, _ = read_committed(self.store.scratch_folder(str(stage.stage_key)))
        place = f"goes on from step {at_step}" if at_step else "begins anew"
        next_attempt = f"attempt {(stage.attempt or 0) + 1} {place}"
        if error.exit_code == ExitCode.OUT_OF_MEMORY:
            work = in_micro_batches(work_of(self.recipe, step), stage.microbatch_size)
            rows = rows_at_once(work, self._read(step))
            if given or rows is None or rows < 2:
                return "failed", remedy_for_memory(step, rows)
            self.run.update_stage(step, microbatch_size=rows // 2)
            return "resumable", f"{next_attempt} with micro-batches of {rows // 2} in place of {rows}"
        return ("failed", error.remedy) if given else ("resumable", next_attempt)

    def _read(self, step: str) -> dict[str, Artifact]:
        """Role → artifact that the step reads."""
        return {role: self.artifacts[read] for role, read in self.inputs[step].items()}

    def _end(self, step: str, **changes: Any) -> StageRecord:
        self.run.update_stage(step, **changes)
        stage = self.run.record.stages[step]
        self.watcher.ended(step, stage)
        return stage

    def _log_traceback(self, step: str, error: Exception) -> None:
        log = self.log_of(step)
        with suppress(OSError):  # a disk that is full holds up nothing here
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as file:
                file.write(without_secrets("".join(traceback.format_exception(error))))


def _description(job: StageJob, result: StageResult, inputs: Mapping[str, Input]) -> dict[str, Any]:
    """What the artifact says of itself, by the kind of work that made it."""
    row = KINDS[job.work.kind]
    own: dict[str, Any] = {}
    if isinstance(job.work, PrepareData):
        own["content"] = job.work.content
    elif row.content is not None:
        own["content"] = row.content
    elif row.makes in MODELS:
        own["tokenizer_digest"] = result.tokenizer_digest
    parents = {role: given.artifact.digest for role, given in inputs.items()}
    return {
        "kind": row.makes,
        "parents": parents,
        "metrics": result.metrics,
        "uncertainty": result.uncertainty,
        **own,
    }
