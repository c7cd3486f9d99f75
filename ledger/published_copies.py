"""MLflow's copy of a published model: our folder, a second copy of its tokenizer, and MLflow's description."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from vantage.storage.sealed_folders import (
    MANIFEST,
    file_sha256,
    find_problems,
    read_manifest,
)

WEIGHTS = "model"
"""Path of our folder in the copy."""
TOKENIZER = "components/tokenizer"
"""Path at which MLflow looks for the tokenizer."""
EXAMPLES = ("input_example.json", "serving_input_example.json")
"""An input for MLflow's ``predict``, and for its server."""


def local_folder(address: str) -> Path | None:
    """Return the folder from which MLflow on this machine loads an address; None: it is remote, or no address.

    MLflow reads a text that begins with ``file:`` as an address, and any other without a scheme as a path, in which
    ``?`` and ``#`` are ordinary letters.
    """
    try:
        place = urlsplit(address)
    except ValueError:
        return None
    if place.scheme not in ("", "file"):
        return None
    return Path(unquote(place.path if address.startswith("file:") else address))


def is_same_place(one: str, other: str) -> bool:
    """Return whether two addresses of MLflow's files name one place, however their paths are written."""
    places = [local_folder(each) for each in (one, other)]
    return one.rstrip("/") == other.rstrip("/") or (places[0] is not None and places[0] == places[1])


def belongs_to_tokenizer(path: str) -> bool:
    """Return whether a file of the folder is also copied to the tokenizer's path."""
    return "/" not in path and ".safetensors" not in path


def problems_in(copy: Path, digest: str, *, read: bool = True) -> list[str]:
    """Return problems of the copy, one line each; empty: it is equal to the artifact.

    Args:
        copy: the folder of the logged model.
        digest: the artifact's content digest, which is the sha256 of its manifest.
        read: True: read every byte (about 1 GB/s from a disk). False: compare only names and sizes.
    """
    weights = copy / WEIGHTS
    problems = [f"{WEIGHTS}: {problem}" for problem in find_problems(weights, digest=digest, read=read)]
    try:
        listed = read_manifest(weights, digest=digest)
    except (OSError, ValueError):
        return problems  # the problems contain the reason
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
