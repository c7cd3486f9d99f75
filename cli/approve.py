"""``vantage approve`` and ``vantage reject``: a person's answer to a run that waits for one."""

from pathlib import Path
from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at

RunId = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)]
Subject = Annotated[
    str,
    typer.Argument(
        metavar="STAGE",
        help="The stage whose gate waits, or publish:NAME for the alias of a registered model.",
    ),
]
Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="The reason; it is recorded with the run.")
]
By = Annotated[
    str | None,
    typer.Option(
        "--by", metavar="NAME", help="Name of the person who decides. Default: the user who is logged in."
    ),
]
DecisionKey = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The private key that signs the decision, if it is not that of the recipe's `sign:`; its password is in "
        "VANTAGE_KEY_PASSWORD.",
    ),
]


def approve(
    run_id: RunId,
    subject: Subject,
    reason: Reason,
    by: By = None,
    key: DecisionKey = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Approve a gate that did not pass, or a new alias; `vantage resume` then goes on with the run."""
    _answer(
        run_id,
        subject,
        approved=True,
        by=by,
        reason=reason,
        key=key,
        workspace=workspace,
        as_json=as_json,
        verbose=verbose,
    )


def reject(
    run_id: RunId,
    subject: Subject,
    reason: Reason,
    by: By = None,
    key: DecisionKey = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Reject a gate that did not pass, or a new alias: the gate stays closed, or the alias stays where it is."""
    _answer(
        run_id,
        subject,
        approved=False,
        by=by,
        reason=reason,
        key=key,
        workspace=workspace,
        as_json=as_json,
        verbose=verbose,
    )


def _answer(
    run_id: str,
    subject: str,
    *,
    approved: bool,
    by: str | None,
    reason: str,
    key: Path | None,
    workspace: str,
    as_json: bool,
    verbose: bool,
) -> None:
    with explained(verbose):
        from vantage.runs.names import named_run
        from vantage.runs.own_commands import own_command
        from vantage.runs.run import is_active
        from vantage.signing.deciding import how_to_sign, sign_and_answer

        place = workspace_at(workspace)
        run_id = named_run(place, run_id, "approve" if approved else "reject")
        done = sign_and_answer(place, run_id, subject, approved=approved, by=by, reason=reason, key=key)
        given, sent = done.approval, done.sent
        if as_json:
            signed = {"signed_by": done.key_id, "unsigned": done.unsigned or None}
            print_json({"run_id": run_id, "in_mlflow": sent, **signed, **given.model_dump(mode="json")})
            return
        typer.echo(f"{given.question.subject} of run {run_id} is {given}")
        if done.key_id is not None:
            typer.echo(f"signed by key {done.key_id}")
        elif done.unsigned:
            typer.echo(f"NOT SIGNED: {done.unsigned}; sign it later: {how_to_sign(place, run_id)}", err=True)
        if is_active(place, run_id):
            typer.echo("a process executes the run, and takes it up")
            return
        if not sent:
            typer.echo("MLflow does not answer; the next run sends it")
        typer.echo(f"go on with: {own_command('resume', run_id, '--workspace', place.address)}")
