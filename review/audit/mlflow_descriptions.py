"""Check the files by which MLflow loads a model: they must have exactly the lines that Vantage would write."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vantage.ledger.published_copies import EXAMPLES, WEIGHTS
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.small_files import NotRead, small_file, small_json, small_yaml

DESCRIPTION = "MLmodel"
_TAGS = ("vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id")
_VERSION = r"[0-9][0-9A-Za-z.!+]*"
_OF_THE_WRITER = {
    "flavors.python_function.python_version": _VERSION,
    "flavors.transformers.transformers_version": _VERSION,
    "flavors.vantage_adapters.peft_version": _VERSION,
    "mlflow_version": _VERSION,
    "model_id": r"m-[0-9a-f]{32}",
    "model_size_bytes": r"[0-9]+",
    "model_uuid": r"[0-9a-f]{32}",
    "run_id": r"[0-9a-f]{32}",
    "utc_time_created": r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+",
}
"""Line → pattern of the values that it may have, since they depend on when and where the copy was made."""
_EXAMPLES = "saved_input_example_info."
_BUILD, _INSTALL = ["pip", "setuptools", "wheel"], ["-r requirements.txt"]
_SHOWN = 3


def kinds_of(evidence: Evidence, digest: str) -> list[str]:
    """Return the kinds that an artifact may have: those of its refs, else all kinds that can be published."""
    from vantage.ledger.to_mlflow.model_description import PUBLISHABLE

    return sorted({ref.artifact.kind for ref in evidence.refs_of.get(digest, [])} or PUBLISHABLE)


def description_problems(
    folder: Path,
    weights: Path,
    tags: Mapping[str, str],
    *,
    kinds: Sequence[str],
    weights_at: str = WEIGHTS,
    any_params: bool = False,
) -> Iterator[str]:
    """Yield differences between the files and what Vantage would write.

    Args:
        folder: the folder of the files.
        weights: the model, whose own files are compared elsewhere.
        tags: what is known of the artifact.
        kinds: the kinds that the artifact may have.
        weights_at: path of the weights in the files.
        any_params: whether the signature may have any params of a request.
    """
    try:
        described = small_yaml(folder / DESCRIPTION)
        environment = small_yaml(folder / "python_env.yaml")
        required = [line for line in small_file(folder / "requirements.txt").decode().split("\n") if line]
    except (OSError, ValueError) as error:
        yield f"{DESCRIPTION}, python_env.yaml or requirements.txt: cannot be read ({_why(error)})"
        return
    stored = dict(_lines(described))
    if any_params:
        stored.pop("signature.params", None)
    metadata = {name: tags.get(name) or str(stored.get(f"metadata.{name}")) for name in _TAGS}
    problems = [
        list(_differences(stored, weights, kind, metadata, weights_at=weights_at, any_params=any_params))
        for kind in kinds
    ]
    best = min(problems, key=len, default=[])
    yield from best[:_SHOWN]
    if len(best) > _SHOWN:
        yield f"{DESCRIPTION}: and {len(best) - _SHOWN} more lines"
    yield from _environment_problems(stored, environment, required, weights)


def example_problems(folder: Path) -> Iterator[str]:
    """Check that both examples of an input are the same text. The text is a prompt of the run, which is only shown."""
    there = [folder / name for name in EXAMPLES if (folder / name).exists()]
    try:
        found = [small_json(path) for path in there]
    except (OSError, ValueError) as error:
        yield f"{EXAMPLES[0]} or {EXAMPLES[1]}: cannot be read ({_why(error)})"
        return
    texts = found[0] if found and isinstance(found[0], list) else []
    if found and not (found == [texts, {"inputs": texts}] and len(texts) == 1 and isinstance(texts[0], str)):
        yield f"{EXAMPLES[0]} and {EXAMPLES[1]}: are not one text, as it was published"


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, NotRead) else type(error).__name__


def _differences(
    stored: Mapping[str, Any],
    weights: Path,
    kind: str,
    metadata: Mapping[str, str],
    *,
    weights_at: str,
    any_params: bool,
) -> Iterator[str]:
    from vantage.ledger.to_mlflow.model_description import describe

    try:
        expected = dict(_lines(describe(weights, kind=kind, metadata=metadata, weights=weights_at)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield f"{DESCRIPTION}: cannot be compared with the weights ({type(error).__name__})"
        return
    if any_params:
        expected.pop("signature.params", None)
    if not any(name.startswith(_EXAMPLES) for name in stored):  # written by an earlier version
        expected = {name: value for name, value in expected.items() if not name.startswith(_EXAMPLES)}
    for name, pattern in _OF_THE_WRITER.items():
        if name in stored and re.fullmatch(pattern, str(stored[name])):
            expected[name] = stored[name]
    for name in dict.fromkeys((*expected, *stored)):
        if name not in stored or name not in expected or stored[name] != expected[name]:
            said = str(stored[name])[:80] if name in stored else "absent"
            must = f"must be {expected[name]}" if name in expected else "nobody published it"
            # A value that replaces a flavor or a signature is reported once
            yield f"{DESCRIPTION}: {name} is {said}, {must}"


def _environment_problems(
    stored: Mapping[str, Any], environment: Any, required: list[str], weights: Path
) -> Iterator[str]:
    """Yield the packages that MLflow would install before it loads the copy, unless they are exactly those of publishing."""
    from vantage.ledger.to_mlflow.model_description import requirements_of

    names = requirements_of(weights)
    for line in required:
        name, _, version = line.partition("==")
        if name not in names or not re.fullmatch(_VERSION, version):
            yield f"requirements.txt: {line!r}, which nobody published"
    if len(required) != len(names):
        yield f"requirements.txt: has {len(required)} packages, and {len(names)} were published"
    python = stored.get("flavors.python_function.python_version")
    expected = dict(_lines({"python": python, "build_dependencies": _BUILD, "dependencies": _INSTALL}))
    if python is None:  # MLflow does not load adapters, so they have no version of Python
        expected.pop("python")
    found = dict(_lines(environment))
    for name in dict.fromkeys((*expected, *found)):
        if found.get(name) != expected.get(name) and not (name == "python" and python is None):
            yield f"python_env.yaml: {name} is {found.get(name, 'absent')!r}, which nobody published"
    for line, name in (
        ("flavors.transformers.transformers_version", "transformers"),
        ("mlflow_version", "mlflow"),
    ):
        if line in stored and f"{name}=={stored[line]}" not in required:
            yield f"requirements.txt: another {name} than {DESCRIPTION} says ({stored[line]})"


def _lines(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Return path → value for everything in nested mappings and lists."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _lines(each, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _lines(each, f"{place}.{number}")
    else:
        yield place, value
