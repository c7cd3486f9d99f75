"""A Ray cluster on this machine whose nodes can be lost; run as a program: one command a line, one answer a line."""

import json
import sys

from ray.cluster_utils import Cluster

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
"""Ray's workers step back for all other processes by default (15): beside other tests they took minutes to begin.

Nor are there workers in advance, each of them 3 seconds of computation: a launch needs others.

By default Ray takes a node for lost only after half a minute. A node that was killed refuses at once, so this takes
1.5 s here; one that a busy machine keeps waiting has a minute to answer. A node ends itself if its agent has not begun after 30 s by
default, and gives up a worker after 60.
"""


def main() -> None:
    """Commands: ``add`` a node of one CPU (``add 2``: of two), ``lose`` the newest, as if its power was cut, ``count`` them, ``end``."""
    # No test reads what ranks print: a process that follows their files took 15 s of computation on each node.
    # The head has no CPU for ranks: it cannot be lost. Its dashboard answers what Ray Train asks of its own actors. Without a port
    # it takes the next free one, since other tests may have clusters at the same time.
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": True,
            "dashboard_port": None,
            "include_log_monitor": False,
            "_system_config": SETTINGS,
        },
    )
    nodes = []
    print(json.dumps(cluster.address), flush=True)
    for line in sys.stdin:
        command, _, cpus = line.strip().partition(" ")
        if command == "add":
            nodes.append(cluster.add_node(num_cpus=int(cpus or 1), include_log_monitor=False))
        elif command == "lose":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        elif command != "count":
            break
        print(json.dumps(len(nodes)), flush=True)
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
