"""``vantage audit``: check a deployed model back to the bytes of its data, with a verdict for every edge."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from vantage.signing.keys import PublicKey


def audit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A registered model of MLflow (NAME, NAME@ALIAS, NAME/VERSION), one of MLflow's runs (its id), a run (id, number, "
            "`latest`, also with /STAGE), an artifact's digest (8 letters or more), or a folder.",
            autocompletion=complete_run,
        ),
    ],
    workspace: Place = DEFAULT_WORKSPACE,
    require_signature: Annotated[
        list[str] | None,
        typer.Option(
            "--require-signature",
            metavar="KEY",
            help="A public key's file, or its id, by which every artifact must be signed. Repeatable. One of these keys must have "
            "signed each decision of a person.",
        ),
    ] = None,
    decision_key: Annotated[
        list[str] | None,
        typer.Option(
            "--decision-key",
            metavar="KEY",
            help="A further public key that may have signed what people decided (answers, loosened gates, moved aliases). "
            "Repeatable. With this option or --require-signature, one of the keys must have signed each decision.",
        ),
    ] = None,
    as_json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Also write the result as one page, which needs no network."
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Check a model and all that it was made of: every file, record, gate and alias, against every other record of it.

    Nothing is written or changed. Exit code 0: all agrees. 1: something is wrong. 2: nothing is wrong, and something could
    not be checked (MLflow does not answer, a run was removed, a folder has no workspace). Other codes: there is no such target.
    """
    with explained(verbose):
        from vantage.review.audit.evidence import Evidence
        from vantage.review.audit.target import audit as audit_target
        from vantage.runs.console import open_console

        _check_place(html)

        def tell(num_objects: int) -> None:
            if num_objects and not as_json and sys.stderr.isatty():
                print(f"reading every byte of {num_objects} artifacts …", file=sys.stderr)

        with Evidence(
            workspace_at(workspace),
            required_keys=_keys(require_signature),
            decision_keys=_keys(decision_key),
            hashed=tell,
        ) as evidence:
            report = audit_target(evidence, target)
        if html is not None:
            from vantage.cli.audit_page import audit_page
            from vantage.storage.durable_files import replace_file

            replace_file(html.absolute(), audit_page(report).encode())
        if as_json:
            print_json(
                report.model_dump(mode="json") | {"outcome": report.outcome, "exit_code": report.exit_code}
            )
        else:
            from vantage.cli.audit_tree import show_audit

            show_audit(open_console(), report)
        if report.exit_code:
            raise typer.Exit(report.exit_code)


def _check_place(html: Path | None) -> None:
    """Refuse a place where no page can be written."""
    if html is not None and html.is_dir():
        raise IsADirectoryError(f"--html {html} is a folder; name a file in it")
    if html is not None and not html.absolute().parent.is_dir():
        raise FileNotFoundError(f"--html {html}: there is no folder {html.absolute().parent}; make it first")


def _keys(named: list[str] | None) -> "list[PublicKey]":
    """Return the public keys that an option names."""
    if not named:
        return []
    from vantage.signing.keys import required_key

    return [required_key(each, Path.cwd()) for each in named]
