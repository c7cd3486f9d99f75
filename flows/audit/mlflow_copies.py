"""MLflow's own copy of published weights: every byte of it, and the description by which MLflow loads it."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.audit.evidence import Evidence, Missing
from ledger.published_copies import EXAMPLES, TOKENIZER, WEIGHTS, problems_in
from storage.hashed_files import FileToHash, chunks_of
from storage.read_only import Hashed, Listed, hash_listed, list_folder
from storage.sealed_folders import MANIFEST

if TYPE_CHECKING:
    from ledger.to_mlflow.audited_runs import MlflowVersion

DESCRIPTION = "MLmodel"
_FILES = frozenset(
    {DESCRIPTION, "requirements.txt", "python_env.yaml", WEIGHTS, TOKENIZER.partition("/")[0], *EXAMPLES}
)
"""All that there is in a copy."""
_REQUIREMENT = re.compile(r"(?:mlflow|peft|safetensors|torch|transformers)==[0-9A-Za-z.!]+")
_ENVIRONMENT = frozenset({"pip", "setuptools", "wheel", "-r requirements.txt"})
_LOADERS = frozenset({"mlflow.transformers"})
"""Modules by which MLflow may load a copy; another would be code that nobody published."""


def copy_problems(evidence: Evidence, version: "MlflowVersion") -> Hashed | Missing:
    """What reading every byte of a version's copy has shown; Missing: it cannot be reached."""
    if not version.location:
        return Hashed((f"version {version.version} has no files",))

    def read(server: Any) -> Hashed:
        with server.copy_of(version) as folder:
            return problems_of_folder(evidence, folder, version.tags["vantage.digest"], version.tags)

    return evidence.ask(read)


def problems_of_folder(evidence: Evidence, folder: Path, digest: str, tags: Mapping[str, str]) -> Hashed:
    """What reading every byte of a folder in the form of a copy has shown."""
    if not folder.is_dir():
        return Hashed(("MLflow has no files of it any longer",))
    weights = list_folder(folder / WEIGHTS, digest=digest)
    structure = [each for each in problems_in(folder, digest, read=False) if each.startswith(TOKENIZER)]
    hashed = hash_listed({WEIGHTS: weights, TOKENIZER: _tokenizer(folder, weights, digest)}, evidence.clock)
    problems = [f"{name}: {problem}" for name, each in hashed.items() for problem in each.problems]
    problems += [*structure, *_strangers(folder), *_description_problems(folder, tags)]
    problems += _environment_problems(folder)
    return Hashed(
        tuple(problems),
        sum(each.num_files for each in hashed.values()),
        sum(each.num_bytes for each in hashed.values()),
    )


def _tokenizer(folder: Path, weights: Listed, digest: str) -> Listed:
    """The second copy of the tokenizer's files."""
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


def _description_problems(folder: Path, tags: Mapping[str, str]) -> Iterator[str]:
    import yaml

    try:
        described = yaml.safe_load((folder / DESCRIPTION).read_bytes())
        flavors, metadata = described["flavors"], described["metadata"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        yield f"{DESCRIPTION}: cannot be read ({type(error).__name__})"
        return
    for name in ("vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id"):
        if name in tags and metadata.get(name) != tags[name]:
            yield f"{DESCRIPTION}: {name} is {metadata.get(name)}, the version's is {tags[name]}"
    yield from _flavor_problems(flavors)


def _environment_problems(folder: Path) -> Iterator[str]:
    """What MLflow would install before it loads the copy: the packages that publishing names, and no other."""
    import yaml

    try:
        required = (folder / "requirements.txt").read_text().split("\n")
        environment = yaml.safe_load((folder / "python_env.yaml").read_bytes())
        asked = [*environment["build_dependencies"], *environment["dependencies"]]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        yield f"requirements.txt or python_env.yaml: cannot be read ({type(error).__name__})"
        return
    for line in filter(None, required):
        if not _REQUIREMENT.fullmatch(line):
            yield f"requirements.txt: {line!r}, which nobody published"
    for name in asked:
        if name not in _ENVIRONMENT:
            yield f"python_env.yaml: {name!r}, which nobody published"


def _flavor_problems(flavors: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    known = {"python_function", "transformers", "vantage_adapters"}
    for name in sorted(flavors.keys() - known):
        yield f"{DESCRIPTION}: flavor {name}, which nobody published"
    function, transformers = flavors.get("python_function", {}), flavors.get("transformers", {})
    if function.get("loader_module", "mlflow.transformers") not in _LOADERS:
        yield f"{DESCRIPTION}: loader_module is {function['loader_module']}"
    for flavor in (function, transformers):
        if flavor.get("code"):
            yield f"{DESCRIPTION}: code is {flavor['code']}"
    paths = (transformers.get("model_binary"), flavors.get("vantage_adapters", {}).get("path"))
    for path in paths:
        if path not in (None, WEIGHTS):
            yield f"{DESCRIPTION}: the weights are said to be in {path}"
    if "source_model_revision" in transformers or "peft_adaptor" in transformers:
        yield f"{DESCRIPTION}: the weights are said to be elsewhere"
