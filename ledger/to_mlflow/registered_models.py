"""Publish: copy an artifact's files to MLflow as a version of a registered model, and move the alias."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vantage.ledger.expected.texts import fit_description
from vantage.ledger.operations import Publish
from vantage.ledger.published_copies import WEIGHTS, is_same_place
from vantage.ledger.to_mlflow.aliases import Movement, NoteMove, move_alias
from vantage.ledger.to_mlflow.copies import problems_of_copy
from vantage.ledger.to_mlflow.logged_models import EXTERNAL, model_in
from vantage.ledger.to_mlflow.model_description import PublishingError, write_description
from vantage.ledger.to_mlflow.producers import Producer
from vantage.ledger.to_mlflow.served_files import address_of_version

_VERSIONS = "mlflow.modelVersions"
_PREFIX = "vantage."
_OWN_TAGS = frozenset({"vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id"})
"""Tags with which every version is created."""


class Published(NamedTuple):
    """A version of a registered model whose files are those of the artifact."""

    version: str
    location: str
    """MLflow's address of the copy."""
    repaired: tuple[str, ...]
    """Problems of MLflow's copy, which was then replaced."""
    alias_stays: str | None = None
    """Reason why the alias was not moved although the operation asks for it."""


def publish(
    client: MlflowClient,
    operation: Publish,
    producer: Producer | None,
    *,
    tracking_uri: str,
    our_run_id: str,
    note: Callable[[int], str] | None,
    facts: Mapping[str, str],
    note_move: NoteMove,
    example: str | None = None,
) -> Published:
    """Find or create the artifact's version of the registered model, and move the alias to it.

    The copy of an existing version is compared with the manifest, and replaced if it differs.

    Args:
        tracking_uri: address that the client uses.
        note: version → the text of its page; None: unchanged.
        facts: gates and evaluation, as tags of the version.
        note_move: called before the alias moves to another version.
        example: a prompt for the input example.

    Raises:
        PublishingError: no run of this server made the artifact, its folder is no complete model, or MLflow's copy
            differs from it. No version is created, and no alias moves.
    """
    digest, name = operation.artifact.digest, operation.registered_model
    if producer is None or producer.model_id is None:
        raise PublishingError(f"stage {operation.stage!r}: no run of this server made {digest}")
    _create_registered_model(client, name)
    found = _versions_of(client, name, digest)
    _delete_left_over(client, found[1:])
    first = found[0] if found else None
    repaired: tuple[str, ...] = ()
    if first is not None:
        version, tags = int(first.version), first.tags
        model_id = model_in(f"{first.source}/") or producer.model_id
        location = _one_address(client, first, model_id)
        repaired = tuple(problems_of_copy(location, tracking_uri=tracking_uri, digest=digest))
        if repaired:
            _copy_files(client, operation, producer, model_id, tracking_uri, our_run_id, example)
    else:
        model_id = producer.model_id
        _copy_files(client, operation, producer, model_id, tracking_uri, our_run_id, example)
        tags = {**_tags(operation, producer, our_run_id), **facts}
        created = _create_version(client, operation, producer, producer.model_id, tags)
        version = _only_version(client, name, digest, created)
    if note is not None:
        client.update_model_version(name, str(version), description=fit_description(note(version)))
    for tag, value in facts.items():
        if tags.get(tag) != value:  # each call is a transaction in MLflow
            client.set_model_version_tag(name, str(version), tag, value)
    _link_version(client, producer.model_id, name, version)
    stays = None
    if operation.alias is not None:
        movement = Movement(str(version), operation.order, our_run_id, operation.by or "", "")
        stays = move_alias(client, name, operation.alias, movement, note_move)
    location = client.get_logged_model(model_id).artifact_location
    return Published(str(version), location, repaired, stays)


def _one_address(client: MlflowClient, version: ModelVersion, model_id: str) -> str:
    """Return the address from which MLflow loads a version; raises PublishingError if MLflow's tables name several."""
    location = address_of_version(client, version.name, str(version.version))
    named = {
        "its source": str(version.source),
        "its logged model": str(client.get_logged_model(model_id).artifact_location),
    }
    for what, address in named.items():
        if not is_same_place(address, location):
            raise PublishingError(
                f"version {version.version} of {version.name}: MLflow loads it from {location}, and {what} is in {address}; "
                "somebody has changed MLflow's tables: set them back (`vantage audit` names what differs), or delete the version"
            )
    return location


def _versions_of(client: MlflowClient, name: str, digest: str) -> list[ModelVersion]:
    """Return the model's versions of these weights, the first one first."""
    found = client.search_model_versions(f"name = '{name}' AND tags.`vantage.digest` = '{digest}'")
    return sorted(found, key=lambda each: int(each.version))


def _only_version(client: MlflowClient, name: str, digest: str, created: int) -> int:
    """Return the first version of these weights; a later one that this process has just created is deleted.

    Publishing holds the artifact's lock, but other workspaces have locks of their own, and operations that waited in an
    outbox are sent without one. MLflow numbers versions in the order of their creation, so all agree on the first.
    """
    found = _versions_of(client, name, digest)
    _delete_left_over(client, found[1:])
    return min([created, *(int(each.version) for each in found)])


def _delete_left_over(client: MlflowClient, versions: Sequence[ModelVersion]) -> None:
    """Delete second versions of the same weights, which were created just now or left by a killed process.

    Such a version has our tags alone, and neither a text nor an alias, which only the first version gets. A version
    that somebody uses is kept, and an audit names it.
    """
    if not versions:
        return
    aliased = {str(each) for each in client.get_registered_model(versions[0].name).aliases.values()}
    for each in versions:
        is_as_created = each.tags.keys() >= _OWN_TAGS and all(tag.startswith(_PREFIX) for tag in each.tags)
        if str(each.version) in aliased or each.description or not is_as_created:
            continue
        try:
            client.delete_model_version(each.name, str(each.version))
        except MlflowException as error:
            # a missing version: the process that created it has already deleted it
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        model_id = model_in(f"{each.source}/")
        if model_id is not None:
            _unlink_version(client, model_id, each.name, int(each.version))


def _tags(operation: Publish, producer: Producer, our_run_id: str) -> dict[str, str]:
    artifact = operation.artifact
    return {
        "vantage.digest": artifact.digest,
        "vantage.stage_key": artifact.stage_key,
        "vantage.stage": producer.stage or operation.stage,
        "vantage.run_id": producer.run_id or our_run_id,
    }


def _copy_files(
    client: MlflowClient,
    operation: Publish,
    producer: Producer,
    model_id: str,
    tracking_uri: str,
    our_run_id: str,
    example: str | None,
) -> None:
    """Copy the artifact and its description into MLflow and verify the copy; PublishingError if it differs."""
    with tempfile.TemporaryDirectory(prefix="vantage-publish-") as temporary:
        description = Path(temporary) / "description"
        write_description(
            Path(operation.folder),
            description,
            kind=operation.artifact.kind,
            run_id=producer.mlflow_run_id,
            model_id=model_id,
            metadata=_tags(operation, producer, our_run_id),
            example=example,
        )
        client.log_model_artifacts(model_id, operation.folder, WEIGHTS)
        client.log_model_artifacts(model_id, str(description))
    location = client.get_logged_model(model_id).artifact_location
    problems = problems_of_copy(location, tracking_uri=tracking_uri, digest=operation.artifact.digest)
    if problems:
        raise PublishingError(
            f"stage {operation.stage!r}: MLflow's copy ({location}) is not what is in the store: {'; '.join(problems)}; "
            "remove what lies there, check its disk, and run again"
        )


def _create_version(
    client: MlflowClient, operation: Publish, producer: Producer, model_id: str, tags: dict[str, str]
) -> int:
    """Create the version after its files were copied; if the process is killed before, the files are copied again."""
    model = client.get_logged_model(model_id)
    if EXTERNAL in model.tags:
        client.delete_logged_model_tag(model_id, EXTERNAL)
    version = client.create_model_version(
        operation.registered_model,
        model.artifact_location,
        producer.mlflow_run_id,
        tags=tags,
        model_id=model_id,
    )
    return int(version.version)


def _link_version(client: MlflowClient, model_id: str, name: str, version: int) -> None:
    """Link the version on the page of its model, if a kill has prevented it."""
    known = _linked_versions(client.get_logged_model(model_id).tags.get(_VERSIONS, "[]"))
    this = {"name": name, "version": version}
    if this not in known:
        others = _without(known, name, version)
        client.set_logged_model_tags(model_id, {_VERSIONS: json.dumps([*others, this])})


def _unlink_version(client: MlflowClient, model_id: str, name: str, version: int) -> None:
    """Take a deleted version from the page of its model."""
    known = _linked_versions(client.get_logged_model(model_id).tags.get(_VERSIONS, "[]"))
    others = _without(known, name, version)
    if others != known:
        client.set_logged_model_tags(model_id, {_VERSIONS: json.dumps(others)})


def _without(linked: list[dict[str, Any]], name: str, version: int) -> list[dict[str, Any]]:
    """Return the links to other versions. A server also links a version itself, with the number as text."""
    return [each for each in linked if (each["name"], str(each["version"])) != (name, str(version))]


def _linked_versions(tag: str) -> list[dict[str, Any]]:
    """Return the versions in MLflow's tag, without entries that somebody wrote by hand and that are no versions."""
    try:
        found = json.loads(tag)
    except (ValueError, RecursionError):
        return []
    listed = found if isinstance(found, list) else []
    return [each for each in listed if isinstance(each, dict) and {"name", "version"} <= each.keys()]


def _create_registered_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
