"""Find names of columns in a file's own spelling: in capitals, with spaces or hyphens."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from vantage.tasks.data.columns import RowMapper, is_pattern


class Spellings:
    """The names of a file's columns; the spelling of each name, path or template is looked up once."""

    def __init__(self, names: Collection[str]) -> None:
        """
        Args:
            names: names of the file's columns. Only the first name of a path is looked up.
        """
        self.names = names
        self._plain: dict[str, list[str]] = {}
        for name in names:
            self._plain.setdefault(_plain(name), []).append(name)
        self._spelt: dict[tuple[str, bool], str | None] = {}

    def of(self, columns: Mapping[str, str], *, may_differ: bool) -> dict[str, str] | None:
        """Return a mapping with the names of the file; None: the file lacks one of them.

        Args:
            columns: our column → a name, a path or a template.
            may_differ: accept ``Response A`` for ``response_a``, if only one column has such a spelling.
        """
        spelt = {}
        for ours, spec in columns.items():
            found = self._of_one(spec, may_differ=may_differ)
            if found is None:
                return None
            spelt[ours] = found
        return spelt

    def present(self, specs: Iterable[str]) -> list[str]:
        """Return the names that the file has in any spelling."""
        return [spec for spec in specs if self._of_one(spec, may_differ=True) is not None]

    def present_pairs(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the pairs of names of which the file has both, in any spelling."""
        return [pair for pair in pairs if len(self.present(pair)) == 2]

    def _of_one(self, spec: str, *, may_differ: bool) -> str | None:
        if (spec, may_differ) not in self._spelt:
            self._spelt[spec, may_differ] = self._find(spec, may_differ=may_differ)
        return self._spelt[spec, may_differ]

    def _find(self, spec: str, *, may_differ: bool) -> str | None:
        for path in RowMapper({"": spec}).paths():
            first = path.partition(".")[0]
            if _has(self.names, path, first):
                continue
            others = self._plain.get(first, []) if may_differ else []
            if len(others) != 1:
                return None
            spec = spec.replace(first, others[0], 1)
        return spec


def _has(names: Collection[str], path: str, first: str) -> bool:
    return (
        path in names
        or first in names
        or (is_pattern(first) and any(fnmatchcase(name, first) for name in names))
    )


def _plain(name: str) -> str:
    return name.strip().casefold().replace(" ", "_").replace("-", "_")
