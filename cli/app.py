"""The program and the shared options of its commands. Each command imports the heavy modules that it needs."""

from typing import Annotated

import typer

from vantage.attempts.exit_codes import MEANINGS
from vantage.cli.output import workspace_at
from vantage.runs.workspace import DEFAULT_WORKSPACE as DEFAULT_WORKSPACE
from vantage.storage.bucket import address_forms

RUN_HELP = "A run's id, the beginning of one, its number, or `latest`."


def complete_recipe(incomplete: str) -> list[str]:
    """Return the built-in recipes that start with the text."""
    from vantage.schemas.loading.recipe_file import builtin_recipes

    return [name for name in builtin_recipes() if name.startswith(incomplete)]


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Return the runs of the workspace that start with the text."""
    from vantage.runs.run_ids import LATEST, run_ids

    known = [LATEST, *run_ids(workspace_at(context.params.get("workspace") or DEFAULT_WORKSPACE))]
    return [run_id for run_id in known if run_id.startswith(incomplete)]


Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's file, or the name of a built-in one.",
        autocompletion=complete_recipe,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a field: stages.policy.algorithm=ppo. Repeatable."
    ),
]
Place = Annotated[
    str,
    typer.Option(
        "--workspace",
        metavar="PLACE",
        envvar="VANTAGE_WORKSPACE",
        help=f"Runs, artifacts and ledger: a folder, or {', '.join(address_forms())}.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Machine-readable output, and only that, on standard output.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse to reuse what was made with other code or libraries.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the frameworks' own logs, and tracebacks.")
]

Until = Annotated[
    str | None,
    typer.Option(
        "--until", metavar="STAGE", help="Only this stage and all that it reads; nothing is published."
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="STAGE",
        help="Only this stage: what it reads has to be made already. Nothing is published.",
    ),
]

app = typer.Typer(
    name="vantage",
    help="Declarative RLHF pipelines: one recipe from demonstrations to an evaluated policy.",
    epilog=f"Exit codes: {', '.join(f'{int(code)} {meaning}' for code, meaning in MEANINGS.items())}.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"vantage {version('vantage-rlhf')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declarative RLHF pipelines: one recipe from demonstrations to an evaluated policy."""
