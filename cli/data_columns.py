"""Find which columns of a file hold prompts, responses and so on, by the rules of data preparation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from vantage.schemas.recipe.inputs import Content, Data
from vantage.schemas.source_files import PLAIN_FORMATS, data_format, data_limit
from vantage.schemas.steps import CONTENT_COLUMNS


@dataclass(frozen=True)
class FoundColumns:
    """Columns of a file, and its first rows."""

    columns: Mapping[str, str]
    """Our column → a column of the file, or a template; empty: the file uses our names."""
    rows: Sequence[Mapping[str, Any]]
    """The first rows in our columns."""
    is_all: bool
    """Whether the file has no other rows."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Verdict (``first``, ``second``, ``tie``) → the file's labels for it; empty: the usual words."""


def find_columns(file: Path, content: Content, *, needs_answers: bool = False) -> FoundColumns:
    """Return the columns that hold the content, and the file's first rows.

    Args:
        needs_answers: require a reference answer with each prompt.

    Raises:
        ValueError: the file cannot be read, or has no known format; the message names its columns.
    """
    from vantage.tasks.data.formats import SAMPLE_ROWS, recognise
    from vantage.tasks.data.row_faults import Fault, UnreadableFile
    from vantage.tasks.data.row_reader import RowReader
    from vantage.tasks.data.source_rows import read_rows_of

    ending = data_format(str(file))
    if ending is None or not file.is_file():
        raise ValueError(f"{file} is no {', '.join(PLAIN_FORMATS)} file; give one")
    try:
        read = list(islice(read_rows_of(file, ending, data_limit()), SAMPLE_ROWS + 1))
    except UnreadableFile as error:
        raise ValueError(
            f"{file} cannot be read as {ending} ({error}); correct it, or give another file"
        ) from error
    first = [row for row in read[:SAMPLE_ROWS] if not isinstance(row, Fault)]
    if not first:
        raise ValueError(f"{file} has no row that can be read; look at it, or give another file")
    found = recognise(first, content, is_text=ending.startswith(".csv"))
    if found is None or (needs_answers and "answer" not in found.columns):
        wanted = ", ".join((*CONTENT_COLUMNS[content], *(("answer",) if needs_answers else ())))
        raise ValueError(
            f"{file}: none of its columns ({', '.join(sorted(first[0]))}) are known as {wanted} of {content}; write the "
            "recipe with another file, and map this one in data.*.columns"
        )
    data = Data.model_validate(
        {"source": str(file), "columns": found.columns, "labels": found.labels or None}
    )
    reader = RowReader(data, content, first)
    rows = [row for row in map(reader.read, first) if not isinstance(row, Fault)]
    is_own = found.is_own and not needs_answers
    return FoundColumns({} if is_own else found.columns, rows, len(read) <= SAMPLE_ROWS, found.labels)


def check_builtin(source: str, content: Content) -> None:
    """Refuse a name that no built-in data of this content has.

    Raises:
        ValueError: there is no such built-in data, or it holds other content.
    """
    from vantage.schemas.loading.source_paths import BUILTIN_DATA
    from vantage.schemas.problems import suggest

    if source not in BUILTIN_DATA:
        raise ValueError(f"--{content}={source} is no built-in data; {suggest(source, BUILTIN_DATA)}")
    name, _, kind = source.partition("/")
    if kind != content:
        raise ValueError(f"--{content}={source} holds {kind}; give {name}/{content}, or a file")


def builtin_rows(name: str, content: Content) -> list[Mapping[str, Any]]:
    """Return the first rows of built-in data, from which lengths are measured; prompts come with a response."""
    from vantage.tasks.data import arithmetic
    from vantage.tasks.data.formats import SAMPLE_ROWS

    draw = arithmetic.preferences if content == "preferences" else arithmetic.demonstrations
    return list(draw(seed=0, count=SAMPLE_ROWS, dial=arithmetic.DIALS[name]))
