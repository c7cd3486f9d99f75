"""Fields of MLflow's datasets and logged models."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.operations import Input
from vantage.schemas.records.artifacts import Artifact, Dataset
from vantage.schemas.safe_text import safe_text

_DATASET_DIGEST_LENGTH = 36  # MLflow's limit
_INPUT_TAG_LENGTH = 500  # MLflow's limit

ROLE = "vantage.role"
"""Tag of a dataset: the role in which the stage reads it. Of a dataset that is read in two roles, MLflow has one."""


@dataclass(frozen=True)
class ExpectedDataset:
    """A dataset among the inputs of one of MLflow's runs."""

    digest: str
    """Content digest, or the digest of the source file; MLflow's own field contains 36 characters of it."""
    fields: Mapping[str, str]
    """MLflow's own fields: name, digest, source, profile."""
    tags: Mapping[str, str]
    is_source: bool
    """Whether this is the file that a dataset was prepared from; runs of earlier versions record none."""


@dataclass(frozen=True)
class ExpectedModel:
    """A logged model."""

    name: str
    kind: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    """The step and digest of each input."""


def expected_model(run_id: str, stage: StageEntry, artifact: Artifact) -> ExpectedModel:
    """Return the logged model of a stage's artifact."""
    return ExpectedModel(
        name=_model_name(stage.name),
        kind=artifact.kind,
        tags={
            "vantage.digest": artifact.digest,
            "vantage.stage_key": artifact.stage_key,
            "vantage.stage": stage.name,
            "vantage.run_id": run_id,
            **{f"vantage.parent.{role}": digest for role, digest in artifact.parents.items()},
        },
        params={
            f"parent.{role}": f"{given.stage} {given.artifact.digest[:12]}"
            for role, given in stage.inputs.items()
        },
    )


def datasets_read(entry: RunEntry, stage: StageEntry) -> Iterator[ExpectedDataset]:
    """Yield the source file of a dataset that the stage prepares, and each dataset among its inputs."""
    if stage.kind == "prepare_data" and stage.source_sha256 is not None and stage.source is not None:
        yield _source_file(stage.name, stage.source, stage.source_sha256)
    for role, given in stage.inputs.items():
        if isinstance(given.artifact, Dataset):
            prepared = entry.stages.get(given.stage)
            yield _dataset(role, given, stage.kind, prepared.source_sha256 if prepared else None)


def measured_dataset(stage: StageEntry) -> tuple[str, str] | None:
    """Return (name, digest) in MLflow of the dataset with the held-out rows of the stage; None: it reads none or
    several."""
    roles = {role: given for role, given in stage.inputs.items() if isinstance(given.artifact, Dataset)}
    chosen = (
        roles.get("prompts") or roles.get("data") or (next(iter(roles.values())) if len(roles) == 1 else None)
    )
    if chosen is None:
        return None
    fields = _dataset_fields(chosen, None)
    return fields["name"], fields["digest"]


def _model_name(stage: str) -> str:
    """Return a name that MLflow allows for a logged model: without dots, slashes, colons, percents or quotes."""
    return "".join(letter if letter.isalnum() or letter in "_-" else "-" for letter in stage)


def _dataset(role: str, given: Input, kind: str, source_sha256: str | None) -> ExpectedDataset:
    """Return the dataset, with our whole digest and the digest of its source in its tags."""
    digest = given.artifact.digest
    context = "evaluation" if kind == "evaluation" else "training"
    tags = {"mlflow.data.context": context, ROLE: role, "vantage.digest": digest}
    if source_sha256:
        tags["vantage.source.sha256"] = source_sha256
    tags = {name: value[:_INPUT_TAG_LENGTH] for name, value in tags.items()}
    return ExpectedDataset(digest, _dataset_fields(given, source_sha256), tags, is_source=False)


def _dataset_fields(given: Input, source_sha256: str | None) -> dict[str, str]:
    source = {"uri": given.artifact.uri, "sha256": given.artifact.digest}
    if source_sha256:
        source["source_sha256"] = source_sha256
    return {
        "name": given.stage.removeprefix("data."),
        "digest": given.artifact.digest[:_DATASET_DIGEST_LENGTH],
        "source": json.dumps(source),
        "profile": json.dumps(given.artifact.metrics),
    }


def _source_file(stage: str, source: str, sha256: str) -> ExpectedDataset:
    fields = {
        "name": f"source of {stage.removeprefix('data.')}",
        "digest": sha256[:_DATASET_DIGEST_LENGTH],
        "source": json.dumps({"uri": safe_text(source), "sha256": sha256}),
    }
    tags = {"mlflow.data.context": "source", "vantage.digest": sha256}
    return ExpectedDataset(sha256, fields, tags, is_source=True)
