"""The parts of a recipe as it was written, for checks that run even where other fields are invalid.

Values of the wrong shape are skipped: pydantic refuses them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vantage.schemas.kinds import STAGES
from vantage.schemas.problems import Path
from vantage.schemas.recipe.sources import Builtin, FileSource, file_source
from vantage.schemas.recipe.terms import TERMS
from vantage.schemas.steps import CONTENT_COLUMNS, JUDGES

Plain = Mapping[str, Any]


def mapping_of(value: Any) -> Plain:
    """Return the value, if it is a mapping; else an empty one."""
    return value if isinstance(value, Mapping) else {}


def is_in(named: Plain, name: Any) -> bool:
    """Return whether a name, if it is one, stands in a section."""
    return isinstance(name, str) and name in named


def items_of(value: Any) -> list[Any]:
    """Return the items of a list; of a single value, that value."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def stages_of(plain: Plain) -> dict[str, Plain]:
    """Stage → its fields."""
    stages = mapping_of(plain.get("stages"))
    return {name: stage for name, stage in stages.items() if isinstance(stage, Mapping)}


def kinds_of(plain: Plain) -> dict[str, str]:
    """Stage → kind, for the stages with a known kind."""
    kinds = {name: stage.get("kind") for name, stage in stages_of(plain).items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, str) and kind in STAGES}


def terms_of(plain: Plain) -> Iterator[tuple[str, Path, Plain]]:
    """Reward, path and value of every reward's terms."""
    for reward, definition in mapping_of(plain.get("rewards")).items():
        for i, term in enumerate(items_of(mapping_of(definition).get("terms"))):
            yield reward, ("rewards", reward, "terms", i), mapping_of(term)


def fields_that_name(what: str) -> list[str]:
    """Return fields of a reward term that name a ``what``."""
    return [kind.field for kind in TERMS if kind.names == what]


def rewards_read(name: str, stage: Plain) -> Iterator[tuple[Path, str]]:
    """Yield (Path, reward) for each reward that a stage names."""
    kind = stage.get("kind")
    fields = STAGES[kind].work.model_fields if isinstance(kind, str) and kind in STAGES else {}
    reward = stage.get("reward")
    if isinstance(reward, str) and "reward" in fields:
        yield ("stages", name, "reward"), reward
    for field in JUDGES:
        judge = mapping_of(stage.get(field)).get("reward")
        if isinstance(judge, str) and field in fields:
            yield ("stages", name, field, "reward"), judge


def datasets_of(plain: Plain) -> dict[str, tuple[str, ...]]:
    """Dataset or mixture → the datasets of which its rows are."""
    mixtures = mapping_of(plain.get("mixtures"))
    parts = {name: tuple(mapping_of(mapping_of(mixture).get("parts"))) for name, mixture in mixtures.items()}
    return {**parts, **{name: (name,) for name in mapping_of(plain.get("data"))}}


def builtin_content(data: Plain) -> str | None:
    """Return what a built-in dataset holds; None: it is another source."""
    origin = origin_of(data)
    known_content = origin.kind if isinstance(origin, Builtin) else None
    return known_content if known_content in CONTENT_COLUMNS else None


def origin_of(data: Plain) -> FileSource | None:
    """Return what a dataset's ``source`` names."""
    source = data.get("source")
    return file_source(source) if isinstance(source, str) else None
