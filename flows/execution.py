"""Execute an open run: plan, then run the stages by Prefect, or only verify if all artifacts exist."""

import asyncio
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.local_process import warm_up
from vantage.attempts.machine import check_resources
from vantage.flows.notifying import notified
from vantage.flows.open_runs import opened
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.prefect_server import server as servers
from vantage.flows.prefect_server.proxies import check_proxies
from vantage.flows.publishing.announcing import moves_announced
from vantage.flows.publishing.publishing import publish
from vantage.flows.shown_plan import planned
from vantage.flows.unsent_ledger import unsent_said
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.tracking import check_configured, without_password
from vantage.runs.console import Screen
from vantage.runs.next_steps import after_closed_gates, after_parts, after_questions
from vantage.runs.own_commands import own_command
from vantage.runs.planning import needs_work, steps_in_store
from vantage.runs.record import RunRecord
from vantage.runs.resolving import ChosenRates
from vantage.runs.run import Run, is_active, read_runs
from vantage.runs.shown_result import show_result
from vantage.runs.shown_warnings import warnings_shown
from vantage.runs.summary import commands_for_policy, model_folders, samples_heading
from vantage.schemas.records.attempt import RUN_STAGE
from vantage.signing.before_runs import check_signing

QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PYTHONWARNINGS": "ignore",
}
"""Environment of Prefect, MLflow and children without ``--verbose``; the user's own values have priority."""

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_CLIENT_MAX_RETRIES": "3",  # the client gives up a lost server after seconds, not minutes
}
"""Environment of Prefect, MLflow and children in any case; the user's own values have priority."""


def execute(
    run: Run,
    screen: Screen,
    *,
    strict: bool = False,
    stage_function: str = RUN_STAGE,
    verbose: bool = False,
    chosen: ChosenRates | None = None,
) -> RunRecord:
    """Run all stages, and return the record with the outcome.

    ``chosen``: learning rates that the recipe left open, shown with the plan.

    Raises:
        vantage.runs.planning.DriftError: ``strict``, and an artifact to reuse was made with other code or libraries.
        vantage.flows.prefect_server.server.ServerUnavailable: the Prefect server does not answer.
        ValueError: MLflow can keep nothing at ``MLFLOW_TRACKING_URI``.
    """
    workspace, recipe = run.workspace, run.record.recipe
    check_signing(recipe, workspace)
    check_configured()
    check_proxies(elsewhere=workspace.uri is not None)
    steps = planned(run, screen, strict=strict, chosen=chosen)
    shown_before = len(run.record.prefect_flow_run_ids)
    lost = None
    with (
        # before the ledger imports MLflow in a thread beside this one: the first stage waits for the server
        started(workspace.root, verbose=verbose) if needs_work(steps) else nullcontext() as server,
        notified(run, screen) as watcher,
        moves_announced(workspace, watcher),
        Ledger(None, workspace.root, recipe.recipe) as ledger,
        warnings_shown(lambda text: watcher.say(f"  warning: {text}", "yellow")),
        unsent_said(run, ledger, watcher),
    ):
        orchestrator = Orchestrator(
            run,
            store=workspace.storage,
            ledger=ledger,
            watcher=watcher,
            in_store=steps_in_store(steps),
            stage_function=stage_function,
            makes_report=True,
        )
        orchestrator.begin()
        try:
            with opened(orchestrator), screen.live():
                if server is not None:
                    lost = _order(orchestrator, server, strict=strict)
                else:
                    _verify(orchestrator)
                    _close_open_flow_runs(orchestrator)
        finally:
            orchestrator.end()
        if server is None:
            _show_in_prefect(run)
        for step, stage in run.record.stages.items():
            screen.samples(stage.samples, heading=samples_heading(run.record, step))
        report = orchestrator.send_report()
        in_prefect = len(run.record.prefect_flow_run_ids) > shown_before
        show_result(
            screen.console,
            run.record,
            pages={
                **({} if report is None else {"report": str(report)}),
                **_pages(run, ledger, in_prefect=in_prefect),
            },
            models=model_folders(run.record, workspace.storage),
            commands=commands_for_policy(run.record, workspace.address),
            next_steps=[
                *after_parts(run.record, run.workspace.address),
                *after_closed_gates(run.record, workspace.address),
                *after_questions(run.record, workspace.address),
            ],
        )
    if lost is not None:
        raise lost
    return run.record


def exit_code(record: RunRecord) -> int:
    """Return the exit code of the command: that of the first failed stage, or of the run's status."""
    if record.status == "failed":
        codes = [stage.exit_code for stage in record.stages.values() if stage.status == "failed"]
        return next((code for code in codes if code is not None), ExitCode.INTERNAL)
    if record.status == "completed" and record.unpublished:
        return ExitCode.STORAGE
    if record.status == "completed" and record.refused_aliases:
        return ExitCode.GATE_CLOSED
    if record.status == "completed" and record.unsigned:
        return ExitCode.BAD_INPUT
    return {
        "completed": ExitCode.OK,
        "gate_closed": ExitCode.GATE_CLOSED,
        "waiting_approval": ExitCode.WAITING_APPROVAL,
        "resumable": ExitCode.RESUME,
        "running": ExitCode.RESUME,
    }[record.status]


def _show_in_prefect(run: Run) -> None:
    """Show a run that needed no Prefect among its flow runs, now or when a server of the workspace is used next."""
    run.update(lacks_flow_run=True)
    url = os.environ.get("PREFECT_API_URL")
    if url and servers.is_healthy(url):
        for name, value in {**SETTINGS, **QUIET}.items():
            os.environ.setdefault(name, value)
        from vantage.flows.reused_runs import show_run

        asyncio.run(show_run(run))


def _verify(orchestrator: Orchestrator) -> None:
    """Verify all artifacts, which exist, check and record the gates, without starting Prefect or a child process."""
    for step in orchestrator.inputs:
        if obstacle := orchestrator.obstacle(step):
            orchestrator.block(step, obstacle)
        else:
            request = orchestrator.request(step)
            if request is not None:
                orchestrator.attempt(request)
    orchestrator.draw_report()
    for publication in orchestrator.recipe.publish:
        publish(publication, orchestrator)


def _order(
    orchestrator: Orchestrator, server: servers.PrefectServer, *, strict: bool
) -> servers.ServerUnavailable | None:
    """Run the stages by Prefect; returns an error if the run has ended but Prefect could not record it."""
    check_resources(orchestrator.recipe)
    earlier = orchestrator.run.record.prefect_flow_run_ids
    try:
        with ordering(server):
            from vantage.flows.pipeline import order
            from vantage.flows.pools.deployments import require_pools
            from vantage.flows.reused_runs import show_earlier_runs

            require_pools(orchestrator.recipe)
            orchestrator.run.update(
                lacks_flow_run=False
            )  # an earlier process of the run may have reused all artifacts
            asyncio.run(show_earlier_runs(orchestrator.run.workspace))
            record = orchestrator.run.record
            asyncio.run(order(orchestrator, recipe=record.source, overrides=record.overrides, strict=strict))
    except Exception as error:  # once the run has ended, an error concerns only Prefect's page
        if not _has_ended(orchestrator.run, earlier):
            raise
        if _close_open_flow_runs(orchestrator):
            orchestrator.watcher.say(
                "  the Prefect server stopped answering, and now knows how the run ended", "yellow"
            )
            return None
        return servers.ServerUnavailable(
            f"{_first_part(error)}; the run has ended all the same ({orchestrator.run.outcome()}), and what it made is "
            "kept: run the same command again when the server answers, and Prefect hears of it"
        )
    return None


def _first_part(error: Exception) -> str:
    """Return the first sentence of an error; for an answer of Prefect's server only its status, since its text is
    long."""
    answer = getattr(error, "response", None)
    if answer is None:
        return str(error).partition(";")[0]
    return f"the Prefect server at {without_password(str(servers.configured_url()))} answered {answer.status_code} {answer.reason_phrase}"


def _has_ended(run: Run, earlier: Collection[str]) -> bool:
    """Return whether a new flow run has ended without Prefect having recorded it."""
    open_runs = run.record.open_flow_runs
    return any(each.status is not None and each.flow_run_id not in earlier for each in open_runs)


def _close_open_flow_runs(orchestrator: Orchestrator) -> bool:
    """Record in Prefect how earlier flow runs of the workspace ended; Prefect would otherwise show them as running for ever.

    Returns whether no flow run of this run is left open. If the server does not answer in time, nothing is recorded.
    """
    workspace = orchestrator.run.workspace
    others = (record for record in read_runs(workspace) if not is_active(workspace, record.run_id))
    left = [each for record in (orchestrator.run.record, *others) for each in record.open_flow_runs]
    if not left:
        return True
    server = servers.server_name(workspace.root)
    if any(each.server == server for each in left):
        for name, value in {**SETTINGS, **QUIET}.items():
            os.environ.setdefault(name, value)
        try:
            with servers.prefect_server(workspace.root):
                from vantage.flows.prefect_server.flow_runs import close_open_flow_runs

                asyncio.run(close_open_flow_runs(orchestrator.run, server=server))
        except servers.ServerUnavailable:
            return False
    return not any(each.attempt is None for each in orchestrator.run.record.open_flow_runs)


@contextmanager
def started(workspace: Path, *, verbose: bool) -> Iterator[servers.PrefectServer]:
    """Start the Prefect server and the fork server in the background; the Prefect server ends with the block."""
    for name, value in (SETTINGS if verbose else {**SETTINGS, **QUIET}).items():
        os.environ.setdefault(name, value)
    warm_up()
    server = servers.start(workspace)
    try:
        yield server
    finally:
        server.stop()  # the block may fail before `ordering`, which stops the server


@contextmanager
def ordering(server: servers.PrefectServer) -> Iterator[str]:
    """Import Prefect while the server starts, and yield the server's URL; the server has stopped when the block has
    ended.

    Raises:
        vantage.flows.prefect_server.server.ServerUnavailable: no server answers, or the server has stopped.
    """
    try:
        import_module("vantage.flows.pipeline")  # importing it takes a second
        url = server.wait_ready()
        try:
            yield url
        except Exception as error:
            if servers.is_healthy(url):
                raise
            raise servers.ServerUnavailable(
                f"the Prefect server at {url} has stopped answering; finished stages are kept, and running ones have "
                "saved their state: run the same command again"
            ) from error
    finally:
        server.stop()


def _pages(run: Run, ledger: Ledger, *, in_prefect: bool) -> Mapping[str, str]:
    """Return server → the address of the run's page, or the command that shows it; Prefect only if it has a page of
    this run."""
    pages: dict[str, str] = {}
    is_shown_here = False
    # without this id, the last lines contain the reason why MLflow has no page of the run
    if run.record.mlflow_run_id:
        where = ledger.where()
        if "://" in where.partition(" ")[0]:
            pages["MLflow"] = where
            if (all_runs := ledger.where_all()) is not None:
                pages["compare"] = all_runs
        else:
            is_shown_here = True
    if in_prefect and servers.configured_url():
        from vantage.flows.prefect_server.flow_runs import page_of

        pages["Prefect"] = page_of(run.record.prefect_flow_run_ids[-1])
    elif in_prefect:
        is_shown_here = True
    if is_shown_here:
        pages["pages"] = own_command("ui", "--workspace", run.workspace.address)
    return {**pages, "logs": str(run.folder / "logs"), **_signed(run)}


def _signed(run: Run) -> Mapping[str, str]:
    """Return the number of signed artifacts, and where the signatures are; empty if the recipe signs none."""
    sign, record = run.record.recipe.sign, run.record
    if sign is None:
        return {}
    made = sum(stage.digest is not None for stage in record.stages.values())
    key = sign.key or f"the key in ${sign.key_variable}"
    where = f"{run.workspace.storage.address}/signatures"
    return {"signed": f"{made - len(record.unsigned)} of {made} artifacts, with {key}: {where}"}
