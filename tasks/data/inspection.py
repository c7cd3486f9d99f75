"""Inspect a file of data: its format, faults of its rows, and the lengths and scripts of its texts."""

import hashlib
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from vantage.schemas.digest_set import DigestSet
from vantage.schemas.recipe.inputs import Content, Data, Load
from vantage.schemas.recipe.sources import HubDataset, data_source
from vantage.schemas.records.inspection import FileInspection, Quantiles
from vantage.schemas.row_rules import SLICE_ROWS, RowCheck
from vantage.schemas.source_files import (
    PLAIN_FORMATS,
    data_format,
    data_limit,
    is_saved,
    saved_files,
    why_not_saved,
)
from vantage.tasks.data.formats import SAMPLE_ROWS, nearest, recognise
from vantage.tasks.data.garbled_rows import GarbledRows
from vantage.tasks.data.hub_datasets import load_rows
from vantage.tasks.data.hub_files import UnreachableHub, source_files
from vantage.tasks.data.published_formats import Format
from vantage.tasks.data.row_faults import Fault, SourceRow, UnreadableFile
from vantage.tasks.data.row_reader import RowReader
from vantage.tasks.data.saved_datasets import rows_of_files
from vantage.tasks.data.single_answers import are_single
from vantage.tasks.data.whole_objects import whole_object

CONTENTS: tuple[Content, ...] = (
    "rankings",
    "preferences",
    "labelled_responses",
    "demonstrations",
    "prompts",
)
"""Contents in the order in which they are tried on a file: the first has the most columns in a row."""
_GUESSED: tuple[Content, ...] = ("rankings", "preferences", "demonstrations")
"""Contents whose nearest format is shown for a file in no known one."""
SCRIPT_ROWS = 2_000
"""Number of usable rows whose letters are counted."""

Row = Mapping[str, Any]


class UnknownData(ValueError):
    """A file that is in no known format, or cannot be read."""


def inspect_file(
    path: Path, content: Content | None, load: Load | None = None
) -> tuple[FileInspection, list[tuple[int, Row]]]:
    """Return a description of the file, and its first usable rows with their numbers from 0.

    Memory holds a batch of rows, their lengths, and digests of all usable rows and different prompts: about 50 bytes per row.

    Args:
        path: a file, a pattern of files' names, a folder that ``save_to_disk`` of ``datasets`` wrote,
            ``hub:ORGANISATION/NAME@COMMIT/FILE``, in one of ``vantage.schemas.source_files.DATA_FORMATS``, or
            ``hub:ORGANISATION/NAME@COMMIT``.
        content: content as which the rows are read; None: recognised.
        load: rows of ``hub:ORGANISATION/NAME@COMMIT`` to read; None for any other source.

    Raises:
        UnknownData: the file is in no known format, or cannot be read.
        OSError: the file does not exist.
    """
    path = saved_files(path)
    source = _source(str(path), load)
    try:
        ending, rows = _opened(path, source)
        first = list(islice(rows, SAMPLE_ROWS))
        readable = [row for row in first if not isinstance(row, Fault)]
        found = known_formats(readable, ending, content)
        chosen = content or _chosen(found, readable)
        if chosen is None or chosen not in found:
            raise UnknownData(_unknown(path, first, content, ending))
        return _inspect(source, ending, chosen, found, first, chain(first, rows))
    except UnreadableFile as error:
        raise UnknownData(f"{path} cannot be read as {data_format(path) or 'data'}: {error}") from error
    except UnreachableHub as error:
        raise UnknownData(str(error)) from error


def _chosen(found: Mapping[Content, Format], rows: Sequence[Row]) -> Content | None:
    """Return the content as which a file is shown; None: it has none. Marked answers make no pairs if no prompt repeats."""
    first = next((each for each in CONTENTS if each in found), None)
    if (
        first != "preferences"
        or "labelled_responses" not in found
        or not are_single(first, found[first].columns)
    ):
        return first
    columns = found[first].columns
    asked = [repr(row.get(columns["prompt"])) for row in rows] if "prompt" in columns else []
    return "labelled_responses" if asked and len(set(asked)) == len(asked) else first


def _source(named: str, load: Load | None) -> Data:
    """Return the source of the rows in the form of a recipe.

    Raises:
        UnknownData: a dataset on the hub has no split or commit, or another source has a split.
    """
    origin = data_source(named)
    if isinstance(origin, HubDataset):
        if not origin.is_well_formed:
            raise UnknownData(
                f"{named} names no commit of a dataset; write hub:ORGANISATION/NAME@COMMIT with the 40 digits of a commit; a "
                "branch or a tag could change"
            )
        if load is None:
            raise UnknownData(
                f"{named} is a dataset, which has splits; add --split NAME, or name files: {named}/FILE"
            )
    elif load is not None:
        raise UnknownData(
            f"--split={load.split} is about hub:ORGANISATION/NAME@COMMIT, and {named} is no such dataset; leave it out, and name "
            "the folder or the files of one split"
        )
    return Data(source=named, load=load)


def _opened(path: Path, source: Data) -> tuple[str, Iterator[SourceRow]]:
    """Return the format of the files that the source names, and their rows."""
    if isinstance(source.origin, HubDataset) and source.load is not None:
        loaded = load_rows(source.origin, source.load)
        return loaded.ending, loaded.rows
    ending = data_format(path)
    if ending is None:
        remedy = why_not_saved(path) or "rename or convert it"
        raise UnknownData(f"{path} has none of the suffixes {', '.join(PLAIN_FORMATS)}; {remedy}")
    files = source_files(str(path))
    if not files:
        raise UnknownData(f"no file is called {path}; check the pattern")
    return ending, rows_of_files(str(path), files, ending)


def known_formats(rows: Sequence[Row], ending: str, wanted: Content | None) -> dict[Content, Format]:
    """Return content → the format in which the rows can be read as this content.

    Raises:
        GarbledRows: read as ``wanted``, or as anything but prompts, the rows would be learnt wrongly.
    """
    found: dict[Content, Format] = {}
    refused: GarbledRows | None = None
    for content in CONTENTS:
        if not (content == "rankings" and ending.startswith(".csv")):
            try:
                form = recognise(rows, content, is_text=ending.startswith(".csv"))
            except GarbledRows as error:
                if content == wanted:
                    raise
                refused = refused or error
                continue
            if form is not None:
                found[content] = form
    if refused is not None and not set(found) - {
        "prompts"
    }:  # a file with more than prompts is not meant as prompts
        raise refused
    return found


def _nearly(
    rows: Sequence[Row], contents: Sequence[Content], ending: str, *, also_single: bool = False
) -> dict[Content, str]:
    """Return content → nearest format and its error, for contents in which the rows cannot be read."""
    is_text = ending.startswith(".csv")
    near = {each: nearest(rows, each, is_text=is_text, also_single=also_single) for each in contents}
    return {content: reason for content, reason in near.items() if reason is not None}


def _unknown(path: Path, first: Sequence[SourceRow], content: Content | None, ending: str) -> str:
    rows = [row for row in first if not isinstance(row, Fault)]
    layout = None if not path.is_file() else whole_object(path, ending, data_limit())
    if layout is not None:
        return f"{path}: {layout}"
    if not rows:
        fault = next((row for row in first if isinstance(row, Fault)), None)
        said = (
            "it has no rows; write some into it, or name another file"
            if fault is None
            else f"none of its first {len(first)} rows can be read"
        )
        if fault is None:
            return f"{path}: {said}"
        hint = "; .jsonl has an object on each line" if ending.startswith(".jsonl") else ""
        return f"{path}: {said}; the first is {fault.reason}: {fault.shown}{hint}"
    names = ", ".join(map(str, rows[0]))
    if {"parent_id", "text", "role"} <= set(rows[0]):  # OASST's format
        return (
            f"{path}: each row is one message, which names the one before it in parent_id; write a row for each "
            "conversation ([{role, content}]), or for each prompt with its ranked answers (prompt, responses, ranks)"
        )
    near = "".join(
        f"\n  {each} {why}"
        for each, why in _nearly(rows, [content] if content else _GUESSED, ending, also_single=True).items()
    )
    return (
        f"{path}: rows with the columns {names} are in no known format"
        + (f" of {content}" if content else "")
        + "; map them in the recipe under data.NAME.columns (`vantage schema` describes it)"
        + (
            f". Nearest are{near}"
            if near
            else "".join(f"\n  {name} {_held(rows[0][name])}" for name in rows[0])
        )
    )


def _held(value: object) -> str:
    """Describe the values of a column whose name belongs to no format."""
    if isinstance(value, Mapping):
        return (
            f"holds objects with {', '.join(map(str, value))}; `columns` names a field of them as NAME.FIELD"
        )
    kinds = {
        str: "text",
        bool: "true or false",
        int: "numbers",
        float: "numbers",
        list: "lists",
        bytes: "bytes",
    }
    return f"holds {kinds.get(type(value), 'nothing' if value is None else type(value).__name__)}"


def _inspect(
    source: Data,
    ending: str,
    content: Content,
    found: Mapping[Content, Format],
    first: Sequence[SourceRow],
    rows: Iterator[SourceRow],
) -> tuple[FileInspection, list[tuple[int, Row]]]:
    form = found[content]
    reader = RowReader(source, content, first, ending=ending)
    check, tally = RowCheck(content), _Tally()
    with TemporaryDirectory() as folder:
        made = reader.made(rows, Path(folder))
        while batch := list(islice(made, SLICE_ROWS)):
            _, usable = check.check(reader.table(batch))
            for (number, row), is_usable in zip(batch, usable, strict=True):
                if is_usable and not isinstance(row, Fault):
                    tally.add(number, row)
    reader.refuse_wrong_columns()
    report = check.report()
    if not tally.num_usable:
        raise UnknownData(f"{source.source}: no row can be used as one of {report}")
    before = CONTENTS[: CONTENTS.index(content)]
    readable = [row for row in first if not isinstance(row, Fault)]
    inspection = FileInspection(
        format=form.name,
        content=content,
        also=tuple(each for each in found if each != content),
        columns=form.columns,
        labels={side: tuple(labels) for side, labels in form.labels.items()},
        num_rows=report.num_rows,
        num_usable=tally.num_usable,
        problems=dict(Counter(report.dropped).most_common()),
        first_problems=tuple(map(str, report.first)),
        unread=tuple(
            reader.unread(
                dict.fromkeys(str(name) for row in first if not isinstance(row, Fault) for name in row)
            )
        ),
        nearly=_nearly(readable, [each for each in before if each not in found], ending)
        if content == "prompts"
        else {},
        num_conversations=tally.num_conversations,
        num_prompts=len(tally.prompts),
        prompt_characters=quantiles(tally.prompt_lengths),
        response_characters=quantiles(tally.response_lengths) if tally.response_lengths else None,
        scripts=tally.script_shares(),
        recipe=recipe_text(source, form),
    )
    return inspection, tally.first


class _Tally:
    """Counts over the usable rows so far; mutable."""

    def __init__(self) -> None:
        self.num_usable = self.num_conversations = 0
        self.prompts = DigestSet(8)
        self.prompt_lengths, self.response_lengths = array("Q"), array("Q")
        self._letters: Counter[str] = Counter()
        self.first: list[tuple[int, Row]] = []

    def add(self, number: int, row: Row) -> None:
        """Count a row that can be used."""
        self.num_usable += 1
        self.num_conversations += row["messages"] is not None
        self.prompts.add(_hash(row["prompt"])[:8])
        self.prompt_lengths.append(len(row["prompt"]))
        responses = responses_of(row)
        self.response_lengths.extend(map(len, responses))
        if self.num_usable <= SCRIPT_ROWS:
            for text in (row["prompt"], *responses):
                self._letters.update(script_of(letter) for letter in text if letter.isalpha())
            self.first.append((number, row))

    def script_shares(self) -> dict[str, float]:
        """Return script → share of the letters."""
        total = self._letters.total()
        return {script: count / total for script, count in self._letters.most_common()}


def responses_of(row: Row) -> list[str]:
    """Return all responses of a row."""
    return [str(turn["content"]) for turn in turns_of_responses(row)]


def turns_of_responses(row: Row) -> list[dict[str, str | None]]:
    """Return all responses of a row as turns of the assistant, with their calls of tools and their reasoning."""
    if row.get("responses") is not None:
        return [
            {"role": "assistant", "content": text, "extra": None}
            for text in row["responses"]
            if text is not None
        ]
    return [
        {"role": "assistant", "content": row[column], "extra": row.get(f"{column}_extra")}
        for column in ("response", "chosen", "rejected")
        if row.get(column) is not None
    ]


def quantiles(lengths: Sequence[int]) -> Quantiles:
    """Return the quantiles of at least one length."""
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return Quantiles(
        least=ordered[0], median=ordered[last // 2], most_95=ordered[round(0.95 * last)], most=ordered[last]
    )


@lru_cache(maxsize=1 << 14)
def script_of(letter: str) -> str:
    """Return the script of a letter by the first word of its name in Unicode: ``latin``, ``cjk``, ``cyrillic`` …"""
    return unicodedata.name(letter, "unnamed").partition(" ")[0].lower()


def recipe_text(source: Data, form: Format) -> str:
    """Return the text for a recipe's ``data`` section. It names a folder that ``save_to_disk`` wrote, not its files."""
    named = str(Path(source.source).parent) if is_saved(source.source) else source.source
    entry: dict[str, Any] = {"source": named}
    if source.load is not None:
        entry["load"] = source.load.model_dump(exclude_defaults=True, exclude={"streaming"})
    if not form.is_own:
        entry["columns"] = form.columns
    if form.labels:
        entry["labels"] = {side: list(labels) for side, labels in form.labels.items()}
    text: str = yaml.dump(
        {"data": {_entry_name(Path(named)): entry}}, Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    return text


def _entry_name(source: Path) -> str:
    """Return a name of a dataset that a recipe accepts, made of the source's last part; ``rows`` if it has no such letters."""
    first = re.split(r"[.@]", source.name)[0]
    plain = unicodedata.normalize("NFKD", first).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "_", plain).lstrip("_0123456789")[:63].rstrip("_") or "rows"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines in a single line."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if "\n" in text else None
    ),
)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
