"""Recognise the format of published data, by reading the first rows of a file in each format in turn."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vantage.schemas.conversations import calls_tools
from vantage.schemas.steps import CONTENT_COLUMNS
from vantage.tasks.data.assembly import Assembly
from vantage.tasks.data.columns import RowMapper, WrongValue
from vantage.tasks.data.conversations import is_transcript
from vantage.tasks.data.garbled_rows import is_mark, refuse_garbled
from vantage.tasks.data.judgments import WORDS, Undecided, Unpairable, plain, readings
from vantage.tasks.data.published_formats import Format, Labels, candidates, optional_columns
from vantage.tasks.data.single_answers import are_single, grade_of
from vantage.tasks.data.spellings import Spellings

SAMPLE_ROWS = 1000
"""Number of rows by which a format is recognised."""
READ_SHARE = 0.9
"""Least share of these rows that must be readable in the format."""
_NEAREST_ROWS = 50
_SYSTEM = ("system", "system_prompt", "system_message")


def recognise(rows: Sequence[Mapping[str, Any]], content: str, *, is_text: bool) -> Format | None:
    """Return the first format in which at least nine tenths of the rows can be read as ``content``, or None.

    Args:
        rows: the first rows of a file.
        is_text: the rows contain only text.

    Raises:
        GarbledRows: the rows can be read, but their texts are not prompts and responses.
    """
    for found in _tried(rows, content):
        if share_read(rows, content, found, is_text=is_text) >= READ_SHARE:
            if are_single(content, found.columns) and not _may_be_compared(found, rows):
                continue
            found = completed(found, rows, content, is_text=is_text)
            refuse_garbled(found, rows, content)
            return found
    return None


def nearest(
    rows: Sequence[Mapping[str, Any]], content: str, *, is_text: bool, also_single: bool = False
) -> str | None:
    """Return the format whose columns the rows have and in which most rows can be read, and its first error; None: there
    is none.

    Use this for rows in no format of the content. Formats of prompts alone are left out, and those of a single column count
    only with ``also_single``, after all others.
    """
    rows = rows[:_NEAREST_ROWS]
    near: list[tuple[bool, bool, int, str]] = []
    for found in _tried(rows, content):
        reasons = Counter(_reasons(rows, content, found, is_text=is_text))
        is_single = len(found.columns) == 1
        if content != "prompts" and (also_single or not is_single) and reasons:
            [(reason, count)] = reasons.most_common(1)
            said = f"as {found.name} {found.columns}: {count} of the first {len(rows)} rows: {reason}"
            near.append((is_single, reason.endswith(("is missing", "is empty")), count, said))
    return min(near, key=lambda each: each[:3], default=(False, False, 0, None))[3]


def _tried(rows: Sequence[Mapping[str, Any]], content: str) -> Iterator[Format]:
    """Yield the formats whose columns the rows have."""
    spelt = Spellings({str(name) for row in rows for name in row})
    for candidate in candidates(content, spelt):
        columns = spelt.of(candidate.columns, may_differ=not candidate.is_own)
        if columns is not None:
            for labels in _labels(Format(candidate.name, columns, candidate.labels), rows):
                yield Format(candidate.name, columns, labels)


def share_read(rows: Sequence[Mapping[str, Any]], content: str, form: Format, *, is_text: bool) -> float:
    """Return the share of rows that can be read in the format; tied labels count as read."""
    if not rows:
        return 0.0
    wrong = Counter(_reasons(rows, content, form, is_text=is_text))
    # Conversations compared as a whole are in the format, though they give no pair; the same holds for empty sides
    of_format = wrong[str(Unpairable())] + sum(wrong[each] for each in _EMPTY_SIDES)
    num_read = len(rows) - wrong.total()
    return (num_read + min(of_format, num_read)) / len(rows)


def _reasons(
    rows: Sequence[Mapping[str, Any]], content: str, form: Format, *, is_text: bool
) -> Iterator[str]:
    """Yield the reasons of the rows that cannot be read in the format."""
    single = are_single(content, form.columns)
    content = "demonstrations" if single else content
    assembly = Assembly(content, tuple(form.columns), form.labels)
    mapper = RowMapper(form.columns, is_text=is_text, keeps_turns=True)
    for row in rows:
        try:
            values = mapper.map(row)
            made = assembly.assemble(values)
            if single:
                grade_of(values, form.labels)
        except Undecided:
            continue
        except ValueError as error:
            yield str(error)
        else:
            empty = [
                column
                for column in CONTENT_COLUMNS[content]
                if not made[column]
                and made[column] is not False
                and not calls_tools(made.get(f"{column}_extra"))
            ]
            yield from (_lacking(column, made[column]) for column in empty[:1])


_EMPTY_SIDES = ("chosen is empty", "rejected is empty")


def _lacking(column: str, value: Any) -> str:
    reason = f"{column} is empty"
    return reason if value is not None and reason in _EMPTY_SIDES else f"{column} is missing"


def completed(found: Format, rows: Sequence[Mapping[str, Any]], content: str, *, is_text: bool) -> Format:
    """Return the format, extended for these rows: prompts that are transcripts, and system messages."""
    columns, details = dict(found.columns), []
    if _share(rows, columns.get("prompt"), is_transcript) >= READ_SHARE:
        columns = {"conversation": columns.pop("prompt"), **columns}
        details.append("the prompt a transcript")
    if "system" not in columns:
        for name in _SYSTEM:
            texts = [row[name] for row in rows if row.get(name)]
            if texts and all(isinstance(text, str) for text in texts):
                columns["system"] = name
                details.append("with a system message")
                break
    if not details:
        return found
    if found.is_own:
        names = {name for row in rows for name in row}
        columns |= {column: column for column in optional_columns(content) if column in names}
    whole = Format(", ".join([found.name, *details]), columns, found.labels)
    return whole if share_read(rows, content, whole, is_text=is_text) >= READ_SHARE else found


def _share(rows: Sequence[Mapping[str, Any]], column: str | None, has: Callable[[Any], bool]) -> float:
    return sum(has(row.get(column)) for row in rows) / len(rows) if column else 0.0


def _may_be_compared(form: Format, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a column of single answers contains marks, or scores where half of the rows share their prompt with
    others."""
    if "label" in form.columns:
        return _share(rows, form.columns["label"], is_mark) >= READ_SHARE
    asked = [repr(row.get(form.columns.get("prompt", ""))) for row in rows]
    counts = Counter(asked)
    return 2 * sum(counts[each] > 1 for each in asked) >= len(rows)


def _labels(candidate: Format, rows: Sequence[Mapping[str, Any]]) -> Iterator[Labels]:
    """Yield the readings of a label to try: the format's own; else words, and numbers or column names if no others occur."""
    yield candidate.labels
    if "label" not in candidate.columns or candidate.labels:
        return
    mapper = RowMapper({"label": candidate.columns["label"]})
    found: set[str] = set()
    for row in rows:
        try:
            value = mapper.map(row)["label"]
        except WrongValue:
            continue
        found.update(
            plain(label) for label in (value if isinstance(value, list) else [value]) if label is not None
        )
    ties = {label for label in found if WORDS.get(label) == "tie"}
    for labels in readings(candidate.columns):
        if found - ties == {label for named in labels.values() for label in named}:
            yield {**labels, "tie": tuple(sorted(ties))} if ties else labels
