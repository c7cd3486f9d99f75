"""``vantage critic``: show the quality of a run's critics, where they fail, and what to do."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from rich.console import Console

    from vantage.ledger.pages.elements import Table
    from vantage.runs.critics import Critics
    from vantage.schemas.records.critic_advice import Advice

_STYLES = {"good": "green", "note": "cyan", "warning": "yellow", "bad": "red"}


def critic(
    named: Annotated[
        str,
        typer.Argument(
            metavar="RUN[/STAGE]",
            help=f"{RUN_HELP} With a stage: its critic alone.",
            autocompletion=complete_run,
        ),
    ],
    workspace: Place = DEFAULT_WORKSPACE,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with plots; it needs no other file."),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show where the critics of a run explain the returns and where not, and what to do."""
    with explained(verbose):
        from vantage.runs.console import open_console
        from vantage.runs.critics import read_critics
        from vantage.runs.meanings import Command, OfRun, RunNamed, StageNamed
        from vantage.runs.names import Names
        from vantage.runs.run import read_run

        place = workspace_at(workspace)
        of_run = Names(place).resolve(named, Command("critic", (RunNamed, StageNamed)))
        assert isinstance(of_run, OfRun), "it accepts nothing else"
        step = None if isinstance(of_run, RunNamed) else of_run.step
        found = read_critics(place, read_run(place, of_run.run_id), step)
        if html is not None:
            from vantage.ledger.critic_page.page import critic_page

            page = critic_page(f"Critics of run {found.run_id}", found.pretrained, found.drifts)
            html.write_text(page, encoding="utf-8")
        if as_json:
            print_json(found.as_json())
        else:
            _show(open_console(), found, html)


def _show(console: "Console", found: "Critics", html: Path | None) -> None:
    """Show the tables first, then every finding; the last line is the most urgent remedy."""
    from rich.text import Text

    from vantage.ledger.critic_page.tables import diagnosis_tables, drift_table, summary
    from vantage.schemas.records.critic_advice import advice_on_drift, advice_on_pretraining

    advice: list[tuple[str, Advice]] = []
    for critic in found.pretrained:
        _show_section(console, critic.step, summary(critic.diagnosis), diagnosis_tables(critic.diagnosis))
        advice += [(critic.step, each) for each in advice_on_pretraining(critic)]
    for drift in found.drifts:
        so_far = " so far" if drift.is_running else ""
        _show_section(console, drift.step, f"{len(drift.points):,} iterations{so_far}.", [drift_table(drift)])
        advice += [(drift.step, each) for each in advice_on_drift(drift)]
    for line in found.missing:
        console.print(Text(line, style="dim"), soft_wrap=True)
    if html is not None:
        console.print(Text(f"The same with plots: {html}"), soft_wrap=True)
    order = ("bad", "warning", "good", "note")
    for step, each in sorted(advice, key=lambda of_step: -order.index(of_step[1].level)):
        console.print(Text.assemble((f"{step}: ", "bold"), (each.text, _STYLES[each.level])), soft_wrap=True)


def _show_section(console: "Console", step: str, text: str, tables: "list[Table]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Shown
    from rich.text import Text

    console.print(Text.assemble((step, "bold"), f": {text}\n"), soft_wrap=True)
    for table in tables:
        console.print(Text(table.title, style="bold"))
        console.print(Text(table.good, style="dim"), soft_wrap=not console.is_terminal)
        shown = Shown(box=SIMPLE_HEAD, pad_edge=False)
        for place, heading in enumerate(table.headings):
            shown.add_column(heading, justify="left" if place < table.left else "right")
        for cells in table.rows:
            shown.add_row(*map(Text, cells))
        console.print(shown)
