"""Lives of fake stages without Prefect: what the tests of several modules drive."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.attempts.jobs import resources_of
from flows.attempts.stage_life import StageLife
from flows.machine import Machine, Share, available_cpus
from flows.runs.resolving import load_resolved
from flows.runs.run import StageRecord, Workspace, drive
from ledger.run_ledger import Ledger
from storage.store import Store
from tasks.training.progress import StageProgress


class Witness:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.seen: list[tuple[str, int]] = []

    def say(self, text: str, style: str = "") -> None:
        self.lines.append(text)

    def started(self, step: str, attempt: int) -> None:
        self.lines.append(f"{step} started {attempt}")

    def progressed(self, step: str, report: StageProgress) -> None:
        self.seen.append((step, report.step))

    def ended(self, step: str, stage: StageRecord) -> None:
        self.lines.append(f"{step} {stage.status}")


@contextmanager
def lives(workspace: Workspace, recipe: Path, *overrides: str) -> Iterator[StageLife]:
    """The lives of a run of the recipe, as ``vantage run`` would make them."""
    resolved, _ = load_resolved(str(recipe), overrides)
    with drive(workspace, resolved, source=str(recipe)) as run:
        ledger = Ledger(None, workspace.root, resolved.recipe)
        life = StageLife(
            run,
            store=Store(workspace.store),
            ledger=ledger,
            watcher=Witness(),
            stage_function="fake_work.run_stage",
        )
        life.begin()
        yield life


def live_all(life: StageLife, *, until: str | None = None) -> dict[str, StageRecord]:
    """Every step in order, as a run that has nothing to compute does it; up to and without ``until``."""
    for step in life.inputs:
        if step == until:
            break
        obstacle = life.obstacle(step)
        if obstacle:
            life.block(step, obstacle)
        else:
            cpus, _ = Machine(cpus=available_cpus()).share_of(resources_of(life.recipe, step))
            life.live(step, Share(cpus=cpus))
    return life.run.record.stages


def events(workspace: Workspace) -> list[str]:
    """Which computations there were, as ``fake_work`` wrote them down."""
    path = workspace.root / "events.txt"
    return path.read_text().splitlines() if path.exists() else []


def pace(workspace: Workspace, seconds: float) -> None:
    """How long a step of a fake stage takes from now on."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / "seconds.txt").write_text(str(seconds))
