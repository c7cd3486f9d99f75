"""``vantage worker``: take attempts from a work pool of Prefect and compute them on this machine."""

import os
import socket
from typing import Annotated

import typer

from vantage.cli.app import Verbose
from vantage.cli.output import explained

OF_WORKERS = {
    "PREFECT_WORKER_QUERY_SECONDS": "2",  # Prefect's default, 10 s, would delay each stage
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",  # one answer with this code would end the worker
}
"""Environment of a worker; the user's own values have priority."""


def worker(
    pool: Annotated[
        str, typer.Option("--pool", help="The work pool; created if Prefect has none of this name.")
    ],
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="0,1",
            help="GPUs that its attempts may use. Default: all that this machine has.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            max=10_000,
            help="Most attempts at once. Default: one for each GPU, or one without GPUs.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The worker's name in Prefect. Default: that of the machine.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Compute attempts of a work pool on this machine until SIGTERM, SIGHUP or Ctrl-C; running ones then save their state."""
    with explained(verbose):
        from vantage.attempts.machine import available_gpus
        from vantage.flows.execution import QUIET, SETTINGS
        from vantage.flows.pools.deployments import check_name
        from vantage.flows.prefect_server.proxies import check_proxies
        from vantage.flows.prefect_server.server import configured_url
        from vantage.runs.findings import machine_faults

        for variable, value in {**SETTINGS, **({} if verbose else QUIET), **OF_WORKERS}.items():
            os.environ.setdefault(variable, value)
        check_proxies(elsewhere=True)  # the worker also reaches the storage of its stages
        if configured_url() is None:
            raise ValueError(
                "a worker needs the server of its pool; set PREFECT_API_URL (`make servers` starts one)"
            )
        check_name("--pool", pool, "work pool")
        if name is not None:
            check_name("--name", name, "worker")
        if faults := list(machine_faults()):
            raise ValueError("; ".join(faults))
        chosen = (
            available_gpus() if gpus is None else tuple(gpu.strip() for gpu in gpus.split(",") if gpu.strip())
        )
        slots = limit or max(1, len(chosen))
        from vantage.flows.pools.worker import serve

        described = f"{len(chosen)} GPUs" if chosen else "no GPU"
        typer.echo(f"worker of pool {pool}: {slots} at once, {described}; Ctrl-C or SIGTERM ends it")
        serve(pool, name=name or socket.gethostname(), slots=slots, gpus=chosen, say=typer.echo)
