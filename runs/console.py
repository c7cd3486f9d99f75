"""Console output of a run: the plan, a progress bar for each running stage, verdicts, samples and addresses.

A terminal shows progress bars; other streams get the same facts as plain lines, without control codes.
"""

import sys
import threading
import time
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from typing import Any, TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
)
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from vantage.attempts.identity.shown import describe
from vantage.attempts.jobs import gates_of
from vantage.runs.detached_streams import Attended, detach_reader
from vantage.runs.record import SUCCEEDED, RunRecord, StageRecord
from vantage.runs.status import RunState
from vantage.runs.summary import comparison, headline_of, reasons, short_number
from vantage.runs.wrapped_lines import print_line
from vantage.schemas.records.verdicts import Verdict
from vantage.schemas.safe_text import safe_text
from vantage.tasks.training.progress import RUNNING, StageProgress

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
    "waiting_approval": "yellow",
    "failed": "red",
    "blocked": "magenta",
    "wait": "dim",
    "waiting": "dim",
    "removed": "dim",
}
"""One colour for each action of a plan and each status of a stage or run."""

MARKS = {
    "reused": "=",
    "completed": "✓",
    "resumable": "…",
    "gate_closed": "✗",
    "waiting_approval": "?",
    "failed": "✗",
    "blocked": "–",
}
"""Status → first character of a stage's last line."""

PLAIN_LINE_SECONDS = 10.0
"""Seconds between two progress lines of a running stage if there is no terminal."""

_PLAIN_WIDTH = 200
_NAME_WIDTH = 20
_SAMPLES_SHOWN = 3
_SAMPLE_CHARACTERS = 400


class SafeConsole(Console):
    """A console that escapes control characters in text and masks secrets; its own control codes are kept."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments, with safe text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(safe_text(segment.text), segment.style)


class PipeSafeConsole(SafeConsole):
    """A console that survives a closed pipe: ``vantage run … | head`` must not end a training.

    rich would raise SystemExit in the thread that printed last.
    """

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True
        detach_reader(self.file)


def open_console(stream: TextIO | None = None) -> Console:
    """Return a console for standard output, or for ``stream``; wide enough for whole lines if it is no terminal."""
    stream = stream or sys.stdout
    stream = getattr(stream, "wrapped", stream)  # the console itself makes text safe
    return PipeSafeConsole(
        file=cast(TextIO, Attended(stream)),
        highlight=False,
        markup=False,  # names of people, files and deployments may have brackets
        emoji=False,
        soft_wrap=False,
        width=None if stream.isatty() else _PLAIN_WIDTH,
    )


class Screen:
    """The view of one run. Its methods may be called from the threads of several stages at once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.name_width = _NAME_WIDTH
        """Columns of a stage's name in the line about its end."""
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=12),
            # The stage estimates the time left: rich forgets a step that took longer than half a minute.
            TextColumn(
                "{task.fields[facts]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar_of: dict[str, TaskID] = {}
        self._last_lines: dict[str, tuple[float, str]] = {}
        self._fired: dict[str, tuple[str, ...]] = {}
        """Stage → the firings of its guards that are printed already."""
        self._changing = threading.Lock()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show progress bars inside this block."""
        with self._bars:
            yield

    def say(self, text: str, style: str = "") -> None:
        """Print one line."""
        print_line(self.console, Text(text, style=style))

    def started(self, step: str, attempt: int) -> None:
        """Show that a stage's computation begins."""
        with self._changing:
            self._bar_of[step] = self._bars.add_task(escape(step), total=None, facts="starting")
            self._last_lines[step] = (time.monotonic(), "")
        if not self.console.is_terminal:
            self.say(f"  {step}: started" + (f", attempt {attempt}" if attempt > 1 else ""))

    def progressed(self, step: str, report: StageProgress) -> None:
        """Show that a running stage has made progress."""
        facts = facts_of(report)
        with self._changing:
            if step in self._bar_of:
                bar, total = self._bar_of[step], report.total or None
                self._bars.update(bar, completed=report.step, total=total, facts=escape(facts))
            printed_at, printed = self._last_lines.get(step, (0.0, ""))
            due = facts != printed and time.monotonic() - printed_at >= PLAIN_LINE_SECONDS
            if due:
                self._last_lines[step] = (time.monotonic(), facts)
        if due and not self.console.is_terminal:
            self.say(f"  {step}: {facts}")
        self._say_new(step, (*report.notices, *report.firings))

    def _say_new(self, step: str, firings: tuple[str, ...]) -> None:
        """Print the new notices and firings, without those that a resumed stage reports again."""
        with self._changing:
            known = self._fired.get(step, ())
            new = [firing for firing in firings if firing not in known]
            self._fired[step] = (*known, *new)
        for firing in new:
            self.say(f"  {step}: {firing}", "bold yellow")

    def ended(self, step: str, stage: StageRecord) -> None:
        """Show that a stage has ended, with or without an artifact."""
        with self._changing:
            if step in self._bar_of:
                self._bars.remove_task(self._bar_of.pop(step))
        style = STYLES[stage.status]
        start = Text.assemble((f"  {MARKS[stage.status]} ", style), f"{step:<{self.name_width}} ")
        line = Text.assemble((status_text(stage.status), style))
        if headline := headline_of(stage):
            line.append(f"  {headline}")
        if stage.seconds:
            line.append(f"  {stage.seconds:.1f} s", "dim")
        if stage.reason:
            line.append(f": {stage.reason}")
        self._line(start, line)
        if stage.remark:
            self._line(Text("      "), Text(stage.remark, style="yellow"))
        if stage.left_out:
            self._line(Text("      left out: "), Text(stage.left_out))
        for extension in stage.extensions:
            self._line(Text("      "), Text(extension, style="dim"))
        for warning in stage.warnings:
            self._line(Text("      warning: "), Text(warning, style="bold yellow"))
        for verdict in stage.verdicts:
            self._line(Text("      gate "), verdict_text(verdict))
        for gate in stage.loosened:
            self._line(Text("      loosened: "), Text(str(gate), style="bold red"))

    def _line(self, start: Text, rest: Text) -> None:
        """Print one line; on a terminal, a long line continues below ``rest``."""
        print_line(self.console, start + rest, hanging=start.cell_len)

    def samples(self, samples: Sequence[Mapping[str, Any]], *, heading: str = "") -> None:
        """Print a few texts of baseline and candidate, each with its judgement."""
        if samples and heading:
            self.say(f"\n{heading}", "dim")
        for sample in samples[:_SAMPLES_SHOWN]:
            table = Table(show_header=False, box=None, padding=(0, 1, 0, 2))
            table.add_column(style="dim", no_wrap=True)
            table.add_column(justify="right", no_wrap=True)
            table.add_column(overflow="fold")
            for side in ("prompt", "baseline", "candidate"):
                judgement = sample.get(f"{side}_judgement")
                table.add_row(
                    side,
                    "" if judgement is None else short_number(judgement),
                    Text(_cut(sample.get(side, ""))),
                )
            self.console.print(table)
            self.console.print()


def show_table(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same fields as a table."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for field in rows[0]:
        table.add_column(field, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else safe_text(str(value)) for value in row.values()))
    console.print(table)


def show_runs(console: Console, views: Sequence[RunState], workspace: str) -> None:
    """Print all runs of a workspace, the newest first."""
    if not views:
        print_line(console, Text(f"no runs in {workspace}"))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "recipe", "status", "stages", "started"):
        table.add_column(column, no_wrap=True)
    for view in views:
        good = sum(stage.status in SUCCEEDED for stage in view.record.stages.values())
        table.add_row(
            view.record.run_id,
            view.record.recipe.recipe,
            status_cell(view.status),
            f"{good}/{len(view.record.stages)}",
            view.record.started,
        )
    console.print(table)
    for view in views:
        _show_contradictions(console, view)


def show_run(console: Console, view: RunState) -> None:
    """Print one run: its stages, with the progress of running ones."""
    show_status(console, view.record, view.status)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("stage", "status", "how far, or what came of it", "digest"):
        table.add_column(column, no_wrap=column != "how far, or what came of it", overflow="fold")
    for name, stage in view.record.stages.items():
        report = view.progress.get(name)
        elsewhere = view.computed_by.get(name)
        doing = f"being computed by {elsewhere}; this run takes what it makes" if elsewhere else stage.reason
        text = Text(facts_of(report) if report else doing or outcome_of(stage))
        for gate in () if stage.verdicts else gates_of(view.record.recipe, name):
            text.append("\n" if text else "").append(
                f"gate {gate.metric} {gate.relation} {gate.bound:g}", "dim"
            )
        table.add_row(name, status_cell(view.status_of(name)), text, (stage.digest or "")[:12])
    console.print(table)
    for name, stage in view.record.stages.items():
        if stage.left_out:
            print_line(console, Text(f"{name}: left out: {stage.left_out}"))
    show_approvals(console, view.record)
    show_warnings(console, view.record)
    _show_makers(console, view.record)
    _show_contradictions(console, view)


def show_status(console: Console, record: RunRecord, status: str) -> None:
    """Print the status of a run; the reasons of a failed run begin in the same line and continue below."""
    first, *others = (status == "failed" and reasons(record)) or [""]
    part = f" ({record.part})" if record.part else ""
    line = Text.assemble(
        "run ", (record.run_id, "bold"), part, " ", status_cell(status), f": {first}" if first else ""
    )
    for each in (line, *(Text(f"  {reason}") for reason in others)):
        print_line(console, each)


def _show_makers(console: Console, record: RunRecord) -> None:
    """Show which code and machine computed which stages, a line each."""
    stages: dict[str, list[str]] = {}
    for name, stage in record.stages.items():
        if text := describe(stage.provenance):
            stages.setdefault(safe_text(text), []).append(name)
    for text, names in stages.items():
        which = "" if len(stages) == 1 else f"{', '.join(names)}: "
        print_line(console, Text(f"made by {which}{text}", style="dim"))


def show_warnings(console: Console, record: RunRecord) -> None:
    """Print extensions, warnings and loosened gates of all stages."""
    for name, stage in record.stages.items():
        for extension in stage.extensions:
            print_line(console, Text(f"{name}: {extension}", style="dim"))
        for warning in stage.warnings:
            print_line(console, Text(f"warning: {name}: {warning}", style="bold yellow"))
        for gate in stage.loosened:
            print_line(console, Text(f"loosened: {name}: {gate}", style="bold red"))


def show_approvals(console: Console, record: RunRecord) -> None:
    """Print the answers of people, and the questions that wait for one."""
    for answer in record.approvals:
        style = "green" if answer.approved else "red"
        print_line(console, Text(f"  {answer.question.subject} {answer}", style=style))
    for subject in record.open_questions:
        print_line(console, Text(f"  {subject} waits for a person", style="yellow"))


def _show_contradictions(console: Console, view: RunState) -> None:
    for each in view.contradictions:
        print_line(console, Text(f"{view.record.run_id}: not borne out: {each}", style="red"))


def status_text(status: str) -> str:
    """Return a status for display."""
    return status.replace("_", " ")


def status_cell(status: str) -> Text:
    """Return a status in its colour."""
    return Text(status_text(status), style=STYLES[status])


def verdict_text(verdict: Verdict) -> Text:
    """Return the verdict in green or red."""
    return Text(str(verdict), style="green" if verdict.passed else "red")


def outcome_of(stage: StageRecord) -> str:
    """Return the outcome of a stage in a cell: its verdicts or its headline, and its remark."""
    text = [str(verdict) for verdict in stage.verdicts] or [headline_of(stage)]
    if stage.verdicts and (compared := comparison(stage)):
        text.insert(0, compared)
    return "\n".join([*text, *([stage.remark] if stage.remark else [])])


def facts_of(progress: StageProgress) -> str:
    """Return ``3/14  4 min left  sampling 120/256, token 37 of 72  score 0.61  21,034 tokens/s``, without unknown parts."""
    facts = [f"{progress.step}/{progress.total}"] if progress.total else []
    if progress.seconds_left is not None:
        facts.append(f"{duration(progress.seconds_left)} left")
    facts += [phase_of(progress)] if progress.phase != RUNNING or not facts else []
    shown = [progress.headline] if progress.headline else list(progress.metrics)[:1]
    facts += [f"{name} {short_number(progress.metrics.get(name))}" for name in shown]
    if progress.tokens_per_second is not None:
        facts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    return "  ".join(facts)


def phase_of(progress: StageProgress) -> str:
    """Return ``sampling 120/256, token 37 of 72``: progress within the step."""
    count = f" {progress.phase_done}/{progress.phase_total}" if progress.phase_total else ""
    return f"{progress.phase}{count}{f', {progress.phase_note}' if progress.phase_note else ''}"


def duration(seconds: float) -> str:
    """Return ``45 s``, ``12 min`` or ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _cut(value: Any) -> str:
    text = safe_text(str(value))
    return text if len(text) <= _SAMPLE_CHARACTERS else text[: _SAMPLE_CHARACTERS - 1] + "…"
