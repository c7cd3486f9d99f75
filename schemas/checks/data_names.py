"""Checks of the datasets and mixtures that a recipe names, and of what stages read from them."""

from collections.abc import Iterator, Mapping

from vantage.schemas.checks.kept_apart import held_out_of, is_test_set
from vantage.schemas.checks.plain_recipe import (
    Plain,
    builtin_content,
    datasets_of,
    is_in,
    kinds_of,
    mapping_of,
    stages_of,
)
from vantage.schemas.checks.stage_names import stage_named
from vantage.schemas.kinds import STAGES, kinds_collecting
from vantage.schemas.problems import Path, Problem, quote, suggest
from vantage.schemas.recipe.inputs import Content
from vantage.schemas.steps import missing_columns


def data_references(plain: Plain) -> Iterator[Problem]:
    """Datasets that are not there, or hold something else than what reads them needs."""
    data, stages, datasets = mapping_of(plain.get("data")), stages_of(plain), datasets_of(plain)
    yield from _parts(plain)
    readers: dict[str, list[tuple[Path, Content]]] = {}
    for name, kind in kinds_of(plain).items():
        for field, content in STAGES[kind].data.items():
            target, field_path = stages[name].get(field), ("stages", name, field)
            collectors = kinds_collecting(content)
            if collectors and is_in(stages, target) and not is_in(datasets, target):
                yield from stage_named(plain, field_path, target, collectors)
            elif isinstance(target, str) and target in datasets:
                for part in filter(data.__contains__, datasets[target]):
                    readers.setdefault(part, []).append((field_path, content))
            elif isinstance(target, str):
                known = [*datasets, *(each for each, of in kinds_of(plain).items() if of in collectors)]
                remedy = suggest(target, known) or "define it under data"
                yield Problem(field_path, f"no dataset is called {quote(target)}", remedy)
    kept_apart = [(path, other) for path, _, other in held_out_of(plain)]
    kept_apart += [(("data", name, "split", "test"), name) for name in data if is_test_set(plain, name)]
    for path, other in kept_apart:
        if other in data:  # of those that stages read, these are their content
            readers.setdefault(other, [(path, "prompts")])
    for target, uses in readers.items():
        known_content = builtin_content(mapping_of(data[target]))
        # Prefer the content that the source is known to hold, else the one that needs more than prompts.
        ranked = sorted(uses, key=lambda reading: (reading[1] != known_content, reading[1] == "prompts"))
        path, content = ranked[0]
        for other_path, other in uses:
            if other != content and not (other == "prompts" and content == "demonstrations"):
                message = f"reads as {other} what {'.'.join(map(str, path))} reads as {content}"
                yield Problem(other_path, message, "name the source a second time, as another dataset")
        yield from _source_problems(target, mapping_of(data[target]), path, content)


def _parts(plain: Plain) -> Iterator[Problem]:
    """Parts of mixtures that are no datasets with a source."""
    data, mixtures = mapping_of(plain.get("data")), mapping_of(plain.get("mixtures"))
    for name, mixture in mixtures.items():
        for part in mapping_of(mapping_of(mixture).get("parts")):
            path = ("mixtures", name, "parts", part)
            if part in data or not isinstance(part, str):
                continue
            if part in mixtures:
                message = f"'{part}' is this mixture itself" if part == name else f"'{part}' is a mixture too"
                yield Problem(path, message, "name datasets here, each with its weight")
            elif part in stages_of(plain):
                message = f"'{part}' is a stage; a part of a mixture is a dataset under data"
                yield Problem(path, message, "name a dataset")
            else:
                remedy = suggest(part, data) or "define it under data"
                yield Problem(path, f"no dataset is called {quote(part)}", remedy)


def _source_problems(name: str, data: Plain, reader: Path, content: Content) -> Iterator[Problem]:
    """Find what the reader needs and the dataset's source or columns do not have."""
    source, columns, known_content = data.get("source"), data.get("columns"), builtin_content(data)
    if known_content is not None and content not in (known_content, "prompts"):
        yield Problem(
            reader, f"reads {content}, but {source} holds {known_content}", "name another dataset here"
        )
    if content == "rankings" and isinstance(source, str) and source.lower().endswith(".csv"):
        message = "rankings are lists of responses and ranks, and a .csv file has no lists"
        yield Problem(("data", name, "source"), message, "use .json, .jsonl or .parquet")
    if known_content and columns:
        yield Problem(("data", name, "columns"), f"{source} has our columns already", "remove columns")
    elif isinstance(columns, Mapping) and columns:
        missing = missing_columns(content, set(columns))
        if missing:
            message = f"says nothing of {' and '.join(missing)}, which {'.'.join(map(str, reader))} reads"
            yield Problem(("data", name, "columns"), message, f"add `{missing[0]}: COLUMN`")
