"""Read rows of a dataset on the Hugging Face hub: one configuration and one split of it, at one commit.

The library ``datasets`` knows which configurations and splits there are and which files they are; our own code reads the files, row
by row (docs/decisions/0048). No code of a repository runs. Whether files are fetched whole or streamed, the same code reads
them, so the rows are the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

from vantage.schemas.recipe.inputs import Load
from vantage.schemas.recipe.sources import HubDataset
from vantage.schemas.source_files import SourceTooLarge, data_format, data_limit
from vantage.tasks.data.hub_files import UnreachableHub
from vantage.tasks.data.row_faults import SourceRow, UnreadableFile
from vantage.tasks.data.source_rows import read_rows_of, read_rows_of_open

_FORMATS = ("parquet", "arrow", "json", "csv")
"""The library's names for the formats that are read. Others are refused before the library opens a file."""
_NO_MATTER = {
    *("name", "version", "data_dir", "data_files", "description", "features"),
    *("batch_size", "chunksize", "block_size", "use_threads"),
}
"""Settings of a configuration that change no row here, since types come from the file, and the recipe maps them."""
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
        files = _files(source, load)
    ending = data_format(files[0])
    if ending is None or any(data_format(file) != ending for file in files):
        raise UnreadableFile(
            f"{files[0]} and its other files are not of one format that is read here; name files as source: {source}/FILE"
        )
    read = _streamed if load.streaming else _fetched
    return LoadedRows(
        ending, _explaining(source, load, islice(read(source, load, files, ending), load.max_rows))
    )


# -- What there is


def _files(source: HubDataset, load: Load) -> list[str]:
    """Return the paths in the repository of the split's files, in the library's order."""
    import datasets  # takes half a second, which other data need not wait for

    # The library's own cache is not asked: without network it would take the latest commit that it finds there
    with TemporaryDirectory() as empty:
        builder = datasets.load_dataset_builder(
            f"hf://datasets/{source.repository}", load.config, revision=source.revision, cache_dir=empty
        )
    _refuse_other_readers(builder)
    splits = {str(name): files for name, files in (builder.config.data_files or {}).items()}
    if load.split not in splits:
        raise ValueError(f"there is no split {load.split!r}; there are {', '.join(sorted(splits))}")
    prefix = _url(source, "")
    outside = next((file for file in splits[load.split] if not file.startswith(prefix)), None)
    if outside is not None:
        raise ValueError(f"{outside} is no file of the dataset at this commit")
    return [file.removeprefix(prefix) for file in splits[load.split]]


def _refuse_other_readers(builder: Any) -> None:
    """Refuse a dataset whose files this module would read in another way than the library.

    Raises:
        UnreadableFile: the files are of a format that is not read here, or the configuration sets how they shall be read.
    """
    names = (each.__module__.split(".") for each in type(builder).__mro__)
    kind = next((name[-1] for name in names if name[:2] == ["datasets", "packaged_modules"]), "")
    if kind not in _FORMATS:
        raise UnreadableFile(
            f"its files are of the format {kind}, and {', '.join(_FORMATS)} are read; convert it"
        )
    plain = type(builder.config)()
    for each in fields(builder.config):
        found = getattr(builder.config, each.name)
        if each.name not in _NO_MATTER and found != getattr(plain, each.name):
            raise UnreadableFile(
                f"its configuration sets {each.name}={found!r}, which is not followed here; name its files as "
                "source: hub:ORGANISATION/NAME@COMMIT/FILE, and map their columns"
            )


# -- Reading


def _streamed(source: HubDataset, load: Load, files: Sequence[str], ending: str) -> Iterator[SourceRow]:
    from huggingface_hub import HfFileSystem

    hub, limit, num_bytes = HfFileSystem(), data_limit(), 0
    for file in files:
        with hub.open(_url(source, file), "rb") as remote:
            num_bytes += remote.size
            if load.max_rows is None:  # with max_rows no more than these rows is read
                limit.check(str(source), num_bytes)
            yield from read_rows_of_open(cast(BinaryIO, remote), file, ending, limit)


def _fetched(source: HubDataset, load: Load, files: Sequence[str], ending: str) -> Iterator[SourceRow]:
    import huggingface_hub

    here = [
        Path(
            huggingface_hub.hf_hub_download(
                source.repository, file, repo_type="dataset", revision=source.revision
            )
        )
        for file in files
    ]
    limit = data_limit()
    limit.check(str(source), sum(file.stat().st_size for file in here))
    yield from chain.from_iterable(read_rows_of(file, ending, limit) for file in here)


def _url(source: HubDataset, file: str) -> str:
    return f"hf://datasets/{source.repository}@{source.revision}/{file}"


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
    except Exception as error:
        # the library raises another type for each way in which a network or a repository can fail
        shown = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        named = ", ".join(f"{key}: {value}" for key, value in load.model_dump(exclude={"streaming"}).items())
        raise UnreachableHub(
            f"source='{source}' with load: {{{named}}} could not be loaded ({type(error).__name__}: {shown}); check the network, "
            f"the name, load.config and load.split. Without network, name files that the cache (HF_HOME) has: {source}/FILE"
        ) from error
