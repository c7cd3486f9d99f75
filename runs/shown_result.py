"""Print the end of a run: what came out, where to look, and what to do next."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vantage.runs.console import (
    outcome_of,
    show_approvals,
    show_status,
    show_warnings,
    status_cell,
)
from vantage.runs.next_steps import COMMAND_INDENT
from vantage.runs.record import SUCCEEDED, RunRecord, StageRecord
from vantage.runs.wrapped_lines import print_line, print_whole

_READY = "ready"
"""Status shown for several inputs, some of which were reused."""


def show_result(
    console: Console,
    record: RunRecord,
    *,
    pages: Mapping[str, str],
    models: Mapping[str, Path],
    commands: Mapping[str, str],
    next_steps: Sequence[str] = (),
) -> None:
    """Print the outcome of each stage, the addresses of the run's pages, the folders of its models, and what to do with them.

    Args:
        pages: server or file → address of the run's page.
        models: stage → folder of its model.
        commands: what can be done with the policy → the command.
        next_steps: lines on what to do about closed gates.
    """
    console.print()
    show_warnings(console, record)
    show_status(console, record, record.status)
    console.print(_outcomes(record))
    show_approvals(console, record)
    if pages or models:
        print_line(console, Text("where to look", style="bold"))
    for what, where in pages.items():
        print_whole(console, f"  {what:<8}", where)
    for name, folder in models.items():
        print_whole(console, f"  model   {name}: ", str(folder))
    if commands or next_steps:
        console.print()
        print_line(console, Text("what to do next", style="bold"))
    for what, command in commands.items():
        print_whole(console, f"  {what:<8}", command)
    if commands and next_steps:
        console.print()
    for line in next_steps:
        _show_step(console, line)


def _outcomes(record: RunRecord) -> Table:
    """Return a row for each stage, and one for all inputs that were made without a problem."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("stage", "status", "what came out"):
        table.add_column(column, no_wrap=column != "what came out", overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    inputs = {
        name: stage
        for name, stage in record.stages.items()
        if name not in record.recipe.stages and stage.status in SUCCEEDED
    }
    if inputs:
        statuses = {stage.status for stage in inputs.values()}
        status = status_cell(statuses.pop()) if len(statuses) == 1 else Text(_READY, style="green")
        table.add_row("inputs", status, ", ".join(inputs), _seconds(inputs.values()))
    for name, stage in record.stages.items():
        if name not in inputs:
            table.add_row(name, status_cell(stage.status), Text(outcome_of(stage)), _seconds([stage]))
    return table


def _seconds(stages: Iterable[StageRecord]) -> str:
    total = sum(stage.seconds or 0.0 for stage in stages)
    return f"{total:.1f}" if total else ""


def _show_step(console: Console, line: str) -> None:
    """Print a line of text, or a command, which is never broken."""
    if line.startswith(COMMAND_INDENT):
        console.print(Text(line), soft_wrap=True)
    else:
        print_line(console, Text(line))
