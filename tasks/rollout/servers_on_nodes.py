"""Servers of vLLM on the nodes of a Ray cluster: Ray places each, with its share of GPUs and CPUs, and ends it with the
stage.

One actor holds one server, which is a process on the actor's node. Actors and their placement group belong to the
process that asks for them (the first rank), so that Ray ends them with it. ``own_servers`` restarts servers, not Ray,
in the place that Ray then finds. This module loads Ray, so only ranks that Ray has started import it.
"""

import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vantage.tasks.rollout.server_on_node import ServerOnNode
from vantage.tasks.rollout.server_process import Program
from vantage.tasks.rollout.vllm_server import EngineUnavailable

PLACE_SECONDS = 120.0
"""Most seconds until Ray has a place for a server and its actor answers. Another stage may have reserved the GPU, and
may wait for GPUs of this stage. So this stage ends after that time, and gives back its GPUs."""
LOOK_SECONDS = 5.0
"""Most seconds for the answer of an actor. An actor that does not answer counts as running: Ray itself reports lost
nodes."""
END_SECONDS = 10.0
"""Most seconds for an actor to end its server. Then Ray kills the actor, and ``guarded_process`` ends the server."""


class Places:
    """A place for each server of a stage: GPUs and CPUs that Ray reserves, on as many nodes as it can."""

    def __init__(self, count: int, *, cpus: int, gpus: int) -> None:
        """Ask for the places.

        Args:
            cpus: CPUs of each server.
            gpus: GPUs of each server.
        """
        self._bundle = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
        self._group = placement_group([self._bundle] * count, strategy="SPREAD")

    def process(self, number: int, program: Program) -> "PlacedProcess":
        """Return the process of a server in its place; it does not run yet."""
        return PlacedProcess(self._group, self._bundle, number, program)

    def give_back(self) -> None:
        """Give the places back; servers that still run there end."""
        with suppress(RayError):
            remove_placement_group(self._group)


class PlacedProcess:
    """A ``Process`` on a node that Ray chooses."""

    def __init__(
        self, group: PlacementGroup, bundle: dict[str, float], number: int, program: Program
    ) -> None:
        """Prepare to start the program in place ``number`` of the group."""
        self._group, self._bundle, self._number, self._program = group, bundle, number, program
        self._actor: Any = None
        self._begun: Any = None
        self._url: str | None = None
        self._is_lost = False
        self._asked_at = 0.0

    def begin(self) -> None:
        """Ask for an actor that starts the program; see ``Process``."""
        self._url, self._is_lost, self._asked_at = None, False, time.monotonic()
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._number)
        share = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0.0)}
        actor = ray.remote(ServerOnNode).options(**share, scheduling_strategy=place, max_restarts=0)
        self._actor = actor.remote(self._program)
        self._begun = self._actor.begin.remote()

    def url(self) -> str | None:
        """See ``Process``.

        Raises:
            EngineUnavailable: Ray has no place for the server.
            ValueError: the node does not see the stage's folder.
        """
        if self._url is None and self._actor is not None:
            if ray.wait([self._begun], timeout=0)[0]:
                self._url = self._answer(self._begun)
            elif time.monotonic() - self._asked_at > PLACE_SECONDS:
                share = " and ".join(f"{count:g} {name}" for name, count in self._bundle.items())
                raise EngineUnavailable(
                    f"Ray had no place for server {self._number} of rollout.servers within {PLACE_SECONDS:g} s: no node has {share} "
                    "free for it"
                )
        return self._url

    def is_running(self) -> bool:
        """See ``Process``."""
        if self._actor is None or self._is_lost:
            return False
        if self._url is None and not ray.wait([self._begun], timeout=0)[0]:
            return True
        is_running = self._answer(self._actor.is_running.remote())
        return not self._is_lost and is_running is not False

    def is_lost(self) -> bool:
        """See ``Process``."""
        return self._is_lost

    def end(self) -> None:
        """See ``Process``."""
        if self._actor is None:
            return
        if self._url is not None and not self._is_lost:
            with suppress(RayError):
                ray.get(self._actor.end.remote(), timeout=END_SECONDS)
        with suppress(RayError):
            ray.kill(self._actor)
        self._actor = None

    def _answer(self, reference: Any) -> Any:
        """Return an answer of the actor; None: it does not answer in time, or has ended.

        Raises:
            ValueError: the actor refuses.
        """
        try:
            return ray.get(reference, timeout=LOOK_SECONDS)
        except GetTimeoutError:
            return None
        except RayTaskError as error:
            raise error.cause from error
        except RayError:  # an actor, a node or an object was lost
            self._is_lost = True
            return None
