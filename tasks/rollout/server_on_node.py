"""Actor of Ray that holds one server of vLLM on its node. This module loads no torch: the actor's process computes nothing."""

import platform

import ray

from vantage.tasks.rollout.server_process import LocalProcess, Program


class ServerOnNode:
    """Actor that holds one server on its node."""

    def __init__(self, program: Program) -> None:
        """Prepare to start the program."""
        self._program = program
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._process = LocalProcess(program, host=here)

    def begin(self) -> str | None:
        """Start the server, and return its address.

        Raises:
            ValueError: this node does not see the stage's folder.
        """
        folder = self._program.log.parent
        if not folder.is_dir():
            raise ValueError(
                f"rollout.servers: node {platform.node()} does not see {folder}; put the workspace (of a bucket: VANTAGE_CACHE) on a file "
                "system that all nodes of the Ray cluster share"
            )
        self._process.begin()
        return self._process.url()

    def is_running(self) -> bool:
        """Return whether the server's process runs."""
        return self._process.is_running()

    def end(self) -> None:
        """End the server."""
        self._process.end()
