"""Many queued pipelines over a few slots, through a real Prefect server on PostgreSQL; stages sleep.

    python -m benchmarks.schedule_many [--pipelines 1000] [--slots 64] [--output docs/scheduling]

Starts the servers of ``make servers`` in a folder of their own, queues all flow runs of one deployment, then starts the
worker processes (``schedule_many_worker.py`` says what is real in them and what is made up). Writes ``pipelines.csv``,
``load.csv``, ``summary.md`` and ``plot.png``.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import psycopg

from benchmarks.schedule_many_report import (
    Sample,
    count,
    counts,
    read_pipelines,
    speed,
    write,
)
from deploy.servers.processes import processes_of
from deploy.servers.settings import Settings

ROOT = Path(__file__).parents[1]
DATABASE = "vantage_simulation"
SAMPLE_SECONDS = 5.0
QUIET_SECONDS = 30.0
LOST = 0.02
"""Share of first attempts that are lost and retried."""

RECIPE = """\
recipe: simulated
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  preferences: {source: "builtin:arithmetic/preferences"}
  prompts: {source: "builtin:arithmetic/prompts"}
rewards:
  main: {terms: [{model: reward}]}
stages:
  sft: {kind: sft, data: demonstrations}
  reward: {kind: reward_model, init: sft, data: preferences}
  value: {kind: value_pretraining, policy: sft, init: reward, reward: main, prompts: prompts}
  policy: {kind: policy_optimization, algorithm: vapo, init: sft, critic: value, reward: main, prompts: prompts}
  evaluation: {kind: evaluation, candidate: policy, baseline: sft, judge: {verifier: arithmetic}, prompts: prompts}
"""


def main() -> None:
    """Run the simulation, then count and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipelines", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=64, help="concurrency limit of the work pool")
    parser.add_argument("--processes", type=int, default=4, help="worker processes that share the slots")
    parser.add_argument("--stage-seconds", type=float, default=5.0, help="mean sleep of a stage")
    parser.add_argument("--limit-minutes", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "scheduling")
    parser.add_argument("--servers", type=Path, default=Path(tempfile.gettempdir()) / "vantage-simulation")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.servers.exists():
        raise SystemExit(f"{options.servers} is there already; name another folder by --servers")
    servers = [sys.executable, "-m", "deploy.servers"]
    data = ["--data", str(options.servers)]
    exports = subprocess.run(
        [*servers, "up", *data], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    for line in exports.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        os.environ[name] = value
    os.environ |= {
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",  # a single error 500 would end Prefect's worker
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    }
    try:
        simulate(options, Settings.model_validate_json((options.servers / "settings.json").read_text()))
        data.append("--delete")
    finally:  # after a failure, logs and database stay
        subprocess.run([*servers, "down", *data], cwd=ROOT, check=True)


def simulate(options: argparse.Namespace, settings: Settings) -> None:
    """Run the whole simulation, with the servers running."""
    workspaces = Path(tempfile.mkdtemp(prefix="vantage-simulation-"))
    prefect = f"{settings.server_url}/vantage_prefect"
    table = make_table(settings.server_url)
    size_before = database_mib(prefect)
    began = time.monotonic()
    asyncio.run(queue_all(options.pipelines, options.slots, workspaces))
    queued_seconds = time.monotonic() - began
    print(f"{options.pipelines} flow runs queued in {queued_seconds:.1f} s", flush=True)
    opened_at = time.time()
    workers = start_workers(options, table, workspaces)
    try:
        samples = watch(options, prefect, workers, opened_at)
    finally:
        requests = stop_workers(workers, workspaces)
    recorded_seconds = wait_for_task_runs(prefect)
    pipelines = read_pipelines(prefect, opened_at)
    facts = {
        **settings_of(options),
        "seconds to queue all": round(queued_seconds, 1),
        **count(table, prefect, options.pipelines),
        "seconds until Prefect had recorded the last task run": round(recorded_seconds, 1),
        **speed(pipelines, table, samples, options, requests),
        "database before, MiB": round(size_before, 1),
        "database after, MiB": round(database_mib(prefect), 1),
    }
    write(options.output, facts, pipelines, samples, slots=options.slots)
    shutil.rmtree(workspaces)
    print(json.dumps(facts, indent=1))


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked for."""
    return {
        "pipelines": options.pipelines,
        "slots": options.slots,
        "worker processes": options.processes,
        "mean seconds of a stage": options.stage_seconds,
        "cores of the machine": len(os.sched_getaffinity(0)),
    }


def make_table(server_url: str) -> str:
    """Return an empty table of events in a database of its own; returns the database's address."""
    with psycopg.connect(f"{server_url}/postgres", autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {DATABASE}")
    with psycopg.connect(f"{server_url}/{DATABASE}") as connection:
        connection.execute(
            "CREATE TABLE events (pipeline int, stage text, attempt int, event text, process int,"
            " at timestamptz DEFAULT clock_timestamp())"
        )
    return f"{server_url}/{DATABASE}"


async def queue_all(number: int, slots: int, workspaces: Path) -> None:
    """Make a work pool, a deployment of the real flow, and its flow runs, all of them due at once."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.utilities.callables import parameter_schema

    from benchmarks.schedule_many_worker import POOL, POOL_TYPE, CoroutineWorker
    from vantage.flows.pipeline import pipeline

    async with get_client() as client:
        template = CoroutineWorker.get_default_base_job_template()
        await client.create_work_pool(
            WorkPoolCreate(name=POOL, type=POOL_TYPE, concurrency_limit=slots, base_job_template=template)
        )
        deployment = await client.create_deployment(
            await client.create_flow(pipeline),
            "simulated",
            work_pool_name=POOL,
            tags=["simulation"],
            parameter_openapi_schema=parameter_schema(pipeline).model_dump(),
            enforce_parameter_schema=True,
        )
        at_once = asyncio.Semaphore(16)

        async def queue(index: int) -> None:
            async with at_once:
                parameters = {
                    "recipe": RECIPE,
                    "overrides": [f"seed={index}"],
                    "workspace": str(workspaces / f"{index}"),
                }
                await client.create_flow_run_from_deployment(deployment, parameters=parameters)

        await asyncio.gather(*map(queue, range(1, number + 1)))


def start_workers(options: argparse.Namespace, table: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Return the worker processes; together they have as many slots as the pool."""
    shares = [
        options.slots // options.processes + (index < options.slots % options.processes)
        for index in range(options.processes)
    ]
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.schedule_many_worker"),
                *(str(share), str(options.stage_seconds), str(LOST), str(folder / f"requests-{index}")),
            ],
            cwd=ROOT,
            env={**os.environ, "SIMULATION_DATABASE": table, "OMP_NUM_THREADS": "1"},
        )
        for index, share in enumerate(shares)
    ]


def stop_workers(workers: Sequence[subprocess.Popen[bytes]], folder: Path) -> int:
    """End them; returns how many HTTP requests they made."""
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        worker.wait(timeout=60)
    return sum(int(path.read_text()) for path in folder.glob("requests-*"))


def wait_for_task_runs(prefect: str) -> float:
    """Wait until the task runs that Prefect's server records from a queue change no more; return the seconds."""
    began = changed = time.monotonic()
    last: dict[str, int] = {}
    with psycopg.connect(prefect, autocommit=True) as connection:
        while time.monotonic() - changed < QUIET_SECONDS:
            now = counts(connection, "state_name", "task_run")
            if now != last:
                last, changed = now, time.monotonic()
            time.sleep(1.0)
    return changed - began


class Meter:
    """CPU seconds of processes that come and go."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def since_last(self, processes: Sequence[psutil.Process]) -> float:
        """Return the CPU seconds that these processes used since they were last measured."""
        used = 0.0
        for process in processes:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            used += times.user + times.system - self._seconds.get(process.pid, 0.0)
            self._seconds[process.pid] = times.user + times.system
        return used


def watch(
    options: argparse.Namespace, prefect: str, workers: Sequence[subprocess.Popen[bytes]], opened_at: float
) -> list[Sample]:
    """Sample the load until all flow runs have ended."""
    samples: list[Sample] = []
    meter, last, commits = Meter(), opened_at, 0
    with psycopg.connect(prefect, autocommit=True) as connection:
        [backend] = connection.execute("SELECT pg_backend_pid()").fetchall()
        main_process = psutil.Process(backend[0]).parent()
        assert main_process is not None
        while not samples or samples[-1].ended < options.pipelines:
            if time.time() - opened_at > options.limit_minutes * 60:
                print("not all ended in time", flush=True)
                break
            if any(worker.poll() is not None for worker in workers):
                raise SystemExit("a worker has died")
            time.sleep(SAMPLE_SECONDS)
            states = counts(connection, "state_type", "flow_run")
            [(now_commits, size)] = connection.execute(
                "SELECT xact_commit, pg_database_size(datname) FROM pg_stat_database WHERE datname = current_database()"
            ).fetchall()
            server = processes_of(options.servers, "prefect")
            now = time.time()
            used = [
                meter.since_last(group) / (now - last)
                for group in (
                    server,
                    [main_process, *main_process.children()],
                    [psutil.Process(worker.pid) for worker in workers],
                )
            ]
            running = states.get("RUNNING", 0) + states.get("PENDING", 0)
            waiting = states.get("SCHEDULED", 0)
            samples.append(
                Sample(
                    seconds=round(now - opened_at, 1),
                    waiting=waiting,
                    running=running,
                    ended=sum(states.values()) - waiting - running,
                    prefect_cpu=round(used[0], 2),
                    postgres_cpu=round(used[1], 2),
                    workers_cpu=round(used[2], 2),
                    prefect_mib=round(sum(each.memory_info().rss for each in server) / 2**20),
                    commits_per_second=round((now_commits - commits) / (now - last), 1),
                    database_mib=round(size / 2**20, 1),
                    load_average=round(os.getloadavg()[0], 1),
                )
            )
            last, commits = now, now_commits
            if len(samples) % 12 == 0:
                print(samples[-1], flush=True)
    return samples[1:]  # the first sample also counts what happened before


def database_mib(url: str) -> float:
    """Return the size of a database on disk."""
    with psycopg.connect(url) as connection:
        [(size,)] = connection.execute("SELECT pg_database_size(current_database())").fetchall()
    return float(size) / 2**20


if __name__ == "__main__":
    main()
