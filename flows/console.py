"""What a person sees of a run: the plan, a bar for each running stage, verdicts, samples, and where to look.

On a terminal the bars move; anywhere else the same facts come as plain lines, without control codes.
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flows.planning import PlannedStep
from flows.runs import RunRecord, StageRecord
from schemas.verdicts import Verdict
from tasks.journal import StageProgress

STYLES = {
    "reuse": "cyan",
    "reused": "cyan",
    "completed": "green",
    "resume": "yellow",
    "resumable": "yellow",
    "running": "yellow",
    "interrupted": "yellow",
    "run": "bold",
    "gate_closed": "red",
    "failed": "red",
    "blocked": "magenta",
    "wait": "dim",
    "waiting": "dim",
}
"""One colour for each action of a plan and each status of a stage or run."""

PLAIN_LINE_SECONDS = 10.0
"""How often a running stage says a line where there is no terminal."""

_PLAIN_WIDTH = 200
_SAMPLES_SHOWN = 3
_SAMPLE_CHARACTERS = 400


def open_console(stream: TextIO | None = None) -> Console:
    """A console for standard output, or for ``stream``; wide enough for whole lines where nobody watches."""
    stream = stream or sys.stdout
    return Console(file=stream, highlight=False, soft_wrap=False, width=None if stream.isatty() else _PLAIN_WIDTH)


class Screen:
    """The view of one run. Its methods may be called from the threads of several stages at once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar_of: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        self._changing = threading.Lock()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Bars move inside this block and are gone after it."""
        with self._bars:
            yield

    def say(self, text: str, style: str | None = None) -> None:
        """One line."""
        self.console.print(Text(text, style=style or ""))

    def started(self, name: str, attempt: int) -> None:
        """A stage's computation begins."""
        with self._changing:
            self._bar_of[name] = self._bars.add_task(escape(name), total=None, facts="starting")
            self._said[name] = time.monotonic()
        if not self.console.is_terminal:
            self.say(f"  {name}: started" + (f", attempt {attempt}" if attempt > 1 else ""))

    def progressed(self, name: str, progress: StageProgress) -> None:
        """A running stage got on."""
        facts = facts_of(progress)
        with self._changing:
            if name in self._bar_of:
                self._bars.update(
                    self._bar_of[name], completed=progress.step, total=progress.total, facts=escape(facts)
                )
            due = time.monotonic() - self._said.get(name, 0.0) >= PLAIN_LINE_SECONDS
            if due:
                self._said[name] = time.monotonic()
        if due and not self.console.is_terminal:
            self.say(f"  {name}: {facts}")

    def ended(self, name: str, stage: StageRecord) -> None:
        """A stage is over, one way or another."""
        with self._changing:
            if name in self._bar_of:
                self._bars.remove_task(self._bar_of.pop(name))
        mark, style = ("✓", STYLES[stage.status]) if stage.digest else ("✗", STYLES[stage.status])
        line = Text.assemble((f"  {mark} ", style), f"{name}  ", (stage.status.replace("_", " "), style))
        if headline := headline_of(stage):
            line.append(f"  {headline}")
        if stage.seconds:
            line.append(f"  {stage.seconds:.1f} s", "dim")
        self.console.print(line)
        if stage.reason:
            self.say(f"      {stage.reason}", style)
        for verdict in stage.verdicts:
            self.console.print(Text("      gate ").append_text(verdict_text(verdict)))

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """A few texts of baseline and candidate, each with its judgement."""
        for sample in samples[:_SAMPLES_SHOWN]:
            table = Table(show_header=False, box=None, padding=(0, 1, 0, 2))
            table.add_column(style="dim", no_wrap=True)
            table.add_column()
            for side, value in sample.items():
                table.add_row(side, Text(_cut(value)))
            self.console.print(table)
            self.console.print()


def show_plan(console: Console, steps: Iterable[PlannedStep], *, heading: str) -> None:
    """The plan as a table: what happens to each stage, and why."""
    console.print(Text(heading, style="bold"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    table.add_column("why", overflow="fold")
    for step in steps:
        why = Text("\n").join([Text(reason) for reason in step.reasons])
        for difference in step.drift:
            why.append(f"\ndrift: {difference}", "yellow")
        table.add_row(step.name, Text(step.said, style=STYLES[step.action]), why)
    console.print(table)


def show_end(console: Console, record: RunRecord, *, pages: Mapping[str, str]) -> None:
    """The run in one table, and where to look further."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("stage", "status", "headline", "digest"):
        table.add_column(column, no_wrap=column != "headline", overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    for name, stage in record.stages.items():
        table.add_row(
            name,
            Text(stage.status.replace("_", " "), style=STYLES[stage.status]),
            Text(headline_of(stage)),
            (stage.digest or "")[:12],
            f"{stage.seconds:.1f}" if stage.seconds else "",
        )
    console.print(table)
    console.print(
        Text.assemble("run ", (record.run_id, "bold"), " ", (record.status.replace("_", " "), STYLES[record.status]))
    )
    for what, where in pages.items():
        console.print(Text(f"  {what:<8}{where}"), soft_wrap=True)


def verdict_text(verdict: Verdict) -> Text:
    """The verdict with its number, green or red."""
    return Text(str(verdict), style="green" if verdict.passed else "red")


def headline_of(stage: StageRecord) -> str:
    """The gated metrics, or the first ones where there is no gate."""
    names = [verdict.metric for verdict in stage.verdicts] or list(stage.metrics)[:2]
    return "  ".join(f"{name} {_number(stage.metrics.get(name))}" for name in names)


def facts_of(progress: StageProgress) -> str:
    """``120/400  loss 0.61  21,034 tokens/s``, as far as the stage has measured them."""
    facts = [f"{progress.step}/{progress.total}" if progress.total else str(progress.step)]
    if progress.headline is not None:
        facts.append(f"{progress.headline} {_number(progress.value)}")
    if progress.tokens_per_second is not None:
        facts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    return "  ".join(facts)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SAMPLE_CHARACTERS else text[: _SAMPLE_CHARACTERS - 1] + "…"
