"""Run a Ray cluster on this machine whose nodes can be lost, as a program that answers each line with a line."""

import json
import sys
from typing import Any

from ray._private import services
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD
from ray.cluster_utils import Cluster

from tests.support import ray_setup_worker

SETTINGS = {
    "worker_niceness": 0,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 60_000,
    "health_check_failure_threshold": 3,
    "agent_register_timeout_ms": 300_000,
    "worker_register_timeout_seconds": 300,
}
"""By default Ray's workers have niceness 15, and beside other tests they took minutes to begin.

No workers are started in advance, since a launch needs others and each takes 3 seconds of computation.

By default Ray takes a node for lost only after half a minute. Here it takes 1.5 s, because a node that was killed
refuses connections at once, and a node on a busy machine has a minute to answer. By default a node ends itself if its
agent has not begun after 30 s, and gives up a worker after 60.
"""


WORKERS: dict[str, Any] = {
    "worker_path": ray_setup_worker.__file__,
    "setup_worker_path": ray_setup_worker.__file__,
    "include_log_monitor": False,
}
"""Settings of each node: its workers are forks. No test reads what ranks print, and a process that follows their files took 15 s of
computation on each node."""

ASKED_MODULES = "StateHead"
"""Modules of the dashboard that Ray Train asks; each of the nine others would be a process of its own."""


def _load_asked_modules() -> None:
    """Have the dashboard load no other modules; a later argument has precedence."""
    start = services.start_ray_process

    def started(command: list[str], process_type: str, **options: Any) -> Any:
        if process_type == PROCESS_TYPE_DASHBOARD:
            command = [*command, f"--modules-to-load={ASKED_MODULES}", "--disable-frontend"]
        return start(command, process_type, **options)

    vars(services)["start_ray_process"] = started


def main() -> None:
    """Obey commands: ``add`` adds a node of one CPU (``add 2``: of two), ``lose`` ends the newest as a power cut does,
    ``count`` counts the nodes, and ``end`` ends the cluster.
    """
    # The head has no CPU for ranks, since it cannot be lost. Its dashboard answers what Ray Train asks of its actors.
    # Without a port it takes the next free one, since other tests may have clusters at the same time.
    _load_asked_modules()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": True,
            "dashboard_port": None,
            "no_monitor": True,
            "_system_config": SETTINGS,
            **WORKERS,
        },
    )
    nodes = []
    print(json.dumps(cluster.address), flush=True)
    for line in sys.stdin:
        command, _, cpus = line.strip().partition(" ")
        if command == "add":
            nodes.append(cluster.add_node(num_cpus=int(cpus or 1), **WORKERS))
        elif command == "lose":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        elif command != "count":
            break
        print(json.dumps(len(nodes)), flush=True)
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
