"""Print the findings of ``vantage doctor``."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from vantage.runs.findings import Finding


def show_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print the findings of ``vantage doctor``."""
    for finding in findings:
        mark, style = {"fine": ("✓", "green"), "warning": ("!", "yellow"), "broken": ("✗", "red")}[
            finding.verdict
        ]
        console.print(
            Text.assemble((f"{mark} ", style), (f"{finding.subject:<14}", "bold"), finding.message),
            soft_wrap=True,
        )
