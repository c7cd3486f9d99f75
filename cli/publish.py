"""``vantage publish`` and ``vantage rollback``: move aliases after a run has ended."""

import sys
from typing import Annotated

import typer

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, AsJson, Place, Verbose, complete_run
from vantage.cli.approve import By, DecisionKey, Reason
from vantage.cli.output import explained, print_json, workspace_at


def publish(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Publish only this registered model.")
    ] = None,
    alias: Annotated[
        str | None, typer.Option("--alias", metavar="ALIAS", help="Move this alias in place of the recipe's.")
    ] = None,
    key: DecisionKey = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Publish the models of a run that has ended, with the checks of its end, and record who did."""
    with explained(verbose):
        from vantage.flows.publishing.moving_aliases import publish_again
        from vantage.runs.console import Screen, open_console
        from vantage.runs.names import named_run
        from vantage.runs.next_steps import after_questions
        from vantage.runs.own_commands import own_command
        from vantage.runs.run import read_run

        place = workspace_at(workspace)
        run_id = named_run(place, run_id, "publish")
        screen = Screen(open_console(sys.stderr if as_json else sys.stdout))
        outcomes = publish_again(place, run_id, screen, model=model, alias=alias, key=key)
        if as_json:
            print_json({"run_id": run_id, "publications": outcomes})
        if "waiting_approval" in outcomes.values():
            for line in after_questions(read_run(place, run_id), place.address):
                if own_command("resume") not in line and not line.startswith("  and go on"):
                    screen.say(line)
            raise typer.Exit(ExitCode.WAITING_APPROVAL)
        if set(outcomes.values()) != {"published"}:
            raise typer.Exit(ExitCode.GATE_CLOSED)


def rollback(
    target: Annotated[
        str, typer.Argument(metavar="MODEL@ALIAS", help="A registered model and the alias to move back.")
    ],
    reason: Reason,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="VERSION",
            help="The version to move the alias to. Default: the one that it pointed to before.",
        ),
    ] = None,
    by: By = None,
    key: DecisionKey = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Move an alias back to the version that it pointed to before, with the checks of every publication, and record why."""
    with explained(verbose):
        from vantage.flows.publishing.moving_aliases import roll_back
        from vantage.runs.approving import text_of
        from vantage.runs.console import Screen, open_console
        from vantage.runs.names import registered_alias

        name, alias = registered_alias(target, "rollback")
        said = text_of("--reason", reason)
        screen = Screen(open_console(sys.stderr if as_json else sys.stdout))
        moved = roll_back(
            workspace_at(workspace),
            name,
            alias,
            to=to,
            by=None if by is None else text_of("--by", by, longest=200),
            reason=said,
            watcher=screen,
            key=key,
        )
        if as_json:
            print_json({**moved._asdict(), "reason": said})
            return
        later = "" if moved.sent else "; MLflow does not answer, and the next run sends it"
        typer.echo(
            f"{name}@{alias}: version {moved.from_version} → {moved.to_version} ({moved.stage} of run {moved.run_id}), "
            f"by {moved.by}: {said}{later}"
        )
