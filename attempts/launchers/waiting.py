"""The report of a stage that waits for the nodes of a Ray cluster: the nodes, since when, and how many are alive."""

import time
from dataclasses import dataclass
from pathlib import Path

from vantage.storage.durable_files import replace_file_unsynced
from vantage.tasks.training.progress import StageProgress, read_progress
from vantage.tasks.training.scratch import PROGRESS, read_committed

SECONDS_FOR_MORE = 60.0
"""Seconds to wait for all nodes if fewer suffice: Ray takes up to half a minute to notice that a node is lost."""
_WAITING = "waiting for "


@dataclass(frozen=True)
class NodesAsked:
    """The nodes that a stage needs."""

    least: int
    most: int
    cpus: int
    """CPUs of each node."""
    gpus: int
    """GPUs of each node."""

    def __str__(self) -> str:
        count = str(self.most) if self.least == self.most else f"{self.least} to {self.most}"
        noun = "node" if self.most == 1 else "nodes"
        return f"{count} Ray {noun} with {_counted(self.gpus, 'GPU') if self.gpus else _counted(self.cpus, 'CPU')} each"

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one node, under Ray's names."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


class Waiting:
    """Reports in the stage's progress file what it waits for, so that ``status`` and the console show it."""

    def __init__(self, scratch: Path, asked: NodesAsked) -> None:
        self._file = scratch / PROGRESS
        self._asked = asked
        self._since = time.time()
        """Begin of the wait by the wall clock, for display."""
        self._began = time.monotonic()
        before = read_progress(self._file)
        step, _ = read_committed(scratch)
        self._step, self._total = step, 0 if before is None else before.total
        self._noted = ""

    @property
    def is_late(self) -> bool:
        """Return whether fewer nodes suffice by now, if the recipe allows fewer."""
        return time.monotonic() - self._began >= SECONDS_FOR_MORE

    def report(self, alive: int) -> None:
        """Report how many fitting nodes are alive; the log gets a line when that changes."""
        phase = f"{_WAITING}{self._asked} since {_clock(self._since)}"
        note = f"{alive} {'is' if alive == 1 else 'are'} alive"
        if alive >= self._asked.most or (alive >= self._asked.least and self.is_late):
            note += ", in use by others"
        elif alive >= self._asked.least:
            note += f", enough from {_clock(self._since + SECONDS_FOR_MORE)} on"
        self._show(phase, note)
        if note != self._noted:
            self._noted = note
            print(f"{phase}: {note}", flush=True)

    def is_over(self, nodes: int, ranks: int) -> None:
        """Report that the ranks are being started on the nodes that were found; this takes half a minute."""
        self._show(f"starting {_counted(ranks, 'rank')} on {_counted(nodes, 'Ray node')}", "")

    def _show(self, phase: str, note: str) -> None:
        progress = StageProgress(
            phase=phase,
            phase_note=note,
            step=self._step,
            total=self._total,
            metrics={},
            started=self._since,
            updated=time.time(),
        )
        replace_file_unsynced(self._file, progress.model_dump_json().encode())


def what_it_waits_for(progress: StageProgress | None) -> str | None:
    """Return ``waiting for 2 Ray nodes with 1 GPU each since 03:12:05, 1 is alive``; None for a stage that computes."""
    if progress is None or not progress.phase.startswith(_WAITING):
        return None
    return f"{progress.phase}, {progress.phase_note}"


def _clock(seconds: float) -> str:
    """Return a time of today in the form of a clock."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
