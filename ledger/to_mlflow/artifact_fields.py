"""Fields of MLflow's datasets and logged models: functions of what a run told, for whoever writes and whoever compares them."""

import json
from collections.abc import Mapping

from vantage.ledger.operations import Input
from vantage.schemas.safe_text import safe_text

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


def source_fields(stage: str, source: str, sha256: str) -> dict[str, str]:
    """Return the same of the file that a dataset was prepared from."""
    return {
        "name": f"source of {stage.removeprefix('data.')}",
        "digest": sha256[:_DATASET_DIGEST_LENGTH],
        "source": json.dumps({"uri": safe_text(source), "sha256": sha256}),
    }


def source_tags(sha256: str) -> dict[str, str]:
    """Tags of that file among the dataset inputs of its run."""
    return {"mlflow.data.context": "source", "vantage.digest": sha256}
