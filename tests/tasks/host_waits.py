"""Count where a program waits for its device: on a CPU, where each of these costs nothing, as a GPU would have to wait.

A number that Python reads, and a tensor whose shape depends on what others hold, are known only when all that was started
before is done; a GPU has nothing to do then until Python has started more.
"""

import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vantage.models.value_reads import reads_values

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "transformers"
COPIES = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__array__}
"""Calls that no operator shows where the tensor is on the CPU already."""


class HostWaits(TorchDispatchMode):
    """Counts what would wait for the device while it is entered, forward passes of a library's model included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where: Counter[str] = Counter()
        """File and line of this project, and the operator → how often."""
        self._copies = _Copies(self.where)

    def __enter__(self) -> Self:
        self._copies.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._copies.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the operator if it waits, and call it."""
        if reads_values(func, args, kwargs or {}):
            self.where[_caller(func.overloadpacket.__name__)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def own(self) -> int:
        """How often this project's own code waited."""
        return self.where.total() - self.where[LIBRARY]


class _Copies(TorchFunctionMode):
    def __init__(self, where: Counter[str]) -> None:
        super().__init__()
        self._where = where

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in COPIES:
            self._where[_caller(func.__name__)] += 1
        return func(*args, **(kwargs or {}))


def _caller(name: str) -> str:
    """Return the innermost line of this project that is no test; a library's models are one place."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "transformers" in path.parts:
            return LIBRARY
        if path.is_relative_to(ROOT) and not {"tests", ".venv"} & set(path.relative_to(ROOT).parts):
            return f"{path.relative_to(ROOT)}:{frame.lineno} {name}"
    return f"elsewhere {name}"
