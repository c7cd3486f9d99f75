"""``vantage doctor``: check whether this machine can run recipes."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place
from vantage.cli.output import explained, print_json, server_fault, workspace_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vantage.runs.findings import Finding


def doctor(workspace: Place = DEFAULT_WORKSPACE, as_json: AsJson = False) -> None:
    """Check that this machine can run recipes: versions, disk, servers, processes, accelerators."""
    with explained(verbose=False):
        from vantage.runs.console import open_console
        from vantage.runs.findings import Finding, run_checks
        from vantage.runs.shown_findings import show_findings

        findings = list(run_checks(workspace_at(workspace)))
        if os.environ.get("PREFECT_API_URL"):
            from vantage.flows.pools.deployments import deployment_findings
            from vantage.flows.prefect_server.proxies import check_proxies

            try:
                check_proxies(elsewhere=False)
            except ValueError as error:
                findings.append(Finding("proxy", "broken", str(error)))
            else:
                findings += _asked(deployment_findings)
        if as_json:
            print_json([asdict(finding) for finding in findings])
        else:
            show_findings(open_console(), findings)
        if any(finding.verdict == "broken" for finding in findings):
            raise typer.Exit(ExitCode.UNAVAILABLE)


def _asked(findings: "Callable[[], Iterable[Finding]]") -> "list[Finding]":
    """Return the findings about a server, or one that the server fails or refuses the login."""
    from vantage.runs.findings import Finding

    try:
        return list(findings())
    except Exception as error:
        if (said := server_fault(error)) is None:
            raise
        return [Finding("deployments", "broken", said)]
