"""A worker of a Prefect work pool on this machine: Prefect's own, which lets attempts save their state before it ends."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.workers.process import ProcessWorker

from vantage.attempts.identity.child_python import python_environment
from vantage.attempts.stopping import DRAIN_FILE, remember_hangup, stop_signals
from vantage.flows.pools.alive import mark_alive
from vantage.flows.pools.deployments import create_pool, deploy_attempts, renew_entrypoints
from vantage.flows.pools.share import SLOTS
from vantage.flows.prefect_server.outages import prefect_outage, services_outlast

POLL_SECONDS = 1.0


class Worker(ProcessWorker):
    """Prefect's worker of processes; while it drains, it takes no more flow runs."""

    draining = False

    @classmethod
    def __dispatch_key__(cls) -> str:
        """Return a key that places it beside Prefect's own worker of the same type of pool, not in its place."""
        return "vantage"

    async def get_and_submit_flow_runs(self) -> list[Any]:
        """Take flow runs from the pool, unless the worker is about to end."""
        mark_alive()
        return [] if self.draining else await super().get_and_submit_flow_runs()

    @property
    def running(self) -> int:
        """Return the number of flow runs that the worker has started and that have not ended."""
        return int(self.limiter.borrowed_tokens)


def serve(pool: str, *, name: str, slots: int, gpus: tuple[str, ...], say: Callable[[str], None]) -> None:
    """Take attempts from the pool until SIGTERM, SIGINT or SIGHUP, then wait until running attempts have saved and
    ended.

    Args:
        pool: the work pool, created if missing.
        name: name of the worker in Prefect.
        slots: number of attempts that it runs at the same time.
        gpus: GPUs for its attempts, as CUDA_VISIBLE_DEVICES takes them; empty: none.
        say: prints a line.
    """
    with get_client(sync_client=True) as client:
        if create_pool(client, pool):
            say(f"created work pool {pool}")
        deploy_attempts(client, pool)
        for renewed in renew_entrypoints(client, pool):
            say(f"deployment {renewed} was registered by an earlier version; its entrypoint is renewed")
    with tempfile.TemporaryDirectory(prefix="vantage-worker-") as folder:
        drain = Path(folder) / "drain"
        os.environ.update(
            {
                "CUDA_VISIBLE_DEVICES": ",".join(gpus),
                **python_environment(),
                DRAIN_FILE: str(drain),
                SLOTS: str(slots),
            }
        )
        services_outlast(prefect_outage(say))
        asyncio.run(_serve(Worker(work_pool_name=pool, name=name, limit=slots), drain, say))


async def _serve(worker: Worker, drain: Path, say: Callable[[str], None]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hung_up(_: int, __: object) -> None:
        remember_hangup()
        loop.call_soon_threadsafe(stopping.set)

    for number in stop_signals():
        if number == signal.SIGHUP:
            signal.signal(number, hung_up)
        else:
            loop.add_signal_handler(number, stopping.set)
    serving = asyncio.create_task(worker.start(printer=lambda *_: None))
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        worker.draining = True
        drain.touch()
        if worker.running:
            say(f"{worker.running} running: they save their state and stop")
        while worker.running and not serving.done():
            await asyncio.sleep(POLL_SECONDS)
        serving.cancel()
    waiting.cancel()
    await asyncio.wait([serving, waiting])
    if not serving.cancelled() and (error := serving.exception()) is not None:
        raise error
