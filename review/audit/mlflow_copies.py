"""Check MLflow's own copy of published weights: every byte of it, and the description by which MLflow loads it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from vantage.ledger.published_copies import EXAMPLES, TOKENIZER, WEIGHTS, problems_in
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.mlflow_descriptions import (
    DESCRIPTION,
    description_problems,
    example_problems,
    kinds_of,
)
from vantage.storage.hashed_files import FileToHash, chunks_of
from vantage.storage.read_only import Hashed, Listed, hash_listed, list_folder
from vantage.storage.sealed_folders import MANIFEST

_FILES = frozenset(
    {DESCRIPTION, "requirements.txt", "python_env.yaml", WEIGHTS, TOKENIZER.partition("/")[0], *EXAMPLES}
)
"""All entries of a copy."""


def problems_of_folder(evidence: Evidence, folder: Path, digest: str, tags: Mapping[str, str]) -> Hashed:
    """Return the result of reading every byte of a folder in the form of a copy."""
    if not folder.is_dir():
        return Hashed(("MLflow has no files of it any longer",))
    weights = list_folder(folder / WEIGHTS, digest=digest)
    structure = [each for each in problems_in(folder, digest, read=False) if each.startswith(TOKENIZER)]
    hashed = hash_listed({WEIGHTS: weights, TOKENIZER: _tokenizer(folder, weights, digest)}, evidence.clock)
    problems = [f"{name}: {problem}" for name, each in hashed.items() for problem in each.problems]
    problems += [*structure, *_strangers(folder), *example_problems(folder)]
    problems += description_problems(folder, folder / WEIGHTS, tags, kinds=kinds_of(evidence, digest))
    return Hashed(
        tuple(problems),
        sum(each.num_files for each in hashed.values()),
        sum(each.num_bytes for each in hashed.values()),
    )


def _tokenizer(folder: Path, weights: Listed, digest: str) -> Listed:
    """Check the second copy of the tokenizer's files."""
    place = folder / TOKENIZER
    expected = {**weights.files, MANIFEST: digest}
    found = sorted(path for path in place.iterdir() if path.name in expected) if place.is_dir() else []
    files = {path.name: expected[path.name] for path in found}
    to_hash = tuple(
        FileToHash(path.name, path.lstat().st_size, lambda path=path: chunks_of(path))  # type: ignore[misc]
        for path in found
    )
    return Listed((), files, to_hash)


def _strangers(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.name not in _FILES:
            yield f"{path.name}: nobody published it"
    components = folder / TOKENIZER.partition("/")[0]
    for path in sorted(components.iterdir()) if components.is_dir() else ():
        if path.name != Path(TOKENIZER).name:
            yield f"{path.relative_to(folder)}: nobody published it"
