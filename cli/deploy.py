"""``vantage deploy``, ``deployments`` and ``undeploy``: recipes that Prefect starts on a schedule or from its form."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Set, Source, Verbose
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

OnOverlapOption = Annotated[
    str | None,
    typer.Option(
        "--on-overlap",
        metavar="wait|skip|cancel",
        help="Treatment of a run beyond --concurrency: it waits for an earlier one, is skipped, or makes the earlier ones save and end "
        "(cancel; one run at a time). Default: skip; with --on: wait.",
    ),
]
Paused = Annotated[
    bool | None,
    typer.Option(
        "--paused/--active",
        help="Pause the schedule, or activate it. Default: unchanged if it is in Prefect already, else active.",
    ),
]
Write = Annotated[
    Path | None,
    typer.Option(
        "--write", metavar="prefect.yaml", help="Write a file for `prefect deploy` instead of registering."
    ),
]


def deploy(
    recipe: Source,
    overrides: Set = None,
    workspace: Place = DEFAULT_WORKSPACE,
    pool: Annotated[
        str,
        typer.Option(
            "--pool",
            help="Work pool that runs the pipeline's own process, which starts the stages; it needs no GPU.",
        ),
    ] = "default",
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the deployment. Default: the recipe's.")
    ] = None,
    cron: Annotated[
        str | None, typer.Option("--cron", metavar="'0 2 * * *'", help="Start a run at these times.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option("--interval", metavar="SECONDS", min=1.0, help="Start a run every so many seconds."),
    ] = None,
    rrule: Annotated[
        str | None, typer.Option("--rrule", help="Start runs by a recurrence rule (RFC 5545).")
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option("--timezone", metavar="Europe/Berlin", help="Time zone of the schedule. Default: UTC."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="models:/NAME@ALIAS", help="Start a run each time this alias moves."),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option("--concurrency", min=1, max=10_000, help="Most runs of it at once."),
    ] = 1,
    on_overlap: OnOverlapOption = None,
    paused: Paused = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be registered; register nothing.")
    ] = False,
    write: Write = None,
    verbose: Verbose = False,
) -> None:
    """Register a recipe as a deployment in Prefect; again: update it."""
    with explained(verbose):
        _quiet(verbose)
        from vantage.flows.pools.pipelines import OnOverlap, as_prefect_yaml, pipeline_of, register
        from vantage.runs.names import recipe_source

        on_overlap = on_overlap or ("skip" if on is None else "wait")
        if on_overlap not in get_args(OnOverlap):
            raise ValueError(
                f"--on-overlap={on_overlap} is no rule for overlapping runs; use one of: {', '.join(get_args(OnOverlap))}"
            )
        if on_overlap == "cancel" and concurrency != 1:
            raise ValueError(
                f"--concurrency={concurrency} and --on-overlap=cancel exclude each other; leave one out"
            )
        pipeline = pipeline_of(
            recipe_source(recipe, "deploy"),
            overrides or [],
            workspace=workspace_at(workspace).address,
            pool=pool,
            name=name,
            cron=cron,
            interval=interval,
            rrule=rrule,
            timezone=timezone,
            concurrency=concurrency,
            on_overlap=on_overlap,  # type: ignore[arg-type]
            paused=paused,
            on=on,
        )
        for warning in pipeline.warnings:
            typer.echo(f"vantage: warning: {warning}", err=True)
        if write is not None:
            write.write_text(as_prefect_yaml(pipeline), encoding="utf-8")
            typer.echo(f"wrote {write}; `prefect deploy --name {pipeline.name}` registers it")
        elif dry_run:
            typer.echo(as_prefect_yaml(pipeline), nl=False)
        else:
            with _client() as client:
                register(client, pipeline)
            typer.echo(f"deployed {pipeline.name}, version {pipeline.version}, on pool {pool}")
            moves = f", when {pipeline.on_alias} moves" if pipeline.on_alias else ""
            typer.echo(f"  started by {_schedule(pipeline.schedule)}{moves}, by Prefect's form, or by")
            typer.echo(f"  prefect deployment run 'vantage/{pipeline.name}'")


def deployments(as_json: AsJson = False, verbose: Verbose = False) -> None:
    """List the deployed recipes."""
    with explained(verbose):
        _quiet(verbose)
        from vantage.flows.pools.pipelines import registered
        from vantage.runs.console import open_console, show_table

        with _client() as client:
            found = [_described(each) for each in registered(client)]
        if as_json:
            print_json(found)
        elif not found:
            typer.echo("no recipe is deployed; `vantage deploy RECIPE` deploys one")
        else:
            show_table(open_console(), found)


def undeploy(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A deployment, as `vantage deployments` lists it.")
    ],
    verbose: Verbose = False,
) -> None:
    """Remove a deployment from Prefect, with its schedule and automations, once all its runs have ended; the runs and artifacts stay."""
    with explained(verbose):
        _quiet(verbose)
        from vantage.flows.pools.pipelines import remove

        with _client() as client:
            under_way = remove(client, name)
        if under_way:
            typer.echo(
                f"vantage: {name} is not removed, since these runs of it have not ended, and Prefect could not end them without it: "
                f"{', '.join(under_way)}. No schedule or alias starts it any more. Run this command again when they have ended; "
                "`vantage cancel RUN` stops one that is running, and Prefect's page cancels one that waits",
                err=True,
            )
            raise typer.Exit(ExitCode.RESUME)
        typer.echo(f"removed {name}")


def _quiet(verbose: bool) -> None:
    from vantage.flows.execution import QUIET, SETTINGS
    from vantage.flows.prefect_server.proxies import check_proxies

    for variable, value in (SETTINGS if verbose else {**SETTINGS, **QUIET}).items():
        os.environ.setdefault(variable, value)
    check_proxies(elsewhere=False)


@contextmanager
def _client() -> Iterator["SyncPrefectClient"]:
    """Yield a client of the configured Prefect server, after a check that it answers.

    Raises:
        ValueError: no server is configured.
        ConnectionError: the server does not answer.
    """
    from vantage.flows.prefect_server.server import configured_url

    url = configured_url()
    if url is None:
        raise ValueError(
            "deployments are kept by a Prefect server; set PREFECT_API_URL (`make servers` starts one)"
        )
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        if (refusal := client.api_healthcheck()) is not None:
            raise ConnectionError(f"PREFECT_API_URL={url} does not answer ({refusal}); start that server")
        yield client


def _described(deployment: "DeploymentResponse") -> dict[str, Any]:
    from vantage.flows.pools.alias_triggers import alias_of

    schedules = [
        _schedule(each.schedule) + ("" if each.active and not deployment.paused else " (paused)")
        for each in deployment.schedules
    ]
    if alias := alias_of(deployment.tags):
        schedules.append(f"models:/{alias}")
    return {
        "name": deployment.name,
        "version": deployment.version,
        "pool": deployment.work_pool_name,
        "started by": ", ".join(schedules) or "hand",
        "at once": _at_once(deployment),
        "workspace": deployment.parameters.get("workspace"),
    }


def _at_once(deployment: "DeploymentResponse") -> str:
    """Return ``1, skips others``: the number of concurrent runs, and what happens to further ones."""
    from vantage.flows.prefect_server.overlaps import CANCELS_EARLIER

    limit = deployment.global_concurrency_limit
    if CANCELS_EARLIER in (deployment.tags or []):
        return "1, cancels earlier ones"
    if limit is None or deployment.concurrency_options is None:
        return "any number"
    waits = deployment.concurrency_options.collision_strategy.value == "ENQUEUE"
    return f"{limit.limit}, {'others wait' if waits else 'skips others'}"


def _schedule(schedule: Any) -> str:
    """Return a schedule in a few words."""
    if schedule is None:
        return "hand"
    zone = f" ({schedule.timezone})" if getattr(schedule, "timezone", None) else ""
    for field in ("cron", "rrule"):
        if hasattr(schedule, field):
            return f"{field} {getattr(schedule, field)}{zone}"
    return f"interval {schedule.interval.total_seconds():g} s{zone}"
