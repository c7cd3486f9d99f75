"""Checkpoints and logs of work in batches that trains nothing: a file for each finished batch, journal, progress.

A finished batch is never computed again, and an unfinished one leaves nothing behind. So a stage whose batches are
functions of their number alone ends with the same bytes, however often it was killed.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vantage.ledger.journal import Journal
from vantage.schemas.canonical_json import canonical_json
from vantage.storage.durable_files import make_folder, replace_file
from vantage.tasks.training import engine_record, preemption, ranks
from vantage.tasks.training.phase_seconds import of_process
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import BATCHES, JOURNAL, PROGRESS, write_committed
from vantage.tasks.training.step_metrics import Speed, pass_metrics, peak_memory
from vantage.tasks.training.writer import writes_files

log = logging.getLogger(__name__)


class BatchFiles:
    """Finished batches, in order, and the numbers of the batches still to do."""

    def __init__(self, scratch: Path, *, total: int, phase: str) -> None:
        """Read the batches that earlier attempts have finished.

        Args:
            scratch: the stage's scratch folder.
            total: number of all batches.
            phase: name of the work on a batch in progress reports.
        """
        engine_record.note_ended(0)  # nothing trains here, so all batches come from the same weights
        self.finished: list[dict[str, Any]] = []
        self._scratch, self._folder, self._total = scratch, scratch / BATCHES, total
        make_folder(self._folder)
        journal_offset = 0
        while (kept := self._kept(len(self.finished))) is not None:
            self.finished.append(kept["content"])
            journal_offset = kept["journal_offset"]
        ranks.wait()  # the first rank writes no further batch before the others have read what is there
        self._journal = Journal(scratch / JOURNAL) if writes_files() else None
        if self._journal is not None:
            self._journal.truncate(journal_offset)
        self._progress = Progress(scratch / PROGRESS, total=total, phase=phase)
        self._progress.update(len(self.finished))
        self._speed = Speed()
        log.info("%d of %d batches are done already", len(self.finished), total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._journal is not None:
            self._journal.close()

    def remaining(self) -> Iterator[int]:
        """Yield the numbers of the batches still to do; ``finish`` has to be called in each turn.

        Raises:
            Preempted: the process was asked to stop; every finished batch is kept.
        """
        pass_metrics()  # passes before the first batch do not count for it
        of_process.begin()
        while len(self.finished) < self._total:
            yield len(self.finished)
            if ranks.any_rank(preemption.requested()):
                raise preemption.preempted(f"batch {len(self.finished)} of {self._total}")

    def finish(
        self,
        content: Mapping[str, Any],
        *,
        metrics: Mapping[str, float],
        num_tokens: int,
        headline: str,
        attachment: bytes | None = None,
    ) -> None:
        """Keep the batch's result (JSON), then log its metrics.

        Args:
            content: what a later attempt finds in ``finished``.
            metrics: name → value, of ``vantage.schemas.records.metrics``; metrics of the batch's passes are added.
            num_tokens: tokens that the batch read or sampled.
            headline: the metric that a person wants to see beside the progress bar.
            attachment: a result that is too large for memory and JSON; ``attachment`` returns its path.
        """
        number = len(self.finished)
        metrics, seconds = {**metrics, **pass_metrics()}, of_process.taken()
        tokens_per_second, memory = self._speed.after(num_tokens), peak_memory()
        if self._journal is not None:
            self._journal.append(
                number + 1,
                {**metrics, **seconds, "tokens_per_second": tokens_per_second, "peak_memory": memory},
                time=time.time(),
            )
            offset = self._journal.sync()
            kept: dict[str, Any] = {"content": content, "journal_offset": offset}
            if attachment is not None:
                replace_file(self.attachment(number), attachment)
                kept["attachment"] = _digest(attachment)
            text = canonical_json(kept).encode()
            replace_file(self._path(number), f"{_digest(text)}\n".encode() + text)
            write_committed(self._scratch, step=number + 1, journal_offset=offset)
        self.finished.append(dict(content))
        self._progress.update(
            number + 1, metrics=metrics, headline=headline, tokens_per_second=tokens_per_second
        )

    def attachment(self, number: int) -> Path:
        """Return the path of the attachment of a finished batch."""
        return self._folder / f"{number}.attachment"

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"

    def _kept(self, number: int) -> dict[str, Any] | None:
        """Return the result of a batch; None if it is incomplete: then the batch is computed again."""
        kept = _read(self._path(number))
        if kept is None or "attachment" not in kept:
            return kept
        try:
            attachment = self.attachment(number).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return None
        return kept if _digest(attachment) == kept["attachment"] else None


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if it is missing or damaged: then the batch is computed again."""
    try:
        digest, _, text = path.read_bytes().partition(b"\n")
    except (FileNotFoundError, IsADirectoryError):
        return None
    if digest.decode(errors="replace") != _digest(text):
        return None
    kept: dict[str, Any] = json.loads(text)
    return kept


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
