"""The process of one server of vLLM, on the machine of the process that starts it. This module loads neither torch nor Ray."""

import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LOOPBACK = "127.0.0.1"

ALWAYS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""Settings of the server for its endpoints of weights and of adapters."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_NO_USAGE_STATS": "1",
    "TRITON_F32_DEFAULT": "ieee",  # no TF32 in float32
}
"""Other settings of the server; a variable that is set already stays as it is."""

OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "VLLM_ENABLE_V1")
"""Beginnings of variables that describe the stage's own processes."""


class Process(Protocol):
    """The process of a server, on this machine or on another one; it can be started again after its end."""

    def begin(self) -> None:
        """Start the server, or ask for its start."""

    def url(self) -> str | None:
        """Return the server's address; None: it has none yet, or has ended.

        Raises:
            EngineUnavailable: there is no place for the server.
            ValueError: the server cannot be started in its place.
        """

    def is_running(self) -> bool:
        """Return whether the server runs, or is about to."""

    def is_lost(self) -> bool:
        """Return whether the server ended together with its machine, so that a start on another machine may succeed."""

    def end(self) -> None:
        """End the server and all processes that it has started; does nothing if it does not run."""


@dataclass(frozen=True)
class Program:
    """Program of a server; everything here is the same on all machines."""

    command: tuple[str, ...]
    """Arguments of Python, up to the server's address."""
    log: Path
    """File to which the server's output is appended."""
    settings: Mapping[str, str]
    """Environment variables that are set unless they are set already."""
    fixed: Mapping[str, str]
    """Environment variables that are always set."""

    def environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the server's process; ``ours``: environment of the process that starts it."""
        kept = {name: value for name, value in ours.items() if not name.startswith(OF_RANKS)}
        return {**ENVIRONMENT, **self.settings, **kept, **ALWAYS, **self.fixed}


class LocalProcess:
    """A ``Process`` of this machine; it ends with this process, however that ends."""

    def __init__(self, program: Program, *, host: str = LOOPBACK) -> None:
        """Prepare to start the program.

        Args:
            host: address of this machine on which it listens.
        """
        self._program, self._host = program, host
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def begin(self) -> None:
        """Start the server on a free port."""
        with socket.socket() as free:
            free.bind((self._host, 0))
            self._port = free.getsockname()[1]
        guarded, guard = os.pipe()
        address = ("--host", self._host, "--port", str(self._port))
        guarding = (sys.executable, "-m", "vantage.tasks.rollout.guarded_process", str(guarded))
        with open(self._program.log, "ab") as output:
            self._process = subprocess.Popen(
                [*guarding, sys.executable, *self._program.command, *address],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(guarded,),
                process_group=0,  # so that processes that it starts can be ended with it
                env=self._program.environment(os.environ),
            )
        os.close(guarded)
        self._end = weakref.finalize(self, _end, self._process, guard)

    def url(self) -> str | None:
        """See ``Process``."""
        return f"http://{self._host}:{self._port}" if self.is_running() else None

    def is_running(self) -> bool:
        """See ``Process``."""
        return self._process is not None and self._process.poll() is None

    def is_lost(self) -> bool:
        """See ``Process``; False, since this process would have ended with the machine too."""
        return False

    def end(self) -> None:
        """See ``Process``."""
        if self._process is not None:
            self._end()
        self._process = None


def last_words(log: Path, *, most: int) -> str:
    """Return the end of a server's log in one line.

    Args:
        most: largest number of characters.
    """
    with suppress(OSError):
        return " ".join(log.read_bytes()[-most:].decode(errors="replace").split())
    return "(it wrote none)"


def _end(process: "subprocess.Popen[bytes]", guard: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    os.close(guard)
