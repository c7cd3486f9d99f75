"""Meter memory for tests on a CPU: count the bytes of all live tensors that a thread has made."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveMemory(TorchDispatchMode):
    """A ``vantage.tasks.training.memory_meter.Meter`` that counts within a ``with`` block."""

    def __init__(self, limit: int, *, device: str = "a device of the tests") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit, self.device = limit, device
        self._alive: Any = WeakIdKeyDictionary()
        self._now = self._most = 0
        self.asked = 0
        """How often the limit was asked for: once for each search."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("cpu"):
            return result  # a copy into host memory, which a device does not count
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._see(each.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._alive:
            return
        self._alive[storage] = size = storage.nbytes()
        weakref.finalize(storage, self._forget, size)
        self._now += size
        self._most = max(self._most, self._now)

    def _forget(self, size: int) -> None:
        self._now -= size

    def begin(self) -> None:
        self._most = self._now

    def peak(self) -> int:
        return self._most

    def taken(self) -> int:
        return self._now

    def limit(self) -> int:
        self.asked += 1
        return self._limit
