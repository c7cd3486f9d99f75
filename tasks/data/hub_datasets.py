"""Rows of a dataset on the Hugging Face hub: one configuration and one split of it, at one commit.

The library ``datasets`` knows which files these are, and reads Parquet and Arrow; JSON and CSV are read by our own code, since
the library guesses their types by column (docs/decisions/0009). No code of a repository runs. Whether the files are fetched whole
or streamed, the same code reads them, so the rows are the same.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vantage.schemas.recipe.inputs import Load
from vantage.schemas.recipe.sources import HubDataset
from vantage.schemas.source_files import SourceTooLarge, data_format, data_limit
from vantage.tasks.data.hub_files import UnreachableHub
from vantage.tasks.data.source_rows import (
    SourceRow,
    UnreadableFile,
    read_rows_of,
    read_text_rows,
    rows_of_batch,
)

_BATCH_ROWS = 1000
_OWN_READER = ("json", "csv")
"""Formats that the library reads by column."""
_LIBRARY = ("parquet", "arrow")
_DESCRIBE_FILES = ("name", "version", "data_dir", "data_files", "description", "features")
"""Fields of a configuration that do not change how our own reader reads a file."""
_SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class LoadedRows:
    """The rows of a dataset on the hub."""

    ending: str
    """The format of its files: one of ``vantage.schemas.source_files.DATA_FORMATS``."""
    rows: Iterator[SourceRow]


def load_rows(source: HubDataset, load: Load) -> LoadedRows:
    """Return the rows that a recipe loads of a dataset on the hub.

    Raises:
        UnreachableHub: the hub cannot be reached, or has no such dataset, commit, configuration or split; also while the rows
            are read.
        UnreadableFile, SourceTooLarge: as ``vantage.tasks.data.source_rows.read_rows_of``.
    """
    with _explained(source, load):
        builder = _builder(source, load)
        files = _files(builder, source, load)
    ending = data_format(files[0])
    if ending is None or any(data_format(file) != ending for file in files):
        raise UnreadableFile(
            f"{files[0]} and its other files are not of one format that is read here; name files as source: {source}/FILE"
        )
    if _kind_of(builder) in _LIBRARY:
        rows = _by_library(builder, source, load, files)
    else:
        rows = _by_own_reader(source, load, files, ending)
    return LoadedRows(ending, _explaining(source, load, islice(rows, load.max_rows)))


# -- What there is


def _builder(source: HubDataset, load: Load) -> Any:
    """Return the library's reader of the configuration."""
    import datasets  # costs a second, which other data does not pay

    # The library's own cache is not asked: without network it would take the latest commit that it finds there
    with TemporaryDirectory() as empty:
        builder = datasets.load_dataset_builder(
            f"hf://datasets/{source.repository}", load.config, revision=source.revision, cache_dir=empty
        )
    kind = _kind_of(builder)
    if kind not in (*_LIBRARY, *_OWN_READER):
        raise UnreadableFile(
            f"its files are of the format {kind}, and {', '.join((*_LIBRARY, *_OWN_READER))} are read; convert it"
        )
    if kind in _OWN_READER:
        _refuse_options(builder)
    return builder


def _kind_of(builder: Any) -> str:
    """Return the library's name for the format: ``parquet``, ``json`` …"""
    names = (each.__module__.split(".") for each in type(builder).__mro__)
    return next((name[-1] for name in names if name[:2] == ["datasets", "packaged_modules"]), "")


def _refuse_options(builder: Any) -> None:
    """
    Raises:
        UnreadableFile: the configuration says how the library shall read its files, which our own reader does not follow.
    """
    plain = type(builder.config)()
    for each in fields(builder.config):
        found = getattr(builder.config, each.name)
        if each.name not in _DESCRIBE_FILES and found != getattr(plain, each.name):
            raise UnreadableFile(
                f"its configuration sets {each.name}={found!r}, which is not followed here; name its files as "
                "source: hub:ORGANISATION/NAME@COMMIT/FILE, and map their columns"
            )


def _files(builder: Any, source: HubDataset, load: Load) -> list[str]:
    """Return the paths in the repository of the split's files, in the library's order."""
    splits = {str(name): files for name, files in (builder.config.data_files or {}).items()}
    if load.split not in splits:
        raise ValueError(f"there is no split {load.split!r}; there are {', '.join(sorted(splits))}")
    prefix = f"hf://datasets/{source.repository}@{source.revision}/"
    outside = next((file for file in splits[load.split] if not file.startswith(prefix)), None)
    if outside is not None:
        raise ValueError(f"{outside} is no file of the dataset at this commit")
    return [file.removeprefix(prefix) for file in splits[load.split]]


# -- Reading


def _by_library(builder: Any, source: HubDataset, load: Load, files: Sequence[str]) -> Iterator[SourceRow]:
    """Yield the rows of Parquet or Arrow files, a batch in memory."""
    import pyarrow.dataset

    if _kind_of(builder) == "parquet":  # or it reads 32 MiB ahead, whatever is asked for
        builder.config.fragment_scan_options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
    places = [_url(source, file) for file in files] if load.streaming else _fetched(source, files)
    builder.config.data_files = {load.split: list(map(str, places))}
    num_bytes, limit = 0, data_limit()
    for table in builder.as_streaming_dataset(load.split).with_format("arrow").iter(_BATCH_ROWS):
        num_bytes += table.nbytes
        limit.check(str(source), num_bytes)
        for batch in table.to_batches():
            yield from rows_of_batch(batch)


def _by_own_reader(source: HubDataset, load: Load, files: Sequence[str], ending: str) -> Iterator[SourceRow]:
    """Yield the rows of JSON or CSV files."""
    if not load.streaming:
        yield from chain.from_iterable(
            read_rows_of(file, ending, data_limit()) for file in _fetched(source, files)
        )
        return
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem()
    for file in files:
        with hub.open(_url(source, file), "rb") as remote:
            data_limit().check(file, remote.size)
            yield from read_text_rows(io.BufferedReader(remote), file, ending, data_limit())


def _url(source: HubDataset, file: str) -> str:
    return f"hf://datasets/{source.repository}@{source.revision}/{file}"


def _fetched(source: HubDataset, files: Sequence[str]) -> list[Path]:
    """Return the files in the hub's cache."""
    import huggingface_hub

    fetched = [
        Path(
            huggingface_hub.hf_hub_download(
                source.repository, file, repo_type="dataset", revision=source.revision
            )
        )
        for file in files
    ]
    data_limit().check(str(source), sum(file.stat().st_size for file in fetched))
    return fetched


# -- What goes wrong


def _explaining(source: HubDataset, load: Load, rows: Iterator[SourceRow]) -> Iterator[SourceRow]:
    with _explained(source, load):
        yield from rows


@contextmanager
def _explained(source: HubDataset, load: Load) -> Iterator[None]:
    try:
        yield
    except (UnreadableFile, SourceTooLarge):
        raise
    except Exception as error:  # one for every way in which a network or a repository can fail
        shown = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        named = ", ".join(f"{key}: {value}" for key, value in load.model_dump(exclude={"streaming"}).items())
        raise UnreachableHub(
            f"source='{source}' with load: {{{named}}} could not be loaded ({type(error).__name__}: {shown}); check the network, "
            f"the name, load.config and load.split. Without network, name files that the cache (HF_HOME) has: {source}/FILE"
        ) from error
