"""The runs of one sweep: each is a run as of ``vantage run``, and gives a row of the report."""

import asyncio
import json
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.machine import Machine
from vantage.flows.execution import execute, exit_code
from vantage.flows.open_runs import opened
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.sweeps.report import (
    Comparison,
    Row,
    compare,
    number,
    plot,
    rows_csv,
    sharing,
    sharing_lines,
    show_table,
    status_of_row,
    table_csv,
    table_markdown,
)
from vantage.flows.sweeps.to_mlflow import SweepLedger
from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger
from vantage.runs.console import Screen
from vantage.runs.own_commands import own_command
from vantage.runs.planning import PlannedStep, plan, steps_in_store
from vantage.runs.record import RunRecord, StageRecord
from vantage.runs.run import acquire_run, recipe_digests
from vantage.runs.watching import PAGE_AT
from vantage.runs.workspace import Workspace
from vantage.runs.wrapped_lines import print_whole
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.sweep import Cell, Sweep, SweepPlan
from vantage.storage.durable_files import replace_file
from vantage.storage.storage import Storage
from vantage.tasks.training.progress import StageProgress

FINISHED = ("completed", "gate_closed")
"""Statuses of runs with nothing more to do."""


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep."""

    sweep_id: str
    folder: Path
    rows: list[Row]
    table: list[Comparison]
    shared: dict[str, tuple[int, int]]
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        """Return the last line of ``sweep --json``."""
        shared = {step: {"artifacts": made, "runs": used} for step, (made, used) in self.shared.items()}
        return {
            "sweep_id": self.sweep_id,
            "folder": str(self.folder),
            "exit_code": self.exit_code,
            "table": [asdict(line) for line in self.table],
            "rows": [asdict(row) for row in self.rows],
            "shared": shared,
        }


class SweepRuns:
    """The runs of one sweep and their results; belongs to one event loop while they run."""

    def __init__(
        self,
        swept: SweepPlan[ResolvedRecipe],
        *,
        workspace: Workspace,
        store: Storage,
        screen: Screen,
        folder: Path,
        source: str,
        stage_function: str,
    ) -> None:
        self.swept = swept
        self.workspace = workspace
        self.screen = screen
        self.folder = folder
        self._store = store
        self._source = source
        self._stage_function = stage_function
        self._cells = swept.cells()
        self._rows: dict[str, Row] = {}
        self._stages: dict[str, Mapping[str, StageRecord]] = {}
        self._failed: dict[str, tuple[str, int]] = {}
        """Stage key → the run in which it failed, and its exit code."""
        self._running: set[Orchestrator] = set()
        self._name_width = max(len(cell.name) for cell in self._cells)
        longest = max(len(f"{cell.name}: {step}") for cell in self._cells for step in cell.recipe.stages)
        screen.name_width = min(longest, screen.console.width // 2)
        self._stopped = False
        self._adding = asyncio.Lock()
        any_recipe = next(iter(swept.recipes.values()))
        self._ledger = SweepLedger(workspace.root, any_recipe.recipe, folder.name)
        content = {**swept.sweep.model_dump(mode="json"), "recipes": {}}
        content["recipes"] = {arm: recipe.model_dump(mode="json") for arm, recipe in swept.recipes.items()}
        replace_file(folder / "sweep.json", json.dumps(content, indent=1, ensure_ascii=False).encode())

    # -- one cell

    def verify(self, cell: Cell[ResolvedRecipe]) -> RunRecord:
        """Run a cell whose artifacts are all in the store, although no run of its recipe has finished."""
        with acquire_run(self.workspace, cell.recipe, source=self._named(cell)) as run:
            return execute(run, Screen(Console(quiet=True)))

    async def run_cell(
        self, cell: Cell[ResolvedRecipe], machine: Machine, ended: Callable[[str], None]
    ) -> None:
        """Run the cell on the sweep's machine, and add its row."""
        from vantage.flows.pipeline import order

        if self._stopped:
            return
        steps = await asyncio.to_thread(plan, cell.recipe, self._store, ())
        if row := self._already_failed(cell, steps):
            await self._add(cell, row, {})
            return
        with (
            acquire_run(self.workspace, cell.recipe, source=self._named(cell)) as run,
            Ledger(None, self.workspace.root, cell.recipe.recipe) as ledger,
        ):
            orchestrator = Orchestrator(
                run,
                store=self._store,
                ledger=ledger,
                watcher=CellView(cell.name, self.screen, self._failed),
                machine=machine,
                in_store=steps_in_store(steps),
                ended=ended,
                stage_function=self._stage_function,
            )
            orchestrator.begin()
            self._running.add(orchestrator)
            if self._stopped:  # a signal in another thread has asked for the stop
                orchestrator.request_stop()
            try:
                with opened(orchestrator):
                    recipe = cell.recipe.model_dump_json(indent=1, exclude_unset=True)
                    await order(orchestrator, recipe=recipe, overrides=(), strict=False)
            except BaseException:
                orchestrator.request_stop()
                raise
            finally:
                self._running.discard(orchestrator)
                await asyncio.to_thread(orchestrator.end)
        await self._add(cell, row_of(cell, run.record, self.swept.sweep), run.record.stages)

    def request_stop(self) -> None:
        """Ask the running stages of all runs to save their state and end; start no other run."""
        self._stopped = True
        for orchestrator in tuple(self._running):
            orchestrator.request_stop()

    def _already_failed(self, cell: Cell[ResolvedRecipe], steps: Sequence[PlannedStep]) -> Row | None:
        """Return the row of a cell with a shared stage that has failed already, else None."""
        for step in steps:
            if step.stage_key in self._failed and step.action != "reuse":
                name, code = self._failed[step.stage_key]
                nothing = dict.fromkeys(measure.name for measure in self.swept.sweep.measure)
                reason = f"{step.name} has failed in {name}"
                return Row(cell.arm, cell.seed, "failed", nothing, 0.0, None, None, code, reason)
        return None

    def _named(self, cell: Cell[ResolvedRecipe]) -> str:
        return f"{self._source}: {cell.name}"

    # -- results

    def keep(self, cell: Cell[ResolvedRecipe], record: RunRecord) -> None:
        """Add the row of a run that had finished before."""
        self._keep(cell, row_of(cell, record, self.swept.sweep), record.stages)

    async def _add(self, cell: Cell[ResolvedRecipe], row: Row, stages: Mapping[str, StageRecord]) -> None:
        async with self._adding:
            self._keep(cell, row, stages)
            await asyncio.to_thread(self._write, status="RUNNING")

    def _keep(self, cell: Cell[ResolvedRecipe], row: Row, stages: Mapping[str, StageRecord]) -> None:
        self._rows[cell.name] = row
        self._stages[cell.name] = stages
        values = "  ".join(
            f"{name} {number(value)}" for name, value in row.values.items() if value is not None
        )
        content = [
            f"{len(self._rows)}/{len(self._cells)}",
            f"{cell.name:<{self._name_width}}",
            values or _shown_status(row, stages),
        ]
        self.screen.say("  ".join([*content, f"{row.seconds:.1f} s" if row.seconds else ""]).rstrip())

    def interrupted(self) -> None:
        """Record in MLflow that the sweep was interrupted."""
        self._write(status="KILLED")

    def _write(self, *, status: str) -> tuple[list[Row], list[Comparison], dict[str, tuple[int, int]]]:
        """Write all files except the plot, and update MLflow."""
        sweep = self.swept.sweep
        rows = [self._rows[cell.name] for cell in self._cells if cell.name in self._rows]
        table = compare(sweep, rows)
        shared = sharing(
            {step: stage.stage_key for step, stage in stages.items() if stage.digest and stage.stage_key}
            for stages in self._stages.values()
        )
        named = {name for recipe in self.swept.recipes.values() for name in recipe.stages}
        shared = {step: counts for step, counts in shared.items() if step in named}
        note = table_markdown(sweep, rows, table, shared)
        for name, text in (
            ("rows.csv", rows_csv(sweep, rows)),
            ("table.csv", table_csv(table)),
            ("table.md", note),
        ):
            replace_file(self.folder / name, text.encode())
        self._ledger.record(self.folder, rows, table, status=status, note=note)
        return rows, table, shared

    def end(self) -> SweepResult:
        """Write and print the final results."""
        code = self._exit_code()
        status = {int(ExitCode.OK): "FINISHED", int(ExitCode.RESUME): "KILLED"}.get(code, "FAILED")
        rows = list(self._rows.values())
        plot(self.swept.sweep, rows, compare(self.swept.sweep, rows), self.folder / "plot.png")
        rows, table, shared = self._write(status=status)
        show_table(self.screen.console, self.swept.sweep, table)
        for content in sharing_lines(shared):
            self.screen.say(content)
        console = self.screen.console
        print_whole(console, f"  {'files':<8}", str(self.folder))
        unsent = [row.run_id for row in rows if row.run_id and self._outbox(row.run_id).is_unsent()]
        if unsent:
            again = own_command("resume", unsent[0], "--workspace", self.workspace.address)
            self.screen.say(
                f"  MLflow has not got all records of {len(unsent)} of {len(rows)} runs. They wait in "
                f"{self.workspace.root / 'runs'}; this sends them all once MLflow answers:\n    {again}\n"
                "  and the same sweep again sends its table",
                "yellow",
            )
        else:
            where = Ledger(None, self.workspace.root, "").where()
            is_server = "://" in where.partition(" ")[0]
            ui = own_command("ui", "--workspace", self.workspace.address)
            print_whole(console, f"  {'MLflow' if is_server else 'pages':<8}", where if is_server else ui)
        if failed := next((row for row in rows if row.status == "failed" and row.run_id), None):
            logs = own_command("logs", str(failed.run_id), "--workspace", self.workspace.address)
            print_whole(console, f"  {'logs':<8}", logs)
            self.screen.say("The same sweep again runs what is missing, when the cause is corrected.")
        return SweepResult(self.folder.name, self.folder, rows, table, shared, code)

    def _outbox(self, run_id: str) -> Outbox:
        return Outbox(self.workspace.root / "runs" / run_id / "ledger")

    def _exit_code(self) -> int:
        """Return the exit code of the first run that failed, else of one whose gate closed; 75 if runs are missing."""
        codes = [row.exit_code for row in self._rows.values()]
        if len(self._rows) < len(self._cells):
            codes.append(ExitCode.RESUME)
        ranked = sorted(codes, key=lambda code: (code == ExitCode.OK, code == ExitCode.GATE_CLOSED))
        return ranked[0]


class CellView:
    """The watcher of one cell: shows its stages with the cell's name, and only those that compute."""

    def __init__(self, cell: str, screen: Screen, failed: dict[str, tuple[str, int]]) -> None:
        self._cell = cell
        self._screen = screen
        self._failed = failed

    def say(self, text: str, style: str = "") -> None:
        if text.startswith(PAGE_AT):
            return  # the sweep has printed the server's address, whose page lists all runs
        self._screen.say(f"  {self._cell}: {text.strip()}", style)

    def started(self, step: str, attempt: int) -> None:
        self._screen.started(f"{self._cell}: {step}", attempt)

    def progressed(self, step: str, report: StageProgress) -> None:
        self._screen.progressed(f"{self._cell}: {step}", report)

    def ended(self, step: str, stage: StageRecord) -> None:
        if stage.status == "failed" and stage.stage_key:
            self._failed[stage.stage_key] = (self._cell, stage.exit_code or ExitCode.INTERNAL)
        if stage.status != "reused":
            self._screen.ended(f"{self._cell}: {step}", stage)


def _shown_status(row: Row, stages: Mapping[str, StageRecord]) -> str:
    """Return the status of a run without values; the reason of a stage that failed was printed when it did."""
    failed = [name for name, stage in stages.items() if stage.status == "failed"]
    return f"failed: {', '.join(failed)}" if failed else status_of_row(row)


def row_of(cell: Cell[ResolvedRecipe], record: RunRecord, sweep: Sweep) -> Row:
    """Return a run's row. Measured values count, even if a gate then closed: leaving such runs out would flatter."""
    metrics = {
        measure.name: record.stages[measure.stage].metrics.get(measure.metric) for measure in sweep.measure
    }
    reasons = [
        f"{name}: {stage.reason}"
        for name, stage in record.stages.items()
        # the reason of a blocked stage only repeats that another stage failed
        if stage.reason and stage.status != "blocked"
    ]
    reasons += [
        f"{name}: gate {verdict}"
        for name, stage in record.stages.items()
        for verdict in stage.verdicts
        if not verdict.passed
    ]
    return Row(
        arm=cell.arm,
        seed=cell.seed,
        status=record.status,
        values=metrics,
        seconds=sum(stage.seconds for stage in record.stages.values()),
        run_id=record.run_id,
        mlflow_run_id=record.mlflow_run_id,
        exit_code=exit_code(record),
        reason="; ".join(reasons),
    )


def finished_run(
    cell: Cell[ResolvedRecipe], steps: Sequence[PlannedStep], runs: Sequence[RunRecord]
) -> RunRecord | None:
    """Return the newest finished run of the cell whose recorded artifacts the store still has."""
    digests = recipe_digests(cell.recipe)
    stored = {step.name: step.digest for step in steps if step.digest}
    for record in runs:
        if record.recipe_digest in digests and record.status in FINISHED:
            made = {name: stage.digest for name, stage in record.stages.items() if stage.digest}
            return record if made == stored else None
    return None
