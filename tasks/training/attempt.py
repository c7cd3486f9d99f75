"""The checkpoints and logs of one attempt at a stage: metric journal, progress, and resuming an earlier attempt."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vantage.ledger.journal import Journal, read
from vantage.schemas.recipe.default_guards import guards_of, own_guards
from vantage.schemas.recipe.extending import PREVIOUS_STATE
from vantage.schemas.recipe.guards import OFF
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stages import Rollouts
from vantage.schemas.records.firings import EndedEarly, Watched
from vantage.schemas.records.job import StageJob
from vantage.storage.durable_files import make_folder
from vantage.tasks.training import checkpoints, engine_record, nonfinite, preemption, ranks
from vantage.tasks.training.checkpoint_writing import CheckpointWriting
from vantage.tasks.training.guarding import Asked, Guarding, ended_early
from vantage.tasks.training.kept_state import kept_checkpoint, kept_curves
from vantage.tasks.training.phase_seconds import of_process
from vantage.tasks.training.progress import RUNNING, Progress
from vantage.tasks.training.scratch import (
    CHECKPOINTS,
    JOURNAL,
    PROGRESS,
    WATCHED,
)
from vantage.tasks.training.stage_state import State, state_from_json
from vantage.tasks.training.step_metrics import Speed, pass_metrics, peak_memory
from vantage.tasks.training.watched import asked_to_finish, write_watched
from vantage.tasks.training.writer import writes_files

log = logging.getLogger(__name__)


class GuardFired(Exception):
    """A guard of the recipe stopped the stage; its state is saved."""


class Ahead(Protocol):
    """Computes inputs of the loop's next step in advance."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint; empty if nothing is ever computed in advance."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state in ``tensors``."""


class Attempt(Generic[State]):
    """Drives a stage's loop so that it can stop anywhere and go on bitwise equal.

    The loop asks ``remaining()`` for the steps to do, and calls ``finish_step`` in each. Everything that changes must
    be in the given modules and optimisers, in ``state``, in ``best`` (the best weights so far; the loop replaces them
    and never edits them in place) or in ``ahead``. All else, including random numbers and data order, has to be a
    function of the step.
    """

    def __init__(
        self,
        job: StageJob,
        *,
        total: int,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        state: State,
        keeps_best: bool = False,
        ahead: Ahead | None = None,
    ) -> None:
        """Start from the newest intact checkpoint, from where a shorter stage ended, or from nothing.

        Args:
            total: most steps (iterations) of the loop.
            modules: the trained modules, and modules with buffers that change by themselves; an optimiser belongs to
                the module of the same name.
            state: a frozen dataclass of JSON values that checkpoints contain, with its values before the first step.
            keeps_best: whether the loop sets ``best`` before its first step, so that no checkpoint may lack it.
            ahead: computes ahead of the loop, from weights that a checkpoint no longer has.

        Raises:
            IncompleteCheckpoint: the newest checkpoint lacks something that training needs.
        """
        self.state: State = state
        self.best: dict[str, Tensor] = {}
        self.step = 0
        self._total = total
        self.length = total
        """The steps that the loop does: fewer than its total if a guard or a person ends it early."""
        self._keeps_best, self._ahead = keeps_best, ahead
        self._carried: dict[str, Tensor] = {} if ahead is None else ahead.tensors()
        self._stopped = False
        self._is_last = False
        self._ended_early: EndedEarly | None = None
        self.policy_is_frozen = False
        self._modules, self._optimizers = modules, optimizers
        self._sharded = {
            name
            for module in modules.values()
            for name, tensor in module.state_dict().items()
            if isinstance(tensor, DTensor)
        }
        self._every = getattr(job.work, "checkpoint_every", total)
        self._samples = isinstance(job.work, Rollouts)
        self._scratch, self._run_id = job.scratch, job.run_id
        make_folder(self._scratch)
        self._journal = Journal(self._scratch / JOURNAL) if writes_files() else None
        self._restore(job.inputs.get(PREVIOUS_STATE))
        engine_record.note_ended(self.step)
        self._guarding = self._guarding_of(job)
        self._tolerance = nonfinite.Tolerance(self._scratch, allowed=self._allowed(job))
        self._open = ExitStack()
        hang_seconds = job.work.resources.hang_seconds if isinstance(job.work, Training) else None
        self._writing = CheckpointWriting(self._scratch, hang_seconds=hang_seconds)
        self._saved_at = self.step
        self._summary: str = ""
        self._describe()
        self._progress = Progress(self._scratch / PROGRESS, total=total, phase=RUNNING)
        self._progress.update(self.step)
        self._speed = Speed()
        if self._guarding.firings or (self._journal is not None and (self._scratch / WATCHED).exists()):
            self._show_watched()  # show the guards without observations after the checkpoint

    def __enter__(self) -> Self:
        self._open.enter_context(nonfinite.tolerating(self._tolerance))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if self._journal is not None:
            self._journal.close()
        if error is None:
            self._writing.finish()
        elif not ranks.is_of_communication(error):  # shards would wait for the part of a rank that has ended
            with suppress(Exception):  # the stage's own error is the one to report
                self._writing.finish()

    def remaining(self) -> Iterator[int]:
        """Yield the steps still to do. Checkpoints are saved when they are due, while the next steps run, and after the
        last step.

        Raises:
            OSError: a checkpoint could not be written; the one before counts.
            Preempted: the process was asked to stop; everything up to the finished step is saved.
            GuardFired: a guard stops the stage; everything up to the finished step is saved.
        """
        self._progress.update(self.step)  # the first step begins now, not when the stage did
        pass_metrics()  # passes before the first step do not count for it
        of_process.begin()
        self._heed(begins=True)
        while self.step < self._total and not self._stopped:
            self._tolerance.begin(self.step)
            yield self.step
            self.step += 1
            engine_record.note_ended(self.step)
            self._writing.check()
            self._heed()
            is_last = self._stopped or self.step == self._total
            if is_last or self.step - self._saved_at >= self._every:
                self._save(beside=not is_last)

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Hold this context while weights and state are still those of the last step, so that a request to stop need
        not wait.

        Several ranks go on to the end of their step together; otherwise one rank would wait for another that has
        stopped.

        Raises:
            Preempted: the process was asked to stop; everything up to the step before is saved.
        """
        if ranks.world_size() > 1:
            yield
            return
        try:
            with preemption.at_once():
                yield
        except preemption.Requested:
            self._save_and_stop()

    def is_due(self, every: int) -> bool:
        """Return whether the number of the present step is a multiple of ``every``, or the step is the last."""
        return (self.step + 1) % every == 0 or self.step + 1 == self._total or self._is_last

    def stop(self) -> None:
        """End the loop after this step, before its total."""
        self._stopped = True

    def finish_step(self, metrics: Mapping[str, float], *, num_tokens: int, headline: str) -> None:
        """Write a step's metrics to the journal and report the stage's progress.

        Args:
            metrics: name → value, of ``vantage.schemas.records.metrics``; metrics of the step's passes are added.
            num_tokens: tokens that the step read or sampled, on all ranks.
            headline: the metric that a person wants to see beside the progress bar.

        Raises:
            TrainingDiverged: the headline metric is not finite, and that is not tolerated.
        """
        if self._ahead is not None:
            self._carried = self._ahead.tensors()
        if not isfinite(metrics[headline]):
            nonfinite.meet(headline, metrics[headline], remedy="lower the learning rate, or look at the data")
        metrics = {**metrics, **self._tolerance.metrics(), **pass_metrics()}
        seconds = of_process.taken() if self._samples else {}
        tokens_per_second, memory = self._speed.after(num_tokens), peak_memory()
        self._summary = f"{headline} {metrics[headline]:.4g}, {tokens_per_second:,.0f} tokens/s"
        if self._journal is not None:
            self._journal.append(
                self.step + 1,
                {**metrics, **seconds, "tokens_per_second": tokens_per_second, "peak_memory": memory},
                time=time.time(),
            )
            self._guard(metrics)
        self._progress.update(
            self.step + 1, metrics=metrics, headline=headline, tokens_per_second=tokens_per_second
        )

    def notice(self, text: str) -> None:
        """Show a person a fact about the stage that no guard can see; it changes nothing."""
        log.warning("%s", text)
        self._progress.notice(text)

    def _guard(self, metrics: Mapping[str, float]) -> None:
        """Pass a step's metrics to the guards, and record those that fire."""
        fired = self._guarding.observe(self.step + 1, metrics)
        for firing in fired:
            log.warning("%s", firing)
        if fired:
            self._show_watched()

    def _show_watched(self) -> None:
        watched = Watched(firings=self._guarding.firings, ended_early=self._ended_early)
        write_watched(self._scratch, watched)
        self._progress.watched(tuple(map(str, watched.firings)))

    def _heed(self, *, begins: bool = False) -> None:
        """Agree with the other ranks on requests to the loop (to stop, to finish), and follow them; the first rank asks
        the guards.

        Args:
            begins: whether no step has been done yet, so that a request to stop waits for the end of one.
        """
        asked, by_hand = Asked(), None
        if self._journal is not None:
            asked, by_hand = self._guarding.asked(), asked_to_finish(self._scratch, run_id=self._run_id)
        stopped, preempted, stop, end, finish, self.policy_is_frozen = ranks.any_of(
            self._stopped,
            not begins and preemption.requested(),
            asked.stop,
            asked.end,
            asked.finish or by_hand is not None,
            asked.freeze_policy,
        )
        if stop:
            self._writing.finish()
            if self.step > self._saved_at:
                self._save()
            raise GuardFired(
                str(self._guarding.first("stop") or "a guard of the first rank stopped the stage")
            )
        was_last = self._is_last
        self._is_last = finish and self._keeps_best  # one more step measures the weights that may be best
        if not stopped and self.step and (end or was_last or (finish and not self._keeps_best)):
            stopped, self.length = True, self.step
            if self._journal is not None:
                self._ended_early = ended_early(
                    self._guarding,
                    by_hand=by_hand,
                    step=self.step,
                    total=self._total,
                    was_announced=was_last,
                )
                self._show_watched()
        self._stopped = stopped
        if preempted:
            self._save_and_stop()

    def _guarding_of(self, job: StageJob) -> Guarding:
        """Return the guards with their observations up to the checkpoint, on the first rank, which has the journal."""
        if self._journal is None or not isinstance(job.work, Training):
            return Guarding(())
        guards = guards_of(job.work)
        journal = read(self._scratch / JOURNAL) if guards else ()
        return Guarding(guards, journal, defaults=set(guards) - set(own_guards(job.work)))

    def _allowed(self, job: StageJob) -> int:
        """Return the number of steps that may still have a loss or gradient that is not finite: one per stage that has
        guards."""
        if not isinstance(job.work, Training) or job.work.guards == OFF:
            return 0
        was_met = self._guarding.has_seen(nonfinite.METRIC)
        return int(ranks.agreed(int(not was_met)))

    def _describe(self) -> None:
        """Log what is trained, and the step from which it begins."""
        for name, module in self._modules.items():
            if not (parameters := list(module.parameters())):
                continue  # such a module changes without an optimiser
            trained = sum(each.numel() for each in parameters if each.requires_grad)
            everything = sum(each.numel() for each in parameters)
            log.info(
                "%s: %s parameters, %s of them trained, %s on %s",
                *(name, f"{everything:,}", f"{trained:,}", parameters[0].dtype, parameters[0].device),
            )
        if self.step:
            log.info("goes on from the checkpoint of step %d of %d", self.step, self._total)
        else:
            log.info("begins at step 0 of %d", self._total)

    def _restore(self, previous: Path | None) -> None:
        """Restore everything that changes from the newest checkpoint, or else from the training state of a shorter
        stage."""
        found = self._latest()
        begins_from = previous if found is None else None
        if begins_from is not None:
            found = kept_checkpoint(begins_from)
        if found is None:
            self._truncate_journal(0)
            return
        loaded = checkpoints.load(found, required=self._parts(), is_shard=self._is_shard)
        try:
            state = state_from_json(self.state, loaded.state["stage"], path="stage")
        except ValueError as error:
            raise checkpoints.IncompleteCheckpoint(
                f"{found.folder}: {error}; remove {found.folder.parent} to begin the stage anew"
            ) from error
        for name, module in self._modules.items():
            checkpoints.restore_module(module, loaded.tensors, part=f"{name}.weights")
        for name, optimizer in self._optimizers.items():
            named = self._modules[name].named_parameters()
            checkpoints.restore_optimizer(optimizer, named, loaded.tensors, part=f"{name}.optimizer")
        self.best, carried = (
            {
                name.removeprefix(part): tensor
                for name, tensor in loaded.tensors.items()
                if name.startswith(part)
            }
            for part in ("best/", "carried/")
        )
        if self._ahead is not None and carried:
            self._carried = carried
            self._ahead.restore(carried)
        self.state = state
        stopped = loaded.state["stopped"]
        if isinstance(stopped, dict):
            self._ended_early = EndedEarly.model_validate(stopped)
            self.length = loaded.step
        self._stopped = bool(stopped)
        self._truncate_journal(loaded.state["journal_offset"])
        if begins_from is not None and self._journal is not None:
            for entry in kept_curves(begins_from):
                self._journal.append(entry.step, entry.metrics, time=time.time())
        self.step = loaded.step

    def _latest(self) -> checkpoints.Checkpoint | None:
        """Return the newest intact checkpoint; the other ranks look after the first rank has put damaged ones aside."""
        if not writes_files():
            ranks.wait()
        found = checkpoints.latest(self._scratch / CHECKPOINTS)
        if writes_files():
            ranks.wait()
        return found

    def _truncate_journal(self, offset: int) -> None:
        if self._journal is not None:
            self._journal.truncate(offset)

    def _save_and_stop(self) -> NoReturn:
        self._writing.finish()
        if self.step > self._saved_at:
            self._save()
        raise preemption.preempted(f"step {self.step} of {self._total}") from None

    def _save(self, *, beside: bool = False) -> None:
        """Save everything that changes.

        Args:
            beside: whether the loop may go on before the checkpoint is complete.
        """
        tensors: dict[str, Tensor] = {f"best/{name}": tensor for name, tensor in self.best.items()}
        tensors |= {f"carried/{name}": tensor for name, tensor in self._carried.items()}
        for name, module in self._modules.items():
            tensors |= checkpoints.module_tensors(module, part=f"{name}.weights")
        for name, optimizer in self._optimizers.items():
            named = self._modules[name].named_parameters()
            tensors |= checkpoints.optimizer_tensors(optimizer, named, part=f"{name}.optimizer")
        offset = 0 if self._journal is None else self._journal.sync()
        state = {
            "stage": asdict(cast(Any, self.state)),
            "stopped": self._stopped
            if self._ended_early is None
            else self._ended_early.model_dump(mode="json"),
            "journal_offset": offset,
        }
        is_shard = self._is_shard if ranks.are_sharded() else None
        content = checkpoints.content_of(
            step=self.step, tensors=tensors, state=state, is_shard=is_shard, fixed={"best"}
        )
        saved = f"step {self.step} of {self._total}: {self._summary}; saved"
        self._writing.save(content, journal_offset=offset, beside=beside, done=lambda: log.info(saved))
        self._saved_at = self.step

    def _is_shard(self, name: str) -> bool:
        """Return whether a checkpoint's tensor is a shard, since its weight is spread over the ranks."""
        part, _, weight = name.partition("/")
        if part.endswith(".optimizer"):
            weight, _, key = weight.rpartition("/")
            return weight in self._sharded and key != "step"
        return weight in self._sharded

    def _parts(self) -> set[str]:
        trained = {f"{name}.weights" for name in self._modules}
        optimized = {f"{name}.optimizer" for name in self._optimizers}
        best = {"best"} if self._keeps_best else set()
        carried = {"carried"} if self._carried else set()
        return trained | optimized | best | carried | {"stage", "stopped", "journal_offset"}
