"""What MLflow holds of a published model: our folder, its tokenizer again, and MLflow's own description of both."""

from pathlib import Path

from storage.sealed_folders import (
    MANIFEST,
    file_sha256,
    find_problems,
    read_manifest,
)

WEIGHTS = "model"
"""Where the folder itself belongs, beside its description."""
TOKENIZER = "components/tokenizer"
"""Where MLflow looks for the tokenizer."""


def belongs_to_tokenizer(path: str) -> bool:
    """Whether a file of the folder is copied for the tokenizer too."""
    return "/" not in path and ".safetensors" not in path


def problems_in(copy: Path, digest: str, *, read: bool = True) -> list[str]:
    """What is wrong with the copy, a line for each fault; empty: it is what the artifact is.

    Args:
        copy: the folder of the logged model.
        digest: the artifact's content digest, which is the sha256 of its manifest.
        read: every byte of it (about 1 GB/s from a disk); False compares names and sizes alone.
    """
    weights = copy / WEIGHTS
    problems = [f"{WEIGHTS}: {problem}" for problem in find_problems(weights, digest=digest, read=read)]
    try:
        listed = read_manifest(weights, digest=digest)
    except (OSError, ValueError):
        return problems  # it is among them
    expected = {name: record["sha256"] for name, record in listed.items() if belongs_to_tokenizer(name)}
    expected[MANIFEST] = digest
    tokenizer = copy / TOKENIZER
    found = {path.name for path in tokenizer.iterdir()} if tokenizer.is_dir() else set()
    problems += [f"{TOKENIZER}: {name}: is missing" for name in sorted(expected.keys() - found)]
    problems += [f"{TOKENIZER}: {name}: is not in the manifest" for name in sorted(found - expected.keys())]
    for name in sorted(expected.keys() & found) if read else ():
        actual = file_sha256(tokenizer / name)
        if actual != expected[name]:
            problems.append(f"{TOKENIZER}: {name}: sha256 is {actual}, must be {expected[name]}")
    return problems
