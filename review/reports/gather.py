"""Gather the report of a run from its record, its ledger's outbox and its artifacts; nothing else is read.

A part that cannot be read is named on the page; the other parts are still shown.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from vantage.attempts.jobs import gates_of, work_of
from vantage.review.reports.comparisons import compared
from vantage.review.reports.curves import has_curves, meaning_of, most_of_each, stage_curves, tokens_of
from vantage.review.reports.decision import CONFIDENCE, decision_of
from vantage.review.reports.gathered import (
    Comparison,
    Cost,
    Gate,
    Measured,
    Publication,
    Remark,
    Report,
    StageCurves,
    Step,
)
from vantage.runs.history import RunHistory
from vantage.runs.next_steps import after_closed_gates
from vantage.runs.own_commands import program
from vantage.runs.record import REMOVED, RunRecord, StageRecord
from vantage.runs.summary import headline_of
from vantage.runs.view import Broken, Maker, Missing, RunView
from vantage.runs.workspace import Workspace
from vantage.schemas.checks.engines import sampling_of
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.uncertainty import Uncertainty, interval_among
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.storage.refs import DamagedRef

_PER_STAGE = ("code",)
"""Parts of the provenance that differ from one kind of stage to the next."""
_ORIGIN = {
    "mlflow.user": "started by",
    "vantage.version": "version of Vantage",
    "vantage.code_sha256": "digest of the installed packages",
    "mlflow.source.git.commit": "revision of the code",
    "vantage.git.dirty": "with uncommitted changes",
}
Part = TypeVar("Part")


def gather_report(workspace: Workspace, record: RunRecord, *, is_active: bool = False) -> Report:
    """Return the report of a run as it is recorded now.

    Args:
        is_active: whether a process executes the run; if not, a step that is recorded as running was interrupted.
    """
    return _Gathering(workspace, record, is_active).report()


class _Gathering:
    """Reads what the report needs, and remembers what could not be read."""

    def __init__(self, workspace: Workspace, record: RunRecord, is_active: bool) -> None:
        self.workspace = workspace
        self.record = record
        self.is_active = is_active
        self.missing: list[str] = []
        self.run = RunView.of(workspace, record)
        self._histories: dict[str, RunHistory] = {}
        self.reads = dependencies(record.recipe)
        order = [step for step in ordered_steps(record.recipe) if step in record.stages]
        self.steps = {step: record.stages[step] for step in [*order, *sorted({*record.stages} - {*order})]}
        self.makers = {step: self._maker(step, done) for step, done in self.steps.items()}

    def report(self) -> Report:
        record, own = self.record, self.history(self.run)
        return Report(
            run_id=record.run_id,
            recipe=record.recipe.recipe,
            source=record.source if "\n" not in record.source else record.recipe.recipe,
            overrides=record.overrides,
            status=self._status_of_run(),
            started=record.started,
            openings=own.openings,
            steps=tuple(self._step(name, done) for name, done in self.steps.items()),
            decision=self._part(
                "The verdict",
                lambda: decision_of(record, self._status_of_run(), own, self._uncertainty),
                None,
            ),
            next_steps=self._part("What to do next", self._next_steps, ()),
            loosened=tuple((name, str(gate)) for name, done in self.steps.items() for gate in done.loosened),
            publications=self._part("What is published", self._publications, ()),
            gates=self._part("The gates", self._gates, ()),
            curves=self._part("The learning curves", self._curves, ()),
            comparisons=self._part("The evaluations", self._comparisons, ()),
            measured=self._part("The measured numbers", self._measured, ()),
            costs=self._part("The cost", self._costs, ()),
            environment=self._environment(),
            code=tuple(
                (name, done.provenance["code"])
                for name, done in self.steps.items()
                if done.provenance.get("code")
            ),
            origin=tuple((text, own.origin[tag]) for tag, text in _ORIGIN.items() if tag in own.origin),
            remarks=self._remarks(),
            missing=tuple(self.missing),  # made last, after all other parts were read
        )

    # -- sources

    def history(self, run: RunView) -> RunHistory:
        """Return a run's curves and attempts; empty, with a line on the page, if its outbox cannot be read."""
        if run.run_id not in self._histories:
            match run.history:
                case RunHistory() as history:
                    self._histories[run.run_id] = history
                case Missing():
                    self._histories[run.run_id] = RunHistory()
                case Broken() as problem:
                    self.missing.append(f"Curves and attempts: {problem}.")
                    self._histories[run.run_id] = RunHistory()
        return self._histories[run.run_id]

    def _part(self, what: str, gather: Callable[[], Part], otherwise: Part) -> Part:
        """Return a part of the report; if its files cannot be read, it is left out and named."""
        try:
            return gather()
        except (ValueError, OSError, KeyError, TypeError) as error:
            self.missing.append(f"{what} cannot be shown ({type(error).__name__}: {error}).")
            return otherwise

    def _maker(self, step: str, done: StageRecord) -> Maker | None:
        """Return the other run that made a reused artifact; None if this run made it, or the maker is not known."""
        if done.status != "reused":
            return None
        with suppress(OSError):
            maker = self.run.maker(step)
            return maker if isinstance(maker, Maker) and maker.run is not self.run else None
        return None

    def _read(self, digest: str) -> Callable[[str], bytes | None]:
        storage = self.workspace.existing_storage

        def read(path: str) -> bytes | None:
            if storage is None or not storage.has_object(digest):
                raise ValueError("its artifact is not in the store any longer")
            return storage.read_file(digest, path)

        return read

    # -- parts

    def _status_of_run(self) -> str:
        interrupted = self.record.status == "running" and not self.is_active
        return "resumable" if interrupted else self.record.status

    def _status(self, done: StageRecord) -> str:
        return "interrupted" if done.status == "running" and not self.is_active else done.status

    def _step(self, name: str, done: StageRecord) -> Step:
        maker = self.makers.get(name)
        work = work_of(self.record.recipe, name) if name in self.reads else None
        return Step(
            name=name,
            kind=work.kind if work else "",
            status=self._status(done),
            digest=done.digest,
            seconds=done.seconds,
            reads=tuple(self.reads.get(name, {}).items()),
            outcome=_outcome(done),
            made_by=maker.run.run_id if maker else None,
            is_implicit=name not in self.record.recipe.stages,
        )

    def _next_steps(self) -> tuple[str, ...]:
        command = program("vantage")  # the reader may be elsewhere, where the installation does not matter
        lines = after_closed_gates(self.record, self.workspace.address)
        return tuple(line.replace(command, "vantage") for line in lines)

    def _publications(self) -> tuple[Publication, ...]:
        published, record = self.history(self.run).published, self.record
        found = []
        for wanted in record.recipe.publish:
            name, said = wanted.registered_model, published.get(wanted.registered_model)
            copy = record.copies.get(name)
            alias = f"@{said.alias}" if said and said.alias else ""
            if why := record.unpublished.get(name):
                found.append(Publication(wanted.stage, name, f"was refused: {why}", False))
            elif copy and said:
                stays = f"; the alias {wanted.alias} was not moved" if wanted.alias and not alias else ""
                found.append(Publication(wanted.stage, f"{name}{alias}", f"is published{stays}", True))
            elif said:
                found.append(
                    Publication(
                        wanted.stage, f"{name}{alias}", "waits for MLflow, which has not answered", False
                    )
                )
            else:
                needs = f" after {wanted.after}" if wanted.after else ""
                shown = f"{name}@{wanted.alias}" if wanted.alias else name
                found.append(
                    Publication(wanted.stage, shown, f"is not published (it would be{needs})", False)
                )
        return tuple(found)

    def _gates(self) -> tuple[Gate, ...]:
        found = []
        for name, done in self.steps.items():
            asked = gates_of(self.record.recipe, name)
            for place in range(max(len(asked), len(done.verdicts))):
                verdict = done.verdicts[place] if place < len(done.verdicts) else None
                gate = asked[place] if place < len(asked) else None
                metric = verdict.metric if verdict else gate.metric if gate else ""
                asks = (
                    f"{metric} {verdict.relation} {verdict.threshold:g}"
                    if verdict
                    else f"{metric} {gate.relation} {gate.bound:g}"
                    if gate
                    else metric
                )
                on_fail = verdict.on_fail if verdict else gate.on_fail if gate else "stop"
                found.append(Gate(name, verdict, asks, on_fail, meaning_of(metric)[1]))
        return tuple(found)

    def _curves(self) -> tuple[StageCurves, ...]:
        works = {name: work_of(self.record.recipe, name) for name in self.steps if name in self.reads}
        stages = [name for name, work in works.items() if has_curves(work.kind)]
        most, found = most_of_each(len(stages)), []
        for name in stages:
            maker = self.makers.get(name)
            measured = self.history(self.run).curves.get(name)
            if not measured and maker:
                measured = self.history(maker.run).curves.get(maker.step)
            if curves := stage_curves(
                name,
                works[name].kind,
                measured or {},
                most=most,
                made_by=maker.run.run_id if maker else None,
                firings=self.steps[name].firings,
                rollout=sampling_of(works[name]),
            ):
                found.append(curves)
            elif self.steps[name].digest:
                self.missing.append(
                    f"{name} has no curves in this workspace (its run was removed, or it measured nothing)."
                )
        return tuple(found)

    def _comparisons(self) -> tuple[Comparison, ...]:
        found = []
        for name, done in self.steps.items():
            stage = self.record.recipe.stages.get(name)
            if isinstance(stage, PolicyEvaluation) and done.digest is not None:
                found.append(compared(name, stage, done, self._read(done.digest)))
        return tuple(found)

    def _measured(self) -> tuple[Measured, ...]:
        found = []
        for name, done in self.steps.items():
            known = self._uncertainty(done)
            for metric, value in done.metrics.items():
                unit, meaning = meaning_of(metric)
                of = known.get(metric)
                interval = interval_among(metric, done.metrics, known, confidence=CONFIDENCE)
                n = of.n if of else None
                found.append(Measured(name, metric, value, interval, n, unit, meaning))
        return tuple(found)

    def _uncertainty(self, done: StageRecord) -> Mapping[str, Uncertainty]:
        """Return the uncertainty of a stage's metrics, from its artifact; empty if that was removed (the record has the
        numbers)."""
        storage = self.workspace.existing_storage
        if done.digest is None or storage is None:
            return {}
        with suppress(ValueError, OSError, DamagedRef):
            return storage.sealed(done.digest).measured.uncertainty
        return {}

    def _costs(self) -> tuple[Cost, ...]:
        history = self.history(self.run)
        found = []
        for name, done in self.steps.items():
            attempts = history.attempts.get(name, [])
            if done.status == "reused" or not (attempts or done.seconds):
                continue
            device = done.provenance.get("device", "unknown")
            ranks = int(done.provenance.get("world_size", "1"))
            curves = history.curves.get(name, {})
            padding = [value for _, _, value in curves.get("padding_share", [])]
            earlier = sum(each.seconds for each in attempts[:-1])
            last = done.seconds or (attempts[-1].seconds if attempts else 0.0)
            found.append(
                Cost(
                    step=name,
                    attempts=max(len(attempts), 1),
                    seconds=last,
                    all_seconds=earlier + last,
                    gpus=0 if device in ("cpu", "unknown") else ranks,
                    device=device,
                    tokens=tokens_of(curves, [each.started for each in attempts]),
                    padding=sum(padding) / len(padding) if padding else None,
                    energy=_together([each.energy for each in attempts]),
                    measured_attempts=sum(each.energy is not None for each in attempts),
                    facts=attempts[-1].facts if attempts else {},
                )
            )
        return tuple(found)

    def _environment(self) -> tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]:
        parts: dict[str, dict[str, list[str]]] = {}
        for name, done in self.steps.items():
            for part, value in done.provenance.items():
                if part not in _PER_STAGE:
                    parts.setdefault(part, {}).setdefault(str(value), []).append(name)
        return tuple(
            (part, tuple((value, tuple(of)) for value, of in values.items()))
            for part, values in parts.items()
        )

    def _remarks(self) -> tuple[Remark, ...]:
        found = []
        for name, done in self.steps.items():
            if done.reason:
                level = "bad" if done.status == "failed" else "note"
                found.append(Remark(name, done.reason, level))
            found += [Remark(name, each, "note") for each in done.extensions]
            found += [Remark(name, each, "warning") for each in done.warnings]
            found += [Remark(name, each, "warning") for each in filter(None, [done.remark])]
            found += [Remark(name, f"left out: {each}", "note") for each in filter(None, [done.left_out])]
        if self.record.status == REMOVED:
            text = (
                "`vantage gc` has removed this run: its record is left, its artifacts and curves may be gone"
            )
            found.insert(0, Remark("run", text, "warning"))
        return tuple(found)


def _outcome(done: StageRecord) -> str:
    """Return the step's verdicts or headline metrics in a few words, or the reason why it did not run."""
    if done.reason:
        return done.reason
    return headline_of(done).replace("  ", " · ")


def _together(measured: Sequence[Energy | None]) -> Energy | None:
    """Return the sum of the measured energies; None: none was measured."""
    known = [each for each in measured if each is not None]
    gpu = [each.gpu_joules for each in known if each.gpu_joules is not None]
    cpu = [each.cpu_joules for each in known if each.cpu_joules is not None]
    if not gpu and not cpu:
        return None
    return Energy(gpu_joules=sum(gpu) if gpu else None, cpu_joules=sum(cpu) if cpu else None)
