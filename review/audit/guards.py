"""Firings of guards, derived again from the curves in a run's outbox by the function that a running stage asks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vantage.attempts.code_digest import code_digest
from vantage.attempts.jobs import work_of
from vantage.ledger.journal import Entry
from vantage.ledger.operations import LogMetrics
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.runs.record import RunRecord, StageRecord
from vantage.runs.view import Broken, Missing
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.default_guards import guards_of, own_guards
from vantage.schemas.recipe.guards import OFF, Guard
from vantage.schemas.recipe.stage import Training
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.audit import Check
from vantage.schemas.records.firings import Firing
from vantage.storage.refs import Ref
from vantage.tasks.training.guarding import Guarding

SUBJECT = "guards"


@dataclass
class _Problems:
    """Differences found, and what could not be compared."""

    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def checks(self, ok: str) -> Iterator[Check]:
        """Yield a check for each kind of problem, or one check that agrees if there are no problems."""
        if self.wrong:
            yield Check(subject=SUBJECT, outcome="wrong", detail="; ".join(self.wrong))
        if self.unchecked:
            yield Check(subject=SUBJECT, outcome="unchecked", detail="; ".join(self.unchecked))
        if not (self.wrong or self.unchecked):
            yield Check(subject=SUBJECT, detail=ok)


@dataclass(frozen=True)
class _Curves:
    """A stage's reports, step by step, and the guards that watched them."""

    work: Training
    entries: tuple[Entry, ...]
    has_our_code: bool
    """Whether the code of this version made the artifact, so that the default guards were those of this version."""

    @property
    def last(self) -> int:
        """Return the number of the stage's last step."""
        return self.entries[-1].step

    @property
    def defaults(self) -> set[Guard]:
        """The default guards of this version, without those that the recipe itself names."""
        return set(guards_of(self.work)) - set(own_guards(self.work))

    def guarding(self, recorded: Iterable[Firing]) -> Guarding:
        """Return what the stage's guards saw. Default guards of another version are taken from the recorded firings."""
        own = own_guards(self.work)
        others = {} if self.work.guards == OFF else {each.guard: None for each in recorded if each.is_default}
        guards = tuple(dict.fromkeys((*guards_of(self.work), *others)))
        return Guarding(guards, self.entries, defaults=set(guards) - set(own))


def guard_checks(evidence: Evidence, run_id: str, step: str, ref: Ref) -> Iterator[Check]:
    """Check the recorded firings of the stage of a run that made an artifact."""
    record = evidence.record(run_id)
    if not isinstance(record, RunRecord):
        return  # the check of the record reports this, and without it the recipe is not known
    stage = record.stages.get(step)
    curves = _curves_of(evidence, record, step, ref.provenance.get("code"))
    if curves is None or stage is None:
        return
    if isinstance(curves, Missing):
        yield Check(subject=SUBJECT, outcome="unchecked", detail=curves)
        return
    problems = _Problems()
    recorded = {"the ref": ref.artifact.firings, "run.json": stage.firings}
    replay = evidence.replay(run_id)
    sent = replay.artifact_of(step) if isinstance(replay, Replay) else None
    if sent is not None and sent.digest == ref.artifact.digest:
        recorded["the outbox"] = sent.firings
    guarding = curves.guarding(each for firings in recorded.values() for each in firings)
    for source, firings in recorded.items():
        _compare(problems, source, firings, guarding.firings, curves)
    sealed = evidence.sealed(ref.artifact.digest)
    if not isinstance(sealed, Missing | Broken):
        own = [each for each in guarding.firings if not each.is_default]
        _compare(problems, "metrics.json of the artifact", sealed.measured.firings, own, curves)
    problems.wrong += _end_problems(ref.artifact, guarding, curves)
    count = len(guarding.firings)
    yield from problems.checks(
        f"{count} firing{'' if count == 1 else 's'}, derived again from {len(curves.entries):,} steps"
    )


def failed_guard_checks(evidence: Evidence, record: RunRecord) -> Iterator[Check]:
    """Check the recorded firings of the stages that failed, and so made no artifact."""
    for step, stage in record.stages.items():
        if stage.status != "failed" or stage.digest is not None:
            continue
        curves = _curves_of(evidence, record, step, stage.provenance.get("code"))
        if curves is None or (isinstance(curves, Missing) and not stage.firings):
            continue  # it has no guards, or failed before it reported anything
        problems = _Problems()
        if isinstance(curves, Missing):
            problems.unchecked.append(curves)
        else:
            _compare_failed(problems, stage, curves)
        for check in problems.checks(f"of {step}, which failed: derived again"):
            yield check.model_copy(update={"subject": f"{SUBJECT} of {step}"})


def _compare_failed(problems: _Problems, stage: StageRecord, curves: _Curves) -> None:
    """Compare up to the last step that was sent: what came after the last checkpoint is computed again."""
    known = [each for each in stage.firings if each.step <= curves.last]
    if later := [each for each in stage.firings if each.step > curves.last]:
        problems.unchecked.append(
            f"the outbox has its curves up to step {curves.last}, and run.json has a firing after step {later[0].step}"
        )
    _compare(problems, "run.json", known, curves.guarding(stage.firings).firings, curves)


def _curves_of(evidence: Evidence, record: RunRecord, step: str, code: object) -> _Curves | Missing | None:
    """Return the curves of a step; Missing: they are not there; None: no guards watch such a step."""
    try:
        work = work_of(record.recipe, step)
    except (KeyError, ValueError):
        return None  # the check of the record reports it
    if not isinstance(work, Training):
        return None
    replay = evidence.replay(record.run_id)
    entries = _entries(replay, step) if isinstance(replay, Replay) else ()
    if not entries:
        why = (
            replay
            if isinstance(replay, Missing)
            else f"the outbox of run {record.run_id} has no curves of {step}"
        )
        return Missing(f"firings of guards cannot be derived again: {why}")
    return _Curves(work, entries, has_our_code=code == code_digest(KINDS[work.kind].module))


def _entries(replay: Replay, step: str) -> tuple[Entry, ...]:
    """Return what a stage reported, in the order of its steps."""
    found: dict[int, dict[str, float]] = {}
    for line in replay.lines:
        if isinstance(line.operation, LogMetrics) and line.operation.stage == step:
            for name, value, _, number in line.operation.rows:
                found.setdefault(number, {})[name] = value
    return tuple(Entry(step=number, time=0.0, metrics=found[number]) for number in sorted(found))


def _compare(
    problems: _Problems, source: str, recorded: Iterable[Firing], derived: Iterable[Firing], curves: _Curves
) -> None:
    """Add what differs between the firings that a source has and those that the curves give."""
    ours, theirs = ({(each.guard, each.step): each for each in some} for some in (derived, recorded))
    for place, firing in theirs.items():
        again = ours.get(place)
        if again is None or (
            again.is_default and curves.has_our_code and firing.guard not in curves.defaults
        ):
            problems.wrong.append(f"{source} has a firing that neither recipe nor curves give: {firing}")
        elif firing != again:
            changed = _changed(firing, again)
            problems.wrong.append(f"{source} has another firing than the curves give: {firing}; {changed}")
    for place, firing in ours.items():
        if place in theirs:
            continue
        if firing.is_default and not curves.has_our_code:
            problems.unchecked.append(
                f"{source} lacks a firing that a default guard of this version gives: {firing}; another version made the "
                "artifact, and may have had no such guard"
            )
        else:
            problems.wrong.append(f"{source} lacks a firing that the curves give: {firing}")


def _changed(recorded: Firing, again: Firing) -> str:
    if recorded.is_default != again.is_default:
        return f"the recipe {'does not write' if again.is_default else 'writes'} that guard"
    return f"the values are {', '.join(f'{value!r}' for value in again.values)}"


def _end_problems(artifact: Artifact, guarding: Guarding, curves: _Curves) -> Iterator[str]:
    """Yield what disagrees between the mark of a stage that ended early and the guards and curves."""
    marked, firing = artifact.ended_early, guarding.ending(before=curves.last + 1)
    if marked is not None and marked.step != curves.last:
        yield f"the artifact is marked as {marked}, and its curves end at step {curves.last}"
    if marked is not None and marked.by == "guard":
        if firing is None or firing.guard.metric != marked.reason:
            yield f"the artifact is marked as {marked}, and by its curves no such guard fired"
    elif marked is None and firing is not None and KINDS[curves.work.kind].learns_from_samples:
        total = getattr(curves.work, "iterations", None)
        if total is not None and curves.last < total:
            yield f"the artifact is not marked as ended early, and {firing}"
