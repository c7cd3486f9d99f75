"""Make statements about artifacts: in-toto Statement v1 with SLSA provenance v1 (slsa.dev/spec/v1.0/provenance).

A statement is a pure function of the artifact's manifest, its ref, and one run's verdicts. It contains no time and no
path of a machine, so the same artifact gives the same bytes; a check makes the statement again and compares both.

We write the JSON ourselves: the protobuf classes of ``in-toto-attestation`` turn every number into a float. Tests read
the statements with those classes.
"""

import base64
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vantage.runs.record import RunRecord
from vantage.runs.run import recipe_digest
from vantage.schemas.canonical_json import canonical_json
from vantage.storage.measured_file import METRICS_FILE
from vantage.storage.refs import Ref
from vantage.storage.sealed_folders import MANIFEST, read_manifest

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:x-vantage-rlhf:stage:v1"
"""Names the meaning of the parameters below; if the meaning changes, the number does."""
BUILDER = "pkg:pypi/vantage-rlhf"
VERDICTS = "verdicts"
_SHOWN = 60
_MOST_SHOWN = 5


class BadStatement(ValueError):
    """The signed bytes are not one of our statements."""


@dataclass(frozen=True)
class Judged:
    """Verdicts of a run on a step's artifact."""

    run_id: str
    recipe: str
    """sha256 of the run's resolved recipe, as canonical JSON."""
    verdicts: tuple[Mapping[str, Any], ...]
    """Verdicts of the step's gates, as JSON."""


def judged_by(record: RunRecord, step: str) -> Judged:
    """Return the verdicts on a step in the run's record."""
    verdicts = tuple(verdict.model_dump(mode="json") for verdict in record.stages[step].verdicts)
    return Judged(record.run_id, recipe_digest(record.recipe), verdicts)


def statement(ref: Ref, files: Mapping[str, str], judged: Judged) -> bytes:
    """Return the statement, as canonical JSON.

    Args:
        ref: the artifact's ref, with its inputs, its stage key's parts and its provenance.
        files: path → sha256 of each file in the artifact's manifest.
        judged: verdicts of the run in which the artifact is signed.
    """
    artifact, parts = ref.artifact, dict(ref.key_parts)
    inputs = {**dict(parts.pop("inputs", {})), **artifact.parents}
    measured = {"metrics": artifact.metrics, "uncertainty": _plain(artifact.uncertainty)}
    byproducts: list[dict[str, Any]] = [
        {
            "name": METRICS_FILE,
            "digest": {"sha256": files[METRICS_FILE]} if METRICS_FILE in files else {},
            "annotations": measured,
        },
        {
            "name": VERDICTS,
            "mediaType": "application/json",
            "content": base64.b64encode(canonical_json(list(judged.verdicts)).encode()).decode(),
            "annotations": {
                "run": judged.run_id,
                "gates": len(judged.verdicts),
                "passed": sum(bool(each.get("passed")) for each in judged.verdicts),
            },
        },
    ]
    said = {
        "_type": STATEMENT_TYPE,
        "subject": [
            _resource(MANIFEST, artifact.digest),
            *(_resource(path, files[path]) for path in sorted(files)),
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "makes": artifact.kind,
                    "stage": parts,
                    "stage_key": artifact.stage_key,
                    "recipe": {"run": judged.run_id, "sha256": judged.recipe},
                },
                "internalParameters": {"attempt": ref.attempt, "provenance": dict(ref.provenance)},
                "resolvedDependencies": [_resource(role, inputs[role]) for role in sorted(inputs)],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": _version(ref.provenance)},
                "metadata": {"invocationId": f"{ref.run_id}/attempts/{ref.attempt}"},
                "byproducts": byproducts,
            },
        },
    }
    return canonical_json(said).encode()


def files_in(manifest: bytes, *, digest: str) -> dict[str, str]:
    """Return path → sha256 of the files of a manifest.

    Raises:
        ValueError: the bytes are not a manifest, or not the one with this digest.
    """
    with tempfile.TemporaryDirectory(prefix="vantage-manifest-") as folder:
        Path(folder, MANIFEST).write_bytes(manifest)
        records = read_manifest(Path(folder), digest=digest)
    return {path: str(record["sha256"]) for path, record in records.items()}


def read_statement(data: bytes) -> dict[str, Any]:
    """Return a statement as plain values.

    Raises:
        BadStatement: the bytes are not one of our statements.
    """
    try:
        said = json.loads(data)
        judged_in(said)
        files_of(said)
        digest_of(said), attempt_of(said), stage_key_of(said)
        known = (said["_type"], said["predicateType"], said["predicate"]["buildDefinition"]["buildType"])
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        StopIteration,
        RecursionError,
    ) as error:
        raise BadStatement(f"is no statement that Vantage writes ({type(error).__name__})") from None
    if known != (STATEMENT_TYPE, PREDICATE_TYPE, BUILD_TYPE):
        raise BadStatement(f"is a statement of another kind: {', '.join(map(str, known))}")
    return dict(said)


def judged_in(said: Mapping[str, Any]) -> Judged:
    """Return the run's verdicts in a statement."""
    recipe = said["predicate"]["buildDefinition"]["externalParameters"]["recipe"]
    byproducts = said["predicate"]["runDetails"]["byproducts"]
    content = next(each["content"] for each in byproducts if each["name"] == VERDICTS)
    verdicts = json.loads(base64.b64decode(content, validate=True))
    if not all(isinstance(each, dict) for each in verdicts):
        raise TypeError("a verdict is a mapping")
    return Judged(str(recipe["run"]), str(recipe["sha256"]), tuple(verdicts))


def files_of(said: Mapping[str, Any]) -> dict[str, str]:
    """Return path → sha256 of the artifact's files in a statement, without the manifest itself."""
    return {str(each["name"]): str(each["digest"]["sha256"]) for each in said["subject"][1:]}


def digest_of(said: Mapping[str, Any]) -> str:
    """Return the content digest of a statement's artifact."""
    return str(said["subject"][0]["digest"]["sha256"])


def is_about(data: bytes, digest: str) -> bool:
    """Return whether a stored statement names the artifact of this digest; nothing is checked."""
    try:
        return digest_of(read_statement(data)) == digest
    except BadStatement:
        return False


def attempt_of(said: Mapping[str, Any]) -> int:
    """Return the number of the attempt that made the artifact, from a statement."""
    attempt = said["predicate"]["buildDefinition"]["internalParameters"]["attempt"]
    return attempt if isinstance(attempt, int) else 0


def stage_key_of(said: Mapping[str, Any]) -> str:
    """Return the stage key of the artifact, from a statement."""
    return str(said["predicate"]["buildDefinition"]["externalParameters"]["stage_key"])


def differences(signed: Any, found: Any) -> str:
    """Return the differences, in a few words, between a signed statement and the one made from the stored artifact."""
    lines = list(_differences("", signed, found))
    more = f"; and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    return "; ".join(lines[:_MOST_SHOWN]) + more


def _resource(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}


def _plain(uncertainty: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.model_dump(mode="json") for name, value in uncertainty.items()}


def _version(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return the version of the code; SLSA requires a mapping of texts."""
    return {"code": str(provenance["code"])} if "code" in provenance else {}


def _differences(path: str, signed: Any, found: Any) -> Iterator[str]:
    if isinstance(signed, dict) and isinstance(found, dict):
        for key in sorted(signed.keys() | found.keys()):
            yield from _differences(f"{path}.{key}".lstrip("."), signed.get(key), found.get(key))
    elif isinstance(signed, list) and isinstance(found, list):
        one, other = _by_name(signed), _by_name(found)
        for key in sorted(one.keys() | other.keys()):
            yield from _differences(f"{path}.{key}", one.get(key), other.get(key))
    elif signed != found:
        shown = (json.dumps(each)[:_SHOWN] for each in (signed, found))
        yield "{} was signed as {}, and is {}".format(path.rpartition("predicate.")[2], *shown)


def _by_name(items: list[Any]) -> dict[str, Any]:
    named = all(isinstance(each, dict) and "name" in each for each in items)
    return {str(each["name"]) if named else str(place): each for place, each in enumerate(items)}
