"""Print the plan of a run on the console: what happens to each stage and why, its guards, and the default learning rates."""

from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vantage.runs.console import STYLES
from vantage.runs.planning import PlannedStep
from vantage.runs.resolving import ChosenRates
from vantage.runs.wrapped_lines import print_line
from vantage.schemas.recipe.default_guards import DEFAULT
from vantage.schemas.recipe.guards import OFF


def show_plan(
    console: Console,
    steps: Iterable[PlannedStep],
    *,
    heading: str,
    warnings: Iterable[str] = (),
    chosen: ChosenRates | None = None,
) -> None:
    """Print the plan as a table: action and reason for each stage; below it the default learning rates."""
    console.print(Text(heading, style="bold"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    steps = list(steps)
    if elsewhere := any(step.pool or step.nodes for step in steps):
        table.add_column("where", no_wrap=True)
    table.add_column("why", overflow="fold")
    for step in steps:
        where = [step.where] if elsewhere else []
        why = Text("\n").join([Text(reason) for reason in step.reasons])
        for difference in step.drift:
            why.append(f"\ndrift: {difference}", "yellow")
        table.add_row(step.name, Text(step.label, style=STYLES[step.action]), *where, why)
    console.print(table)
    for line in _guard_lines(steps):
        print_line(console, Text(line, style="dim"))
    for name, rates in (chosen or {}).items():
        text = ", ".join(f"{field} {rate:g}" for field, rate in rates.items())
        print_line(console, Text(f"{name}: {text}, chosen for the width of the model", style="dim"))
    for warning in warnings:
        print_line(console, Text(f"warning: {warning}", style="yellow"))


def _guard_lines(steps: Sequence[PlannedStep]) -> Iterator[str]:
    """Yield a line for each guard that the recipe sets, and one line for all default guards."""
    defaults: dict[str, int] = {}
    for step in steps:
        own = [guard for guard in step.guards if not guard.endswith(DEFAULT)]
        yield from (f"{step.name}: guard{'s' if guard == OFF else ''} {guard}" for guard in own)
        if count := len(step.guards) - len(own):
            defaults[step.name] = count
    if defaults:
        counted = ", ".join(f"{name} {count}" for name, count in defaults.items())
        yield f"default guards, which only warn: {counted}; vantage plan --json lists them"
