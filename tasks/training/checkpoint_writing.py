"""Write a stage's checkpoints beside its training: copy the state, and let a thread write the copy during the next
steps.

At most one write is in flight; the next one waits for it. Only complete checkpoints count, so a stage that is killed
during a write goes on from the one before. If host memory has no room for the copy, the checkpoint is written between
two steps.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vantage.tasks.training import ranks
from vantage.tasks.training.checkpoints import Content, write, write_shards
from vantage.tasks.training.control_groups import available_memory
from vantage.tasks.training.scratch import CHECKPOINTS, write_committed
from vantage.tasks.training.writer import writes_files

log = logging.getLogger(__name__)

SHARE_OF_MEMORY = 0.5
"""Largest share of the available host memory that the copies of a machine's ranks may take."""
_SHOWN_SECONDS = 1.0
"""Shortest wait for a write in flight that the stage's log mentions."""


class CheckpointWriting:
    """The checkpoints of one attempt, of which at most one is being written."""

    def __init__(self, scratch: Path, *, hang_seconds: float | None) -> None:
        """Make the writer of the checkpoints in ``scratch``; all ranks make one together."""
        self._scratch = scratch
        self._wait_in_thread = ranks.separate_wait(hang_seconds) if ranks.are_sharded() else ranks.wait
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, content: Content, *, journal_offset: int, beside: bool, done: Callable[[], None]) -> None:
        """Save a checkpoint; all ranks call this together.

        Args:
            content: content of this rank; only that of the first rank is written, unless weights are sharded.
            journal_offset: size of the metric journal at that step.
            beside: whether the stage may go on meanwhile; otherwise the checkpoint is complete when this returns.
            done: called when the checkpoint is complete, perhaps in another thread.

        Raises:
            OSError: the disk is full or broken, at this write or at the one before; earlier checkpoints are unchanged.
        """
        self.finish()
        is_mine = ranks.are_sharded() or writes_files()
        if not beside or not has_room(content.bytes_to_copy if is_mine else 0):
            self._write(content, journal_offset, ranks.wait)
            ranks.wait()
            done()
        elif is_mine:
            copied = content.copied()

            def write_copy() -> None:
                try:
                    self._write(copied, journal_offset, self._wait_in_thread)
                    done()
                except BaseException as error:  # `check` or `finish` raises it again
                    self._error = error

            self._thread = threading.Thread(target=write_copy, name="write-checkpoint", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise the error of a write that has failed; a write in flight goes on."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait until the write in flight is complete.

        Raises:
            OSError: the disk is full or broken.
        """
        if self._thread is None:
            return
        began = time.monotonic()
        self._thread.join()
        self._thread = None
        if (waited := time.monotonic() - began) >= _SHOWN_SECONDS:
            log.info("waited %.1f s for the checkpoint before", waited)
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _write(self, content: Content, journal_offset: int, wait: Callable[[], None]) -> None:
        folder = self._scratch / CHECKPOINTS
        if ranks.are_sharded():
            write_shards(folder, content, wait=wait)
        elif writes_files():
            write(folder, content)
        if writes_files():
            write_committed(self._scratch, step=content.step, journal_offset=journal_offset)


def has_room(num_bytes: int) -> bool:
    """Return, the same on all ranks, whether the ranks of every machine can each copy so many bytes into its memory."""
    copies = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size())) if ranks.are_sharded() else 1
    lacks = num_bytes > 0 and copies * num_bytes > SHARE_OF_MEMORY * available_memory()
    return not ranks.any_rank(lacks)
