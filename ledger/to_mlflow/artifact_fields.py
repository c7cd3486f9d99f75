"""Fields of MLflow's datasets and logged models: functions of what a run told, for whoever writes and whoever compares them."""

import json
from collections.abc import Mapping

from ledger.operations import Input

_DATASET_DIGEST_LENGTH = 36  # MLflow's limit


def model_params(inputs: Mapping[str, Input]) -> dict[str, str]:
    """Params of a stage's logged model: the step and digest of each input."""
    return {f"parent.{role}": f"{given.stage} {given.artifact.digest[:12]}" for role, given in inputs.items()}


def model_name(stage: str) -> str:
    """MLflow allows no dots, slashes, colons, percents or quotes in the name of a logged model."""
    return "".join(letter if letter.isalnum() or letter in "_-" else "-" for letter in stage)


def dataset_fields(given: Input, source_sha256: str | None) -> dict[str, str]:
    """MLflow's own fields of a dataset."""
    source = {"uri": given.artifact.uri, "sha256": given.artifact.digest}
    if source_sha256:
        source["source_sha256"] = source_sha256
    return {
        "name": given.stage.removeprefix("data."),
        "digest": given.artifact.digest[:_DATASET_DIGEST_LENGTH],
        "source": json.dumps(source),
        "profile": json.dumps(given.artifact.metrics),
    }
