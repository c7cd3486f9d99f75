"""Combine single answers, each graded or marked in a row of its own, by their prompt into rankings or pairs.

Rows of one prompt may be anywhere in a file, so all rows are written to a file on disk. A large one is divided into several
files by a hash of the prompt, each of which fits into memory.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from vantage.schemas.row_rules import COLUMN_TYPES, REPEATED, SLICE_ROWS, UNPAIRED
from vantage.tasks.data.judgments import preferred
from vantage.tasks.data.row_faults import Fault

PART_BYTES = 32 << 20
"""Bytes of answers (in Arrow's format) that are combined in memory."""
MOST_PARTS = 512
"""Most files that are written at once."""

_MARKS = {
    "first": ("true", "1", "good", "desirable", "positive", "thumbs_up"),
    "second": ("false", "0", "bad", "undesirable", "negative", "thumbs_down"),
}
"""Words of good and bad marks, in lower case."""
_KEY_BYTES = 16
_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("key", pa.binary(_KEY_BYTES)),
        *((column, COLUMN_TYPES[column]) for column in ("prompt", "response", "messages")),
        ("grade", pa.float64()),
    ]
)

Row = Mapping[str, Any]
Numbered = tuple[int, Row | Fault]
"""Number of a row in the file, from 0, with the row, or with the reason why there is none."""


def are_single(content: str, columns: Collection[str]) -> bool:
    """Return whether the rows of a mapping are single answers, from which rankings or pairs are made."""
    return (
        content in ("preferences", "rankings")
        and bool({"score", "label"} & set(columns))
        and bool({"response", "conversation"} & set(columns))
        and not {"chosen", "rejected", "responses", "response_a", "response_b"} & set(columns)
    )


def grade_of(values: Row, labels: Mapping[str, Sequence[str]]) -> float:
    """Return the score of an answer; for a mark, 1 if good and 0 if bad.

    Args:
        values: our column → its value in the row.
        labels: ``first`` lists the good ones; empty: true and false, good and bad, and the like.

    Raises:
        Undecided: the mark is neither good nor bad.
        ValueError: there is no grade, or it is not known.
    """
    if "score" in values:
        score = values["score"]
        if score is None or not math.isfinite(score):
            raise ValueError("score is missing or not finite")
        return float(score)
    return 1.0 - preferred(values["label"], labels or _MARKS)


def by_prompt(
    answers: Iterable[Numbered], *, content: str, are_marks: bool, folder: Path
) -> Iterator[Numbered]:
    """Yield the rankings or pairs that are made of single answers, and the answers that are in none.

    With scores, a prompt's best answer is preferred to its worst. With marks, the first good answer is preferred to the first
    bad one, the second to the second, and so on.

    Args:
        answers: rows with ``prompt``, ``response``, ``messages`` and ``grade``.
        content: ``preferences`` or ``rankings``.
        are_marks: whether the grades are marks.
        folder: folder for temporary files.
    """
    path = folder / "single.arrow"
    put_together = _ranking if content == "rankings" else _marked_pairs if are_marks else _graded_pair
    try:
        with pa.ipc.new_file(path, _SCHEMA) as writer:
            waiting: list[Row] = []
            for number, answer in answers:
                wrong = answer if isinstance(answer, Fault) else _fault(answer)
                if wrong is not None:
                    yield number, wrong
                    continue
                assert not isinstance(answer, Fault)
                waiting.append({**answer, "number": number, "key": _key(answer)})
                if len(waiting) == SLICE_ROWS:
                    writer.write_batch(pa.RecordBatch.from_pylist(waiting, schema=_SCHEMA))
                    waiting = []
            writer.write_batch(pa.RecordBatch.from_pylist(waiting, schema=_SCHEMA))
        parts = _parts(path)
        try:
            for part in parts:
                yield from _of_part(part, put_together)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
    finally:
        path.unlink(missing_ok=True)


def _fault(answer: Row) -> Fault | None:
    missing = next((column for column in ("prompt", "response") if not (answer[column] or "").strip()), None)
    return None if missing is None else Fault(f"{missing} is missing or empty", str(dict(answer))[:200])


def _key(answer: Row) -> bytes:
    return hashlib.blake2b(
        repr((answer["prompt"], answer["messages"])).encode(), digest_size=_KEY_BYTES
    ).digest()


def _parts(path: Path) -> list[Path]:
    """Return the file itself, or files of ``PART_BYTES``, each with all answers of its prompts in order."""
    count = min(MOST_PARTS, -(-path.stat().st_size // PART_BYTES))
    if count == 1:
        return [path]
    parts = [path.with_suffix(f".{number}.arrow") for number in range(count)]
    with ExitStack() as open_files, pa.OSFile(str(path)) as file:
        writers = [open_files.enter_context(pa.ipc.new_file(part, _SCHEMA)) for part in parts]
        reader = pa.ipc.open_file(file)
        for batch in map(reader.get_batch, range(reader.num_record_batches)):
            of = pa.array(
                [int.from_bytes(key[:4], "big") % count for key in batch["key"].to_pylist()], pa.int64()
            )
            for number in set(of.to_pylist()):
                writers[number].write_batch(batch.filter(pa.compute.equal(of, number)))
    return parts


def _of_part(part: Path, put_together: Callable[[list[Row]], Iterator[Numbered]]) -> Iterator[Numbered]:
    with pa.OSFile(str(part)) as file:
        rows = pa.ipc.open_file(file).read_all().to_pylist()
    groups: dict[bytes, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["key"], []).append(row)
    for group in groups.values():
        yield from put_together(group)


def _ranking(group: list[Row]) -> Iterator[Numbered]:
    kept: dict[tuple[str, float], Row] = {}
    for row in group:
        if kept.setdefault((row["response"], row["grade"]), row) is not row:
            yield row["number"], Fault(REPEATED, row["prompt"])
    rows = list(kept.values())
    if len({row["grade"] for row in rows}) < 2:
        yield from _unpaired(rows)
        return
    yield _made(rows[0], responses=[row["response"] for row in rows], ranks=[-row["grade"] for row in rows])


def _graded_pair(group: list[Row]) -> Iterator[Numbered]:
    best, worst = max(group, key=_grade), min(group, key=_grade)
    if best["grade"] == worst["grade"]:
        yield from _unpaired(group)
        return
    yield _made(group[0], chosen=best["response"], rejected=worst["response"])


def _marked_pairs(group: list[Row]) -> Iterator[Numbered]:
    good, bad = ([row for row in group if row["grade"] == grade] for grade in (1.0, 0.0))
    count = min(len(good), len(bad))
    for better, worse in zip(good[:count], bad[:count], strict=True):
        yield _made(better, chosen=better["response"], rejected=worse["response"])
    yield from _unpaired([*good[count:], *bad[count:]])


def _grade(row: Row) -> float:
    grade: float = row["grade"]
    return grade


def _unpaired(rows: Iterable[Row]) -> Iterator[Numbered]:
    for row in rows:
        yield row["number"], Fault(UNPAIRED, row["prompt"])


def _made(first: Row, **columns: Any) -> Numbered:
    return first["number"], {"prompt": first["prompt"], "messages": first["messages"], **columns}
