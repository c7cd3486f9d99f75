"""Find the files of a data source: local ones, or those of a dataset's repository on the Hugging Face hub at one commit.

A repository's files are read as files, and its loading script, where it has one, is never run. They lie in the hub's own
cache (`HF_HOME`), from which they are read again without the network.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from vantage.schemas.recipe.sources import HubFiles, data_source
from vantage.schemas.source_files import files_of

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")


class UnreachableHub(ValueError):
    """Files of a repository are not in the cache, and could not be fetched."""


def source_files(source: str) -> list[Path]:
    """Return the files that the source names, in the order of their names; those of the hub are fetched where they are missing.

    Raises:
        UnreachableHub: the hub cannot be reached, or has no such repository, commit or file.
    """
    origin = data_source(source)
    return hub_files(origin) if isinstance(origin, HubFiles) else files_of(source)


def hub_files(source: HubFiles) -> list[Path]:
    """Return the files of a repository, in the cache. Raises as ``source_files``."""
    import huggingface_hub  # takes half a second, which other data need not wait for

    repository, commit = source.repository, source.revision
    try:
        return [
            Path(huggingface_hub.hf_hub_download(repository, name, repo_type="dataset", revision=commit))
            for name in _names(source)
        ]
    except (
        Exception
    ) as error:  # the hub's client raises another type for each way in which a network can fail
        first_line = (str(error).splitlines() or [""])[0]
        raise UnreachableHub(
            f"source='{source}' is not in the cache and could not be fetched ({type(error).__name__}: {first_line}); check the "
            f"network and the name, or fetch it with `hf download --repo-type dataset {repository} --revision {commit}` into "
            "the cache of this machine (HF_HOME); or name files of your own"
        ) from error


def _names(source: HubFiles) -> list[str]:
    """Return the names in the repository that the source matches, in their order."""
    import huggingface_hub

    if not source.has_wildcards:
        return [source.files]
    cached = matching(source, _cached(source))
    if are_all(cached):
        return cached
    # Other files of the name may be missing in the cache, so only the hub can list them
    listed = huggingface_hub.HfApi().list_repo_files(
        source.repository, repo_type="dataset", revision=source.revision
    )
    return matching(source, listed)


def _cached(source: HubFiles) -> list[str]:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            source.repository, repo_type="dataset", revision=source.revision, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return []
    return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]


def matching(source: HubFiles, names: Sequence[str]) -> list[str]:
    """Return the names in the source's folder whose last part it matches, in their order."""
    wanted = PurePosixPath(source.files)
    return sorted(
        name
        for name in names
        if PurePosixPath(name).parent == wanted.parent and fnmatchcase(PurePosixPath(name).name, wanted.name)
    )


def are_all(names: Sequence[str]) -> bool:
    """Return whether the names themselves show that none is missing: ``train-00000-of-00002.parquet`` and ``-00001-of-``."""
    parts: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            return False
        parts.setdefault((found[1], found[3], found[4]), set()).add(int(found[2]))
    return bool(parts) and all(numbers == set(range(int(of))) for (_, of, _), numbers in parts.items())
