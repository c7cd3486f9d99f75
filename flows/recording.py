"""Record attempts in run.json and in the ledger, and report them to the watcher."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vantage.attempts.jobs import work_of
from vantage.flows.retry import Retry
from vantage.ledger.operations import Input, StageOutcome
from vantage.ledger.remarks import remark_on
from vantage.ledger.run_ledger import Ledger
from vantage.runs.extending import Place
from vantage.runs.gates import Standing, check_gates, question_about, standing
from vantage.runs.loosened import earlier_verdicts
from vantage.runs.models_of_runs import fetch_stage
from vantage.runs.own_commands import own_command
from vantage.runs.record import StageRecord, StageStatus
from vantage.runs.registered_models import fetch_registered
from vantage.runs.run import Run, read_run
from vantage.runs.summary import printed_intervals
from vantage.runs.watching import Watcher, feed, journal_entries
from vantage.runs.workspace import RunError
from vantage.schemas.recipe.sources import Registered, StageOfRun
from vantage.schemas.recipe.work import ModelImport, Work
from vantage.schemas.records.approvals import Approval, answer_to
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import AttemptBegun, AttemptOutcome, AttemptRequest
from vantage.schemas.records.estimate_warnings import warnings_about
from vantage.schemas.records.extensions import Shorter
from vantage.schemas.records.metric_warnings import dropped_summary
from vantage.schemas.records.verdicts import Verdict
from vantage.schemas.safe_text import safe_text
from vantage.storage.key_locks import Locked
from vantage.storage.storage import Storage
from vantage.tasks.training.scratch import FETCHED, REPORTS, read_committed

LONGEST_READING_SECONDS = 10.0
"""Seconds that a run waits to remove a scratch folder while another run holds the stage's key."""


class Recording:
    """The records of one run's attempts."""

    def __init__(
        self,
        run: Run,
        *,
        store: Storage,
        ledger: Ledger,
        watcher: Watcher,
        inputs: Mapping[str, Mapping[str, str]],
        artifacts: Mapping[str, Artifact],
    ) -> None:
        """
        Args:
            run: the run, whose run.json is written.
            store: the store of artifacts.
            ledger: the run's ledger.
            watcher: gets progress and outcomes.
            inputs: step → role → step that it reads.
            artifacts: step → its artifact; the caller adds to it.
        """
        self.run = run
        self.recipe = run.record.recipe
        self.store = store
        self.ledger = ledger
        self.watcher = watcher
        self._inputs = inputs
        self._artifacts = artifacts
        self._before = dict(run.record.stages)
        """The stages' records when this process began; their verdicts keep their interval methods."""
        self._earlier = earlier_verdicts(run.workspace, run.record)
        self._places: dict[str, Place] = {}
        """Step → its computation, and what that goes on from."""
        self._scratch: dict[str, Path] = {}
        """Stage key → folder of the journal of the computation that this process watches."""

    def goes_on_from(self, step: str, place: Place) -> None:
        """Record the shorter stages that a step goes on from, before an attempt begins, so that nothing removes
        them."""
        self._places[step] = place
        if self.shorter(step) != self.run.record.stages[step].shorter:
            self.run.update_stage(step, shorter=self.shorter(step))

    def shorter(self, step: str) -> tuple[Shorter, ...]:
        """Return the shorter stages that a step goes on from, in the form of run.json."""
        place = self._places.get(step)
        return (
            ()
            if place is None
            else tuple(each.model_copy(update={"provenance": {}}) for each in place.shorter)
        )

    def watches(self, request: AttemptRequest, begun: AttemptBegun) -> None:
        """Record that a computation begins, whose journal is in ``begun.scratch``."""
        self._scratch[request.stage_key] = begun.scratch

    def observer(self, request: AttemptRequest) -> "AttemptObserver":
        """Return an observer that records an attempt in run.json and the ledger, and reports it to the watcher."""
        return AttemptObserver(self, request)

    def succeeded(self, request: AttemptRequest, outcome: AttemptOutcome, artifact: Artifact) -> StageRecord:
        """Record an attempt with an artifact: first the verdicts of its gates, then the artifact."""
        step, reused = request.step, outcome.status == "reused"
        inputs = self.ledger_inputs(step)
        fields = self.ledger_fields(request)
        if outcome.unreported:  # this run made it, and was killed before everything was recorded
            self.ledger.open_stage(step, attempt=outcome.attempt or 1, **fields)
        elif reused:
            self.ledger.record_reuse(
                step, artifact=artifact, folder=self.store.local_folder(artifact.digest), **fields
            )
        before = self._before.get(step)
        like = before.verdicts if before is not None and before.digest == artifact.digest else ()
        verdicts = check_gates(self.recipe, step, artifact, inputs, like=like)
        loosened = self._earlier.loosened(artifact.digest, verdicts)
        if verdicts or loosened:
            self.ledger.record_verdicts(step, verdicts, loosened=loosened)
        stands = self._ask(step, artifact, verdicts)
        if stands == "waiting_approval" and reused and not outcome.unreported:
            self.ledger.finish_stage(step, stands)
        known = self.run.record.stages[step]
        stage = StageRecord(
            status=stands if stands != "open" else "reused" if reused else "completed",
            attempt=known.attempt or (outcome.attempt if outcome.made_by == request.run_id else None),
            stage_key=request.stage_key,
            digest=artifact.digest,
            metrics=artifact.metrics,
            intervals=printed_intervals(artifact.metrics, artifact.uncertainty, verdicts),
            remark=remark_on(artifact, inputs),
            left_out=dropped_summary(artifact.metrics, outcome.dropped),
            warnings=warnings_about(artifact),
            firings=artifact.firings,
            verdicts=verdicts,
            shorter=self.shorter(step),
            loosened=loosened,
            seconds=0.0 if reused else outcome.seconds,
            key_parts=request.key_parts,
            provenance=outcome.provenance,
            samples=self._samples(request.stage_key, outcome),
            microbatch_size=known.microbatch_size,
            microbatch_tokens=known.microbatch_tokens,
        )
        self.run.set_stage(step, stage)
        if outcome.unreported or not reused:
            self._report(request, outcome, artifact, "completed" if stands == "open" else stands)
        self.watcher.ended(step, stage)
        self.tell_answer(step)
        if self.recipe.sign is not None:
            self._sign(step)
        return stage

    def _sign(self, step: str) -> None:
        """Sign the step's artifact with the verdicts just recorded. The artifact is kept, whatever happens to the key."""
        from vantage.signing.decisions import loosened_decisions
        from vantage.signing.keys import key_of
        from vantage.signing.signing import sign_step
        from vantage.signing.signing_decisions import sign_decisions

        try:
            key = key_of(self.recipe)
            assert key is not None, "the recipe names one"
            workspace, record = self.run.workspace, self.run.record
            sign_step(workspace, record, step, key)
            sign_decisions(workspace, record, list(loosened_decisions(record, step)), key)
        except Exception as error:  # a lost key or a full disk must not cost the stage
            reason = safe_text(str(error) or type(error).__name__)
            self.run.set_unsigned(step, reason)
            remedy = own_command(
                "sign", self.run.record.run_id, "--key", "FILE", "--workspace", self.run.workspace.address
            )
            self.watcher.say(f"  {step} is made, and NOT SIGNED: {reason}; sign it later: {remedy}", "red")

    def _ask(self, step: str, artifact: Artifact, verdicts: tuple[Verdict, ...]) -> Standing:
        """Record the question to a person about the artifact, if there is one; return whether dependent steps may
        start."""
        question = question_about(step, artifact, verdicts)
        if question is None:
            self.run.withdraw(step)
        else:
            self.run.ask(question)
        return standing(step, artifact, verdicts, self.run.record.approvals)

    def tell_answer(self, subject: str) -> None:
        """Show the answer to the question about a stage, if there is one."""
        question = self.run.record.questions.get(subject)
        answer = question and answer_to(question, self.run.record.approvals)
        if answer:
            self.watcher.say(f"      {answer}", "green" if answer.approved else "red")

    def answered(self, answer: Approval) -> bool:
        """Record an answer to a question; returns whether its stage waited for it."""
        self.ledger.record_approval(answer)
        step = answer.question.subject
        known = self.run.record.stages.get(step)
        if known is None or known.status != "waiting_approval":
            return False
        done: StageStatus = "reused" if known.attempt is None else "completed"
        self.ended(step, status=done if answer.approved else "gate_closed")
        self.tell_answer(step)
        return True

    def _report(
        self,
        request: AttemptRequest,
        outcome: AttemptOutcome,
        artifact: Artifact,
        stage_outcome: StageOutcome,
    ) -> None:
        """Record the remaining metrics and the artifact in the ledger, then remove the scratch folder."""
        step, key = request.step, request.stage_key
        scratch = self._scratch.get(key) or self.store.reports(key, REPORTS)
        self.ledger.send_metrics(step, journal_entries(scratch))
        self.ledger.finish_stage(
            step,
            stage_outcome,
            artifact=artifact,
            folder=self.store.local_folder(artifact.digest),
            provenance=outcome.provenance,
            energy=outcome.energy,
            usage=outcome.usage,
            facts=outcome.facts,
        )
        # A run that waited for the artifact holds the key for a moment to read the artifact. A process that holds the
        # key for longer uses the folder, and removes it.
        with (
            suppress(Locked),
            self.store.exclusive(
                key, holder=f"run {self.run.record.run_id}", timeout=LONGEST_READING_SECONDS
            ),
        ):
            self.store.discard_scratch(key)

    def failed(self, step: str, outcome: AttemptOutcome, retry: Retry, *, log: object) -> StageRecord:
        """Record a failed attempt and its retry; ``log`` is shown in the message."""
        assert outcome.failure is not None, "recorded only of an attempt that failed"
        stage = self.run.record.stages[step]
        if retry.microbatch_tokens != stage.microbatch_tokens:
            self.run.update_stage(step, microbatch_tokens=retry.microbatch_tokens)
        reason = safe_text(f"{outcome.failure.message}; {retry.remedy} ({log})")
        if stage.status == "running":
            self._send_committed(step, stage)
            self.ledger.finish_stage(
                step,
                retry.status,
                reason=reason,
                energy=outcome.energy,
                usage=outcome.usage,
                facts=outcome.facts,
            )
        return self.ended(
            step,
            status=retry.status,
            reason=reason,
            exit_code=outcome.failure.exit_code,
            firings=outcome.firings,
            seconds=outcome.seconds,
        )

    def _send_committed(self, step: str, stage: StageRecord) -> None:
        """Record the metrics up to the last checkpoint: they show why a guard stopped the stage."""
        assert stage.stage_key is not None, "known of a stage that has begun"
        scratch = self._scratch.get(stage.stage_key) or self.store.reports(stage.stage_key, REPORTS)
        with suppress(ValueError, OSError):  # the next attempt reports a damaged journal
            self.ledger.send_metrics(step, journal_entries(scratch, end=read_committed(scratch)[1]))

    def ended(self, step: str, **changes: Any) -> StageRecord:
        """Record the end of a step without an artifact."""
        self.run.update_stage(step, **changes)
        stage = self.run.record.stages[step]
        self.watcher.ended(step, stage)
        return stage

    def ledger_inputs(self, step: str) -> dict[str, Input]:
        """Return role → stage and artifact of this recipe that the step reads. Shorter stages are only among the
        parents."""
        return {
            role: Input(stage=read, artifact=self._artifacts[read])
            for role, read in self._inputs[step].items()
        }

    def ledger_fields(self, request: AttemptRequest) -> dict[str, Any]:
        """Return the ledger's fields of every stage, computed or reused."""
        work = work_of(self.recipe, request.step)
        return {
            "kind": work.kind,
            "stage_key": request.stage_key,
            "params": work.model_dump(mode="json"),
            "inputs": self.ledger_inputs(request.step),
            "source_sha256": request.key_parts["inputs"].get("source"),
        }

    def _samples(self, key: str, outcome: AttemptOutcome) -> tuple[dict[str, Any], ...]:
        """Return the samples of the outcome, or those in the record of the run that made the artifact."""
        if outcome.status == "reused" and outcome.made_by is not None:
            with suppress(RunError):
                stages = read_run(self.run.workspace, outcome.made_by).stages.values()
                if kept := next((stage.samples for stage in stages if stage.stage_key == key), ()):
                    return kept
        return outcome.samples


class AttemptObserver:
    """Records the events of one attempt in run.json and the ledger, and reports them to the watcher."""

    def __init__(self, recording: Recording, request: AttemptRequest) -> None:
        self._recording = recording
        self._request = request
        self._feed: Callable[[], None] = lambda: None

    def waits(self, holder: str) -> None:
        step = self._request.step
        self._recording.watcher.say(f"  {step}: waits for {holder}, which makes the same artifact", "dim")

    def queued(self, pool: str) -> None:
        self._recording.watcher.say(f"  {self._request.step}: waits for a worker of pool {pool}", "dim")

    def damaged(self, problem: str) -> None:
        self._recording.watcher.say(
            f"  {self._request.step}: the stored artifact is damaged and made again: {problem}", "red"
        )

    def input_damaged(self, step: str, problem: str) -> None:
        """Show that an input of the attempt is damaged and made again."""
        self._recording.watcher.say(
            f"  {self._request.step}: its input {step} is damaged and made again: {problem}", "red"
        )

    def begun(self, begun: AttemptBegun) -> None:
        request, recording = self._request, self._recording
        record = StageRecord(
            status="running",
            attempt=begun.attempt,
            stage_key=request.stage_key,
            key_parts=request.key_parts,
            shorter=recording.shorter(request.step),
            provenance=begun.provenance,
            microbatch_size=request.microbatch_size,
            microbatch_tokens=request.microbatch_tokens,
        )
        recording.run.set_stage(request.step, record)
        fields = recording.ledger_fields(request)
        recording.ledger.open_stage(request.step, attempt=begun.attempt, **fields)
        recording.watcher.started(request.step, begun.attempt)
        recording.watches(request, begun)
        self._fetch(request.work, begun.scratch / FETCHED)
        self._feed = feed(request.step, begun.scratch, watcher=recording.watcher, ledger=recording.ledger)

    def _fetch(self, work: Work, target: Path) -> None:
        """Fetch the files that an import copies, since only the process that executes the run reaches MLflow and other
        runs."""
        workspace = self._recording.run.workspace
        if not isinstance(work, ModelImport):
            return
        if isinstance(work.model.origin, Registered):
            fetch_registered(work.model.origin, workspace, target)
        elif isinstance(work.model.origin, StageOfRun):
            fetch_stage(work.model.origin, workspace, target)

    def polled(self) -> None:
        self._feed()
