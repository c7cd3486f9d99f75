"""Run one function of a test module on several gloo ranks of this machine:

    WITH_TORCH.run_main("tests.support.on_ranks", MODULE, FUNCTION, FOLDER, WORLD_SIZE, STRATEGY)

forks WORLD_SIZE processes. Each calls FUNCTION(FOLDER), and saves the dictionary of tensors and numbers that it returns.
"""

import importlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fork_server import WITH_TORCH
from vantage.tasks.training import ranks

SECONDS = 60.0
"""The longest wait of a rank for another; one that never comes fails the test."""
ROOT = Path(__file__).parents[2]

MESSAGES = {
    "allreduce_": "reduced",
    "_allgather_base_": "gathered",
    "all_gather_into_tensor": "gathered",
    "_reduce_scatter_base_": "scattered",
}
"""Operators that send tensors between ranks, and what their bytes are counted as."""


class Collectives(TorchDispatchMode):
    """Count messages and the bytes of their results in this rank, inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = MESSAGES.get(func.overloadpacket.__name__)
        returned = func(*args, **(kwargs or {}))
        if kind is not None:
            written = returned if func.namespace == "_c10d_functional" else args[0]
            results = written if isinstance(written, list) else [written]
            self.messages[kind] += 1
            self.bytes[kind] += sum(each.numel() * each.element_size() for each in results)
        return returned


def on_ranks(
    function: Callable[[Path], dict[str, Any]], folder: Path, *, world_size: int = 2, strategy: str = "ddp"
) -> list[dict[str, Any]]:
    """Return what the function, one of a module's top level, returned on each rank."""
    module, name = f"tests.{_module_of(function)}", function.__name__
    arguments = (module, name, str(folder), str(world_size), strategy)
    ended = WITH_TORCH.run_main(
        "tests.support.on_ranks", *arguments, environment={"GLOO_SOCKET_IFNAME": "lo"}
    )
    assert ended.returncode == 0, ended.stderr
    return [torch.load(_result(folder, name, rank), weights_only=True) for rank in range(world_size)]


def _module_of(function: Callable[..., Any]) -> str:
    file = Path(function.__code__.co_filename).relative_to(ROOT / "tests")
    return ".".join(file.with_suffix("").parts)


def _result(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-{rank}.pt"


def _work(
    rank: int, world_size: int, function: Callable[[Path], dict[str, Any]], folder: Path, strategy: str
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / function.__name__}.rendezvous"
    ranks.join(hang_seconds=SECONDS, sharded=strategy == "fsdp2", rendezvous=rendezvous)
    torch.save(function(folder), _result(folder, function.__name__, rank))
    ranks.leave()


def main() -> None:
    """Begin the ranks, and end as the worst of them."""
    module, name, folder, world_size, strategy = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    fork_ranks(int(world_size), _work, function, Path(folder), strategy)


def fork_ranks(world_size: int, work: Callable[..., None], *arguments: Any) -> NoReturn:
    """Call ``work(rank, world_size, *arguments)`` in a process for each rank, and end as the worst of them."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=work, args=(rank, world_size, *arguments)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
