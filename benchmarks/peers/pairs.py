"""Run both sides at once, each in a process with one thread and one core; they swap cores from pair to pair."""

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.peers.workloads import GO, READY, Work

SAME = ("optimizer_steps", "trained_rows", "trained_tokens", "generated_tokens")
"""What both sides must have done equally often."""


class UnequalWork(ValueError):
    """The two sides did not do the same, so that their times cannot be compared."""


class SideFailed(RuntimeError):
    """A side ended before it had said what it did."""


@dataclass(frozen=True)
class Pair:
    """What both sides did at the same time."""

    ours: Work
    peer: Work

    @property
    def ratio(self) -> float:
        """The peer's wall time over ours."""
        return self.peer.seconds / self.ours.seconds

    @property
    def cpu_ratio(self) -> float:
        """The peer's CPU time over ours, which other work on the machine disturbs less than wall time."""
        return self.peer.cpu_seconds / self.ours.cpu_seconds


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and their ends."""

    median: float
    lowest: float
    highest: float


def spread(numbers: Sequence[float]) -> Spread:
    """Return the spread of at least one number."""
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def check_equal(name: str, pair: Pair) -> None:
    """Refuse a pair whose sides did not do the same.

    Raises:
        UnequalWork: a count differs, or nothing was done.
    """
    for field in SAME:
        ours, peer = getattr(pair.ours, field), getattr(pair.peer, field)
        if ours != peer:
            raise UnequalWork(
                f"{name}: {field} is {ours:,} on our side and {peer:,} on the other, so that the times cannot be compared"
            )
    if not any(getattr(pair.ours, field) for field in SAME):
        raise UnequalWork(f"{name}: neither side counted any work")


def two_cores(number: int, cores: Sequence[int]) -> tuple[int, int]:
    """Return our core and the peer's in pair ``number`` (from 0).

    Raises:
        ValueError: there are not two cores.
    """
    if len(cores) < 2:
        raise ValueError(f"this process may use {len(cores)} core, and each side needs one of its own")
    first, second = cores[:2]
    return (second, first) if number % 2 else (first, second)


def run_pair(material: Path, *, ours: Sequence[str], peer: Sequence[str], cores: tuple[int, int]) -> Pair:
    """Run both sides at once; each takes the path of the material and its core as arguments.

    Raises:
        SideFailed: one side ended early; the message has the end of its log.
    """
    sides: list[Side] = []
    try:
        for name, command, core in (("ours", ours, cores[0]), ("peer", peer, cores[1])):
            sides.append(Side(name, [*command, str(material), str(core)], material.parent))
        for side in sides:
            side.expect(READY)
        for side in sides:
            side.begin()
        first, second = (Work(**json.loads(side.line())) for side in sides)
    finally:
        for side in sides:
            side.end()
    return Pair(first, second)


class Side:
    """A process that says when it is ready, then what it did."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self._name, self._log = name, folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            )

    def line(self) -> str:
        """Return the next line that it says."""
        said = _of(self._process.stdout).readline().strip()
        if not said:
            end = "\n".join(self._log.read_text().splitlines()[-15:])
            raise SideFailed(f"{self._name} ended early: {' '.join(map(str, self._process.args))}\n{end}")  # type: ignore[arg-type]
        return said

    def expect(self, line: str) -> None:
        """Wait for this line."""
        if (said := self.line()) != line:
            raise SideFailed(f"{self._name} said {said!r} where {line!r} was expected")

    def begin(self) -> None:
        """Let it go on."""
        pipe = _of(self._process.stdin)
        print(GO, file=pipe, flush=True)

    def end(self) -> None:
        """Kill the process, which works for ever so that the other one is never alone while it is timed."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _of(pipe).close()


def _of(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "opened above"
    return pipe
