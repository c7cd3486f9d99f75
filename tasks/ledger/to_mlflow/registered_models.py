"""Publishing: an artifact's files in MLflow, as one version of a registered model, and the alias that points to it."""

import json
import tempfile
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tasks.ledger.operations import Publish
from tasks.ledger.to_mlflow.lineage import Maker
from tasks.ledger.to_mlflow.logged_models import EXTERNAL
from tasks.ledger.to_mlflow.model_description import WEIGHTS, PublishingError, write_description

_VERSIONS = "mlflow.modelVersions"


def publish(
    client: MlflowClient, operation: Publish, maker: Maker | None, *, our_run_id: str, note: str | None
) -> str:
    """The artifact's version of the registered model, made if there is none; the alias then points to it.

    Raises:
        PublishingError: no run of this server made the artifact, or its folder is no whole model.
    """
    digest, name = operation.artifact.digest, operation.registered_model
    if maker is None or maker.model_id is None:
        raise PublishingError(f"stage {operation.stage!r}: no run of this server made {digest}")
    _create_registered_model(client, name)
    found = client.search_model_versions(f"name = '{name}' AND tags.`vantage.digest` = '{digest}'")
    if found:
        version = min(int(each.version) for each in found)
    else:
        version = _create_version(client, operation, maker, maker.model_id, our_run_id, note)
    _link_version(client, maker.model_id, name, version)
    if operation.alias is not None:
        client.set_registered_model_alias(name, operation.alias, str(version))
    return str(version)


def _create_version(
    client: MlflowClient,
    operation: Publish,
    maker: Maker,
    model_id: str,
    our_run_id: str,
    note: str | None,
) -> int:
    """Copy the files, then make the version; a kill in between leaves files, which are then written again."""
    run_id, artifact = maker.run.info.run_id, operation.artifact
    tags = {
        "vantage.digest": artifact.digest,
        "vantage.stage_key": artifact.stage_key,
        "vantage.stage": maker.run.data.tags.get("vantage.stage", operation.stage),
        "vantage.run_id": maker.run.data.tags.get("vantage.run_id", our_run_id),
    }
    with tempfile.TemporaryDirectory(prefix="vantage-publish-") as temporary:
        description = Path(temporary) / "description"
        write_description(
            Path(operation.folder),
            description,
            kind=artifact.kind,
            run_id=run_id,
            model_id=model_id,
            metadata=tags,
        )
        client.log_model_artifacts(model_id, operation.folder, WEIGHTS)
        client.log_model_artifacts(model_id, str(description))
    model = client.get_logged_model(model_id)
    if EXTERNAL in model.tags:
        client.delete_logged_model_tag(model_id, EXTERNAL)
    version = client.create_model_version(
        operation.registered_model,
        model.artifact_location,
        run_id,
        tags=tags,
        description=note,
        model_id=model_id,
    )
    return int(version.version)


def _link_version(client: MlflowClient, model_id: str, name: str, version: int) -> None:
    """The version on the page of its model; a kill may have come between the two."""
    known = json.loads(client.get_logged_model(model_id).tags.get(_VERSIONS, "[]"))
    this = {"name": name, "version": version}
    if this not in known:
        # A server links it too, and writes the number as a text.
        others = [each for each in known if (each["name"], int(each["version"])) != (name, version)]
        client.set_logged_model_tags(model_id, {_VERSIONS: json.dumps([*others, this])})


def _create_registered_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
