"""Count the rows of a dataset and their tokens, without the stages' own tokenizer.

Lengths are those of the first ``SAMPLED_ROWS`` rows. The number of rows of a large file is estimated from the bytes of
these. Tokens are counted by the model's ``tokenizer.json``, or as UTF-8 bytes / ``BYTES_PER_TOKEN`` if there is none.
Tokens of the chat template are not counted. Texts of a missing file are assumed to be as long as the recipe's limits
allow.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from vantage.schemas.recipe.inputs import Content, Data, Mixture, Shares
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.sources import Builtin
from vantage.schemas.splits import shares_of
from vantage.schemas.steps import CONTENT_COLUMNS, content_of

SAMPLED_ROWS = 1000
COUNTED_BYTES = 2**24
"""Bytes of the largest file whose rows are all counted. The rows of a larger one are estimated from the bytes of the
first rows."""
BYTES_PER_TOKEN = 4
"""Approximate bytes of a token in English prose; other languages have fewer."""

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Lengths:
    """Tokens of the sampled sequences, shortest first."""

    tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.tokens[-1]

    def longest_of(self, count: float) -> float:
        """Return the expected length of the longest of ``count`` sequences drawn with replacement.

        Σ l_k · ((k/n)^count − ((k−1)/n)^count) over the n sorted lengths.
        """
        n = len(self.tokens)
        weights = [math.pow(k / n, count) - math.pow((k - 1) / n, count) for k in range(1, n + 1)]
        return sum(length * weight for length, weight in zip(self.tokens, weights, strict=True))


@dataclass(frozen=True)
class DataCount:
    """Size of a dataset, known before it is prepared."""

    train: int
    validation: int
    test: int
    prompt: Lengths
    responses: tuple[Lengths, ...]
    """Lengths of the column ``response``; or of ``chosen`` and ``rejected``; or of all ranked responses; empty for prompts."""
    whole: Lengths
    """A prompt with its longest response."""
    responses_per_row: float
    basis: str
    """Source of the numbers."""


@dataclass(frozen=True)
class _Rows:
    """The first rows in our columns, and the number of all rows."""

    rows: Sequence[Mapping[str, Any]]
    total: int
    basis: str


def count_data(recipe: Recipe, name: str, count: CountTokens, *, counted_by: str) -> DataCount:
    """Return rows and lengths of ``data.NAME``.

    Raises:
        ValueError: the file is missing and the recipe does not contain the number of training rows.
    """
    data, content = recipe.data[name], content_of(recipe, name)
    limits = recipe.generation
    found = _read(data, content, shares_of(recipe))
    if found is None:
        return _from_limits(recipe, name, content)
    sampled: list[tuple[int, list[int]]] = []
    for row in found.rows:
        prompt = (
            count(str(row["prompt"])) + 1
        )  # the token that begins a sequence; a response has one that ends it
        if prompt <= limits.max_prompt_tokens:
            texts = _texts(row, content)
            sampled.append((prompt, [min(count(text) + 1, limits.max_response_tokens) for text in texts]))
    if not sampled:
        raise ValueError(
            f"data.{name}: no prompt among the first {len(found.rows)} rows has at most "
            f"generation.max_prompt_tokens={limits.max_prompt_tokens} tokens; raise it"
        )
    share = len(sampled) / len(found.rows)
    basis = f"{found.basis}, tokens counted {counted_by}"
    return _counted(data, shares_of(recipe), round(found.total * share), sampled, content, basis)


def collected_pairs(prompts: DataCount, sampled: Lengths) -> DataCount:
    """Return the preferences that a stage collects: a pair of sampled responses for each prompt."""
    return replace(
        prompts,
        responses=(sampled, sampled),
        whole=Lengths(tuple(round(prompts.prompt.mean) + length for length in sampled.tokens)),
        responses_per_row=2.0,
        basis=f"one pair for each prompt of {prompts.basis}",
    )


def mixed(mixture: Mixture, parts: Sequence[DataCount], content: Content) -> DataCount:
    """Return rows and lengths of a mixture; each part's lengths occur as often as its share requires."""
    from vantage.tasks.mix_data import most_without_repeats

    weights = [weight / sum(mixture.parts.values()) for weight in mixture.parts.values()]

    def rows(side: str, asked: int | None) -> int:
        return asked or most_without_repeats([getattr(part, side) for part in parts], weights)

    def lengths(of_parts: Iterable[Lengths]) -> Lengths:
        return _sorted(
            found.tokens[i * len(found.tokens) // number]
            for found, weight in zip(of_parts, weights, strict=True)
            for number in [max(1, round(weight * SAMPLED_ROWS))]
            for i in range(number)
        )

    columns = 0 if content == "prompts" else min(len(part.responses) for part in parts)
    return DataCount(
        train=rows("train", mixture.rows),
        validation=rows("validation", mixture.split.validation),
        test=rows("test", mixture.split.test),
        prompt=lengths(part.prompt for part in parts),
        responses=tuple(lengths(part.responses[column] for part in parts) for column in range(columns)),
        whole=lengths(part.whole if columns else part.prompt for part in parts),
        responses_per_row=sum(w * part.responses_per_row for w, part in zip(weights, parts, strict=True)),
        basis="a mixture of " + "; ".join(part.basis for part in parts),
    )


def _counted(
    data: Data,
    shares: Shares,
    total: int,
    sampled: Sequence[tuple[int, list[int]]],
    content: Content,
    basis: str,
) -> DataCount:
    train, validation, test = _sides(data, shares, total)
    columns = [*zip(*(responses for _, responses in sampled), strict=False)] if content != "rankings" else []
    if content == "rankings":
        columns = [tuple(length for _, responses in sampled for length in responses)]
    return DataCount(
        train=train,
        validation=validation,
        test=test,
        prompt=_sorted(prompt for prompt, _ in sampled),
        responses=tuple(_sorted(column) for column in columns),
        whole=_sorted(prompt + max(responses, default=0) for prompt, responses in sampled),
        responses_per_row=sum(len(responses) for _, responses in sampled) / len(sampled),
        basis=basis,
    )


def _sorted(lengths: Any) -> Lengths:
    return Lengths(tuple(sorted(lengths)))


def _sides(data: Data, shares: Shares, total: int) -> tuple[int, int, int]:
    """Return the number of rows for training, validation and test, of ``total`` rows."""
    if data.is_test_set:
        return 0, 0, total
    is_builtin_prompts = isinstance(data.origin, Builtin) and data.origin.kind == "prompts"
    train = total if is_builtin_prompts else round(total * (1 - shares.validation - shares.test))
    return (
        max(1, train if data.rows is None else min(train, data.rows)),
        _held_out(data, shares, "validation", total),
        _held_out(data, shares, "test", total),
    )


def _held_out(data: Data, shares: Shares, side: str, total: int) -> int:
    size = getattr(data.split, side)
    return size if isinstance(size, int) else max(1, round(getattr(shares, side) * total))


def _from_limits(recipe: Recipe, name: str, content: Content) -> DataCount:
    data, limits = recipe.data[name], recipe.generation
    most = None if data.load is None else data.load.max_rows
    if data.rows is None and most is None:
        raise ValueError(
            f"data.{name}.source={data.source!r} is not a file here, so its rows cannot be counted; "
            f"say how many there are with --set data.{name}.rows=N"
        )
    num_responses = len(_text_columns(content)) if content != "rankings" else 2
    sampled = [(limits.max_prompt_tokens, [limits.max_response_tokens] * num_responses)]
    shares = shares_of(recipe)
    asked = None if data.rows is None else round(data.rows / (1 - shares.validation - shares.test))
    total = min(rows for rows in (asked, most) if rows is not None)
    said = min(rows for rows in (data.rows, most) if rows is not None)
    basis = f"{data.source} is not here: {said:,} rows as the recipe says, all as long as its limits"
    return _counted(data, shares, total, sampled, content, basis)


def _texts(row: Mapping[str, Any], content: Content) -> list[str]:
    if content == "rankings":
        return [str(text) for text in row["responses"] or []]
    return [str(row[column]) for column in _text_columns(content)]


def _text_columns(content: Content) -> tuple[str, ...]:
    """Return the columns of a content that hold a response each."""
    return tuple(column for column in CONTENT_COLUMNS[content][1:] if column != "label")


def _read(data: Data, content: Content, shares: Shares) -> _Rows | None:
    """Return the first rows; None if there is no such file."""
    if isinstance(data.origin, Builtin):
        return _builtin(data, shares)
    from vantage.schemas.source_files import files_of

    files = files_of(data.source)
    if not files or not files[0].is_file():
        return None
    first = _file(data, content, files[0])
    if len(files) == 1:
        return first
    sizes = [file.stat().st_size for file in files]
    total = round(first.total * sum(sizes) / sizes[0])
    return replace(first, total=total, basis=f"{first.basis}; {len(files)} files, by their sizes")


def _builtin(data: Data, shares: Shares) -> _Rows:
    from vantage.tasks.data import arithmetic

    origin = data.origin
    assert isinstance(origin, Builtin)
    dial = arithmetic.DIALS.get(origin.name)
    if dial is None or origin.kind not in ("demonstrations", "preferences", "labelled_responses", "prompts"):
        raise ValueError(f"data.source={data.source!r} is not built in; `vantage plan` names what there is")
    total = data.rows or arithmetic.BUILTIN_ROWS
    rows = _generated(origin.name, origin.kind, min(SAMPLED_ROWS, total))
    return _Rows(rows, total, f"{total:,} generated rows")


@lru_cache(maxsize=32)
def _generated(name: str, kind: str, count: int) -> Sequence[Mapping[str, Any]]:
    """Return the first rows of built-in data; several datasets and estimates of one process read the same ones."""
    from vantage.tasks.data import arithmetic

    draw = {
        "preferences": arithmetic.preferences,
        "labelled_responses": arithmetic.labelled_responses,
    }.get(kind, arithmetic.demonstrations)
    return tuple(draw(seed=0, count=count, dial=arithmetic.DIALS[name]))


def _file(data: Data, content: Content, path: Path) -> _Rows:
    from vantage.tasks.data.row_faults import UnreadableFile

    try:
        return _measured(data, content, path)
    except UnreadableFile as error:
        raise ValueError(
            f"data.source={data.source!r}: {path.name} cannot be read ({error}); correct the file"
        ) from error


def _measured(data: Data, content: Content, path: Path) -> _Rows:
    from vantage.schemas.source_files import data_format, data_limit
    from vantage.tasks.data.row_faults import Fault
    from vantage.tasks.data.row_reader import reader_of
    from vantage.tasks.data.source_rows import read_rows_of

    ending = data_format(path)
    if ending is None:
        raise ValueError(f"data.source={data.source!r} has no ending of a data file; rename or convert it")
    wanted = CONTENT_COLUMNS[content]
    reader, stream = reader_of(data, content, read_rows_of(path, ending, data_limit()))
    rows, size, read = [], 0, 0
    for row in islice(stream, SAMPLED_ROWS):
        read += 1
        if isinstance(row, Fault):
            continue
        size += _bytes_of(row, ending)
        mapped = reader.read(row)
        if not isinstance(mapped, Fault) and all(
            mapped[column] or mapped[column] is False for column in wanted
        ):
            rows.append(mapped)
    reader.refuse_wrong_columns()
    if not rows:
        raise ValueError(
            f"data.source={data.source!r}: none of its first {read} rows can be used; `vantage data inspect {path}` shows why"
        )
    total, how = _total(path, ending, stream, read, size)
    return _Rows(rows, round(total * len(rows) / read), f"{how} of {path.name}, the first {read:,} measured")


def _bytes_of(row: Mapping[str, Any], ending: str) -> int:
    """Return the approximate bytes of the row in the file, including the end of its line."""
    if ending.startswith(".csv"):
        return sum(len(str(value).encode()) + 1 for value in row.values())
    return len(json.dumps(dict(row), ensure_ascii=False, default=str).encode()) + 1


def _total(path: Path, ending: str, stream: Iterator[Any], read: int, size: int) -> tuple[int, str]:
    """Return the number of rows of the file, and how they were counted: all of them, or by the bytes of the first
    ones."""
    from vantage.schemas.source_files import PACKINGS

    is_short = read < SAMPLED_ROWS or path.stat().st_size <= COUNTED_BYTES
    if is_short or ending.endswith((*PACKINGS, ".arrow")):
        total = read + sum(1 for _ in stream)
        return total, f"{total:,} rows"
    if ending == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            return file.metadata.num_rows, f"{file.metadata.num_rows:,} rows"
    total = max(read, round(path.stat().st_size * read / size))
    return total, f"about {total:,} rows by the bytes"


def token_counter(folder: Path | None, *, is_character_model: bool) -> tuple[CountTokens, str]:
    """Return a function that counts the tokens of a text without special tokens, and its name."""
    if is_character_model:
        return len, "one per character"
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return lambda text: -(-len(text.encode()) // BYTES_PER_TOKEN), f"one per {BYTES_PER_TOKEN} bytes"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), "by the model's tokenizer"
