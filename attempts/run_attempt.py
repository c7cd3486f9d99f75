"""One attempt at a step: lock its stage key, reuse its artifact or compute and commit it, return the outcome.

It works the same in the orchestrator's process, in another process, and on another machine that reaches the same
storage. It knows nothing of Prefect, MLflow, gates and runs. The process may be killed at any line: the storage stays
consistent, and the same request resumes from it.
"""

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from vantage.attempts.dataset_check import check_dataset
from vantage.attempts.energy import EnergyMeter
from vantage.attempts.facts import read_facts
from vantage.attempts.identity.environment import environment
from vantage.attempts.identity.identity import identity
from vantage.attempts.jobs import threads_of
from vantage.attempts.keeping_answers import answers_kept, restore_answers, unequal_bits
from vantage.attempts.keeping_state import check_previous_state, state_kept
from vantage.attempts.launchers.launcher import Launcher, StageFailed
from vantage.attempts.launchers.local_process import LocalProcess, saved_result
from vantage.attempts.launchers.stage_process import explain
from vantage.attempts.machine import available_gpus, num_nodes, num_ranks
from vantage.attempts.micro_batches import with_limits
from vantage.attempts.provenance import drift, provenance
from vantage.attempts.segments import SEGMENTS, begin_segment, ranks_of, read_segments
from vantage.attempts.usage import UsageMeter
from vantage.schemas.kind import TOKENIZED
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.extending import PREVIOUS
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.verifiers import Verifier
from vantage.schemas.recipe.work import SOURCE, ImportVerifier, MixData, PrepareData, copied_stage
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import AttemptBegun, AttemptOutcome, AttemptRequest
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.extensions import Shorter
from vantage.schemas.records.facts import Facts
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.usage import Usage
from vantage.schemas.safe_text import without_secrets
from vantage.storage.durable_files import make_folder
from vantage.storage.environments import keep_environment
from vantage.storage.key_locks import Locked
from vantage.storage.refs import Ref
from vantage.storage.storage import Storage, open_storage
from vantage.tasks.rewards.configuration import read_configuration
from vantage.tasks.rewards.sandbox import recorded as recorded_isolation
from vantage.tasks.training.scratch import (
    REPORTS,
    RESUMED_FROM,
    describe_found,
    forget_found,
    read_committed,
)
from vantage.tasks.training.watched import read_watched

_PATIENCE_SECONDS = 1.0
"""Seconds to wait for the stage key before checking whether a stop was requested."""


class Observer(Protocol):
    """Callbacks during an attempt, called in the thread of ``run_attempt``."""

    def waits(self, holder: str) -> None:
        """Record that another process holds the stage key."""

    def queued(self, pool: str) -> None:
        """Report that the attempt waits for a worker of the work pool."""

    def damaged(self, problem: str) -> None:
        """Report that a stored artifact is damaged and will be made again."""

    def begun(self, begun: AttemptBegun) -> None:
        """Report that a computation is about to begin; the computation waits until this returns."""

    def polled(self) -> None:
        """Report that the computation is running; called a few times a second."""


class Unobserved:
    """An ``Observer`` that does nothing."""

    def waits(self, holder: str) -> None: ...
    def queued(self, pool: str) -> None: ...
    def damaged(self, problem: str) -> None: ...
    def begun(self, begun: AttemptBegun) -> None: ...
    def polled(self) -> None: ...


class _Stopped(Exception):
    """A stop was requested before the attempt began."""


def run_attempt(
    request: AttemptRequest,
    *,
    observer: Observer | None = None,
    stop: threading.Event | None = None,
    storage: Storage | None = None,
    launcher: Launcher | None = None,
) -> AttemptOutcome:
    """Make one attempt; errors are in the outcome, never raised.

    Args:
        request: the work.
        observer: called during the attempt; None: nobody.
        stop: when set, a computation saves its state and stops, and none starts.
        storage: the opened ``request.storage``; None: open it.
        launcher: launcher of the computation; None: a child process on this machine.
    """
    attempt = _Attempt(
        request,
        observer or Unobserved(),
        stop or threading.Event(),
        storage or open_storage(request.storage),
        launcher or LocalProcess(grace=request.resources.grace_seconds),
    )
    began = time.monotonic()
    try:
        with attempt.exclusive():
            outcome = attempt.reuse()
            if outcome is None:
                begun, job = attempt.begin()
                reported = tuple(dict.fromkeys((*RESUMED_FROM, *REPORTS, SEGMENTS)))
                with attempt.storage.keep_copy(request.stage_key, reported), attempt.measured() as polled:
                    result = attempt.launcher.launch(
                        job,
                        log=request.log,
                        share=request.share,
                        stop=attempt.stop,
                        on_poll=polled,
                        function=request.function,
                        hang_seconds=request.resources.hang_seconds,
                    )
                outcome = attempt.commit(begun, job, result)
    except _Stopped:
        outcome = AttemptOutcome(status="stopped")
    except Exception as error:  # a failed attempt must not stop those that run beside it
        outcome = attempt.failed(error)
    measured = {"energy": attempt.energy, "usage": attempt.usage, "facts": attempt.facts}
    return outcome.model_copy(update={"seconds": time.monotonic() - began, **measured})


def reused(request: AttemptRequest, ref: Ref, storage: Storage) -> AttemptOutcome:
    """Return the outcome of a request whose artifact exists; none of its files are fetched."""
    return AttemptOutcome(
        status="reused",
        attempt=ref.attempt,
        artifact=ref.artifact,
        provenance=ref.provenance,
        made_by=ref.run_id,
        firings=ref.artifact.firings,
        unreported=ref.run_id == request.run_id and storage.has_scratch(request.stage_key),
    )


class _Attempt:
    """The parts of ``run_attempt``; they share the request and the state of the computation."""

    def __init__(
        self,
        request: AttemptRequest,
        observer: Observer,
        stop: threading.Event,
        storage: Storage,
        launcher: Launcher,
    ) -> None:
        self.request = request
        self.observer = observer
        self.stop = stop
        self.storage = storage
        self.launcher = launcher
        self.begun: AttemptBegun | None = None
        self.energy: Energy | None = None
        self.usage: Usage | None = None
        self.facts: Facts = {}

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the stage key; raise _Stopped if a stop is requested while another process holds it."""
        reported: set[str] = set()

        def tell(holder: str) -> None:
            if holder not in reported:
                reported.add(holder)
                self.observer.waits(holder)

        key, holder = self.request.stage_key, f"run {self.request.run_id}"
        with ExitStack() as held:
            while not self.stop.is_set():
                turn = self.storage.exclusive(key, holder=holder, on_wait=tell, timeout=_PATIENCE_SECONDS)
                try:
                    held.enter_context(turn)
                except Locked:
                    continue
                yield
                return
            raise _Stopped

    def reuse(self) -> AttemptOutcome | None:
        """Return the outcome with the key's stored artifact, all of whose files were verified; a damaged one is
        reported and not used."""
        key = self.request.stage_key
        found = self.storage.lookup(key)
        for problem in found.damage:
            self.observer.damaged(problem)
        ref = found.ref
        if ref is None or not ref.serves(self.request.run_id):
            return AttemptOutcome(status="absent") if self.request.only_reuse else None
        outcome = reused(self.request, ref, self.storage)
        result = (
            saved_result(self.storage.scratch_folder(key), ref.attempt)
            if self.storage.has_scratch(key)
            else None
        )
        return outcome.model_copy(
            update={
                "samples": result.samples if result else (),
                "dropped": self._dropped(ref.artifact),
            }
        )

    def begin(self) -> tuple[AttemptBegun, StageJob]:
        """Begin an attempt: its number, scratch folder, provenance and job."""
        key = self.request.stage_key
        number = self.storage.next_attempt(key)
        scratch = self.storage.scratch_folder(key)
        check_previous_state(self.storage, self.request.inputs)
        restore_answers(self.storage, self.request, scratch)
        keep_environment(self.storage, environment())
        if getattr(self.request.work, "microbatch_tokens", None) is not None:
            forget_found(scratch)  # the recipe's value replaces the limits that were found
        begun = AttemptBegun(attempt=number, provenance=self._provenance(scratch), scratch=scratch)
        if isinstance(self.request.work, Stage):
            begin_segment(scratch, attempt=number, ranks=num_ranks(self.request.work, self.request.share))
        self.begun = begun
        self.observer.begun(begun)
        return begun, self._job(number, scratch)

    @contextmanager
    def measured(self) -> Iterator[Callable[[], None]]:
        """Measure the machine during a computation, however it ends; the yielded function is called while it runs."""
        request = self.request
        # other nodes have their own counters
        is_here = num_nodes(request.work) == 1
        gpus = request.share.gpus if request.share else available_gpus()
        energy, usage = (EnergyMeter(gpus), UsageMeter(gpus)) if is_here else (None, None)
        self.facts = read_facts() if is_here else {}

        def polled() -> None:
            self.observer.polled()
            for meter in (energy, usage):
                if meter is not None:
                    meter.poll()

        try:
            yield polled
        finally:
            self.energy = energy.finish() if energy is not None else None
            self.usage = usage.finish() if usage is not None else None

    def commit(self, begun: AttemptBegun, job: StageJob, result: StageResult) -> AttemptOutcome:
        """Check the files in ``job.output`` and commit them as the artifact of the stage key."""
        request = self.request
        if (content := KINDS[job.work.kind].content) is not None:
            check_dataset(job.output, content, step=request.step)
        made_with = self._found_provenance(begun)
        with (
            state_kept(self.storage, request, begun.scratch, provenance=made_with),
            answers_kept(self.storage, request, begun.scratch, provenance=made_with) as answers,
        ):
            made_with = {**made_with, **answers}
            artifact = self.storage.commit(
                job.output,
                stage_key=request.stage_key,
                attempt=job.attempt,
                run_id=request.run_id,
                description=_description(request, result),
                key_parts=request.key_parts,
                provenance=made_with,
            )
        return AttemptOutcome(
            status="made",
            attempt=job.attempt,
            artifact=artifact,
            provenance=made_with,
            made_by=request.run_id,
            firings=result.firings,
            samples=result.samples,
            dropped=self._dropped(artifact),
        )

    def failed(self, error: Exception) -> AttemptOutcome:
        """Return the outcome of an error; an error of Vantage itself leaves its traceback in the log."""
        if isinstance(error, StageFailed):
            failure = error.failure
        else:
            failure = explain(error)
            self._log_traceback(error)
        if self.begun is None:
            return AttemptOutcome(status="failed", failure=failure)
        committed_step, _ = read_committed(self.begun.scratch)
        return AttemptOutcome(
            status="failed",
            attempt=self.begun.attempt,
            provenance=self._found_provenance(self.begun),
            committed_step=committed_step,
            firings=read_watched(self.begun.scratch).firings,
            failure=failure,
        )

    def _job(self, number: int, scratch: Path) -> StageJob:
        request = self.request
        return StageJob(
            run_id=request.run_id,
            name=request.step,
            attempt=number,
            stage_key=request.stage_key,
            seed=request.seed,
            work=with_limits(
                request.work,
                microbatch_size=request.microbatch_size,
                microbatch_tokens=request.microbatch_tokens,
            ),
            generation=request.generation,
            chat=request.chat,
            date=request.date,
            rewards=request.rewards,
            inputs={
                role: self.storage.folder(artifact)
                for role, artifact in request.inputs.items()
                if role != PREVIOUS  # a longer stage reads only the training state of its previous part
            },
            digests={role: artifact.digest for role, artifact in request.inputs.items()},
            max_dropped=request.max_dropped,
            source_sha256=request.key_parts["inputs"].get("source"),
            scratch=scratch,
            output=self.storage.staging_folder(request.stage_key, number),
            threads=threads_of(request.share, request.work),
        )

    def _provenance(self, scratch: Path) -> dict[str, str]:
        """Return the computation's provenance, its differences from that of the checkpoint that it resumes from, and its
        identity.

        The identity of code and machine is that of the process that computes or starts the computing processes. It is
        not compared: a revision or a driver changes often, and seldom changes the numbers.
        """
        request = self.request
        world_size = num_ranks(request.work, request.share)
        threads = threads_of(request.share, request.work)
        computes_now = provenance(request.work.kind, threads=threads, world_size=world_size)
        computes_now |= recorded_isolation(self._verifiers())
        present = dict(computes_now)
        committed_step, _ = read_committed(scratch)
        changed = drift(request.made_with, computes_now) if committed_step and request.made_with else []
        if changed:
            present["resumed_across"] = "; ".join(changed)
            before = request.made_with.get("world_size", "1")
            if before != str(world_size):
                present["not_bitwise"] = f"begun on {before} processes, continued on {world_size}"
        if request.extends is not None:
            present |= _extended(request.extends, request, computes_now)
        for name in ("microbatch_tokens", "microbatch_size"):
            if reduced := getattr(request, name):
                asked = getattr(request.work, name) or "any number"
                present[name] = f"{reduced} in place of {asked}: memory ran out"
        return {**present, **identity()}

    def _verifiers(self) -> Iterator[Verifier]:
        """Yield the recipe's own verifiers that the computation asks."""
        if isinstance(self.request.work, ImportVerifier):
            yield self.request.work.verifier
        for artifact in self.request.inputs.values():
            if artifact.kind == "verifier":
                yield read_configuration(self.storage.folder(artifact))

    def _found_provenance(self, begun: AttemptBegun) -> dict[str, str]:
        """Return the provenance of the computation with facts that were found during the computation.

        These are the limits that it found, unless memory ran out under others, and how many ranks have computed which
        steps: the number of nodes of a Ray cluster is known only when they take part.
        """
        found = describe_found(begun.scratch)
        limits = {} if found is None else {"microbatch_tokens": found}
        parts = [limits, begun.provenance, ranks_of(read_segments(begun.scratch))]
        return {key: value for part in parts for key, value in part.items()} | unequal_bits(
            self.request.work, self.request.rewards, parts
        )

    def _dropped(self, artifact: Artifact) -> dict[str, int]:
        report = self.storage.folder(artifact) / "report.json"
        if artifact.kind != "dataset" or not report.is_file():
            return {}
        reasons: dict[str, int] = json.loads(report.read_text()).get("dropped", {})
        return reasons

    def _log_traceback(self, error: Exception) -> None:
        log = self.request.log
        with suppress(OSError):  # a full disk must not hide the outcome
            make_folder(log.parent)
            with log.open("a") as file:
                file.write(without_secrets("".join(traceback.format_exception(error))))


def _extended(shorter: Shorter, request: AttemptRequest, present: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of a longer stage's provenance that name the shorter one, and what has changed since the shorter
    one was computed."""
    changed = drift(shorter.provenance, present)
    across = {"extended_across": "; ".join(changed)} if changed else {}
    return {"extended": f"{shorter.extended_to(request.work)} ({shorter.digest[:12]})", **across}


def _description(request: AttemptRequest, result: StageResult) -> dict[str, Any]:
    """Return fields of the artifact's description, by kind of work."""
    row = KINDS[request.work.kind]
    own: dict[str, Any] = {}
    if isinstance(request.work, PrepareData | MixData):
        own["content"] = request.work.content
    elif row.content is not None:
        own["content"] = row.content
    elif row.makes in TOKENIZED:
        own["tokenizer_digest"] = result.tokenizer_digest
    if result.base is not None:
        own |= {"base": result.base, "same_as_base": result.same_as_base}
    parents = {role: artifact.digest for role, artifact in request.inputs.items()}
    copied = copied_stage(request.work)
    if copied is not None and copied.digest is not None:
        parents[SOURCE] = copied.digest
    return {
        "kind": row.makes,
        "parents": parents,
        "metrics": result.metrics,
        "uncertainty": result.uncertainty,
        "firings": result.firings,
        "ended_early": result.ended_early,
        **own,
    }
