"""Names of columns as a file spells them: in capitals, with spaces or hyphens."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from vantage.tasks.data.columns import RowMapper, is_pattern


def spelt_as_in(
    columns: Mapping[str, str], names: Collection[str], *, may_differ: bool
) -> dict[str, str] | None:
    """Return a mapping with the names of the file; None: the file lacks one of them.

    Args:
        columns: our column → a name, a path or a template.
        names: what the file's columns are called. Of a path, only its first name is asked for.
        may_differ: take ``Response A`` for ``response_a``, where no other column is spelt so.
    """
    plain: dict[str, list[str]] = {}
    for name in names if may_differ else ():
        plain.setdefault(_plain(name), []).append(name)
    spelt = {}
    for ours, spec in columns.items():
        for path in RowMapper({ours: spec}).paths():
            first = path.partition(".")[0]
            if _has(names, path, first):
                continue
            others = plain.get(first, [])
            if len(others) != 1:
                return None
            spec = spec.replace(first, others[0], 1)
        spelt[ours] = spec
    return spelt


def _has(names: Collection[str], path: str, first: str) -> bool:
    return (
        path in names
        or first in names
        or (is_pattern(first) and any(fnmatchcase(name, first) for name in names))
    )


def _plain(name: str) -> str:
    return name.strip().casefold().replace(" ", "_").replace("-", "_")
