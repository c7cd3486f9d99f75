"""Check the contents of datasets against what stages read from them."""

from collections.abc import Iterator

from vantage.schemas.checks.partial_recipe import PartialData, PartialRecipe
from vantage.schemas.checks.references import RecipeReferences
from vantage.schemas.problems import Path, Problem
from vantage.schemas.recipe.inputs import Content
from vantage.schemas.steps import missing_columns

Readings = list[tuple[Path, Content]]
"""(Path, content) for each field that reads a dataset."""


def content_problems(recipe: PartialRecipe, references: RecipeReferences) -> Iterator[Problem]:
    """Yield problems of datasets that hold other content than their readers need."""
    for target, readings in _readings(recipe, references).items():
        data = recipe.data[target]
        # Prefer the content that the source is known to hold, else the one that needs more than prompts.
        ranked = sorted(
            readings, key=lambda reading: (reading[1] != data.builtin_content, reading[1] == "prompts")
        )
        path, content = ranked[0]
        for other_path, other in readings:
            if other != content and not (other == "prompts" and content == "demonstrations"):
                message = f"reads as {other} what {'.'.join(map(str, path))} reads as {content}"
                yield Problem(other_path, message, "name the source a second time, as another dataset")
        yield from _source_problems(target, data, path, content)


def _readings(recipe: PartialRecipe, references: RecipeReferences) -> dict[str, Readings]:
    """Return dataset → the fields that read it; a field that only keeps its prompts out of others reads prompts."""
    readings: dict[str, Readings] = {}
    for name, named in references.data.items():
        kind = recipe.stages[name].kind
        if kind is None:
            continue
        for reference in named:
            for part in recipe.datasets.get(reference.name, ()):
                if part in recipe.data:
                    readings.setdefault(part, []).append((reference.path, kind.data[reference.field]))
    kept_apart = [(each.path, each.name) for named in references.held_out.values() for each in named]
    kept_apart += [
        (("data", name, "split", "test"), name) for name, data in recipe.data.items() if data.is_test_set
    ]
    for path, other in kept_apart:
        if other in recipe.data:  # if stages read it, their fields decide its content
            readings.setdefault(other, [(path, "prompts")])
    return readings


def _source_problems(name: str, data: PartialData, reader: Path, content: Content) -> Iterator[Problem]:
    """Yield columns that the reader needs and that the dataset's source or columns lack."""
    known_content = data.builtin_content
    if known_content is not None and content not in (known_content, "prompts"):
        message = f"reads {content}, but {data.source} holds {known_content}"
        yield Problem(reader, message, "name another dataset here")
    if content == "rankings" and data.source is not None and data.source.lower().endswith(".csv"):
        message = "rankings are lists of responses and ranks, and a .csv file has no lists"
        yield Problem(("data", name, "source"), message, "use .json, .jsonl or .parquet")
    if known_content is not None and data.has_columns:
        yield Problem(("data", name, "columns"), f"{data.source} has our columns already", "remove columns")
    elif data.columns:
        missing = missing_columns(content, set(data.columns))
        if missing:
            message = f"has no {' and no '.join(missing)}, which {'.'.join(map(str, reader))} reads"
            yield Problem(("data", name, "columns"), message, f"add `{missing[0]}: COLUMN`")
