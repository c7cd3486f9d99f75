"""Wait until a Ray cluster has the nodes that a stage needs.

Ray Train would wait for them itself, without limit and without a message: ``max_failures`` bounds how often it restarts
failed ranks, not how often it tries to start them. This module loads Ray, so only stage processes import it.
"""

import time
from collections.abc import Callable

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from vantage.attempts.launchers.waiting import NodesAsked, Waiting
from vantage.tasks.training import preemption

SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_TO_RESERVE = 5.0


def wait_for_nodes(asked: NodesAsked, waiting: Waiting, *, is_stopped: Callable[[], bool]) -> int:
    """Wait until Ray can reserve enough nodes; returns their number, ``asked.most`` unless only fewer come within a
    minute.

    Raises:
        Preempted: a stop was requested meanwhile.
    """
    while True:
        if is_stopped():
            raise preemption.Preempted(f"stopped on request while it waited for {asked}")
        alive = count_fitting_nodes(asked)
        fewest = asked.least if waiting.is_late else asked.most
        for nodes in range(min(alive, asked.most), fewest - 1, -1):
            if _can_reserve(nodes, asked):
                if nodes < asked.most:
                    print(f"goes on with {nodes} of {asked.most} nodes: no more came", flush=True)
                return nodes
        waiting.report(alive)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def count_fitting_nodes(asked: NodesAsked) -> int:
    """Return the number of living nodes with the resources that are asked of one node, in use or not."""
    return sum(
        bool(node["Alive"])
        and all(node["Resources"].get(name, 0.0) >= count for name, count in asked.bundle.items())
        for node in ray.nodes()  # type: ignore[no-untyped-call]
    )


def _can_reserve(nodes: int, asked: NodesAsked) -> bool:
    """Return whether Ray can give this many nodes now; the nodes themselves are asked, so that a lost one is noticed."""
    group = placement_group([asked.bundle] * nodes, strategy="STRICT_SPREAD")
    try:
        return bool(group.wait(_SECONDS_TO_RESERVE))
    finally:
        remove_placement_group(group)
