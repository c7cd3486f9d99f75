"""``vantage ui``: show a workspace in the pages of MLflow and Prefect."""

import os
import signal
import threading
from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, Place, Verbose
from vantage.cli.output import explained, workspace_at


def ui(
    workspace: Place = DEFAULT_WORKSPACE,
    show: Annotated[bool, typer.Option("--open", help="Open the pages in this machine's browser.")] = False,
    verbose: Verbose = False,
) -> None:
    """Start MLflow and Prefect on a workspace's records, on ports that are free, until Ctrl-C."""
    with explained(verbose):
        from vantage.flows.execution import QUIET, SETTINGS
        from vantage.flows.user_interfaces import user_interfaces

        for variable, value in (SETTINGS if verbose else {**SETTINGS, **QUIET}).items():
            os.environ.setdefault(variable, value)
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        with user_interfaces(workspace_at(workspace)) as pages:
            for program, address in pages.items():
                print(f"{program:<8}{address}", flush=True)
            print("Ctrl-C ends the servers that were started for this", flush=True)
            for address in pages.values() if show else ():
                typer.launch(address)
            ended.wait()
