"""Find the files that MLflow loads for a model: their address as MLflow resolves it, and a bounded download of remote ones."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.utils.models import get_model_name_and_version
from mlflow.tracking import MlflowClient

from vantage.ledger.published_copies import WEIGHTS
from vantage.storage.sealed_folders import MANIFEST, read_manifest

_MODELS = "models:"
_MAX_STEPS = 5
"""Most addresses of models that are followed from one to the next."""
_MAX_FILES = 10_000
_MAX_MANIFEST_BYTES = 64 << 20
_SLACK_BYTES = 64 << 20
"""Most bytes of all other files than the weights, such as MLflow's description and examples."""


class UnboundedFiles(ValueError):
    """The remote files are more or larger than the published ones; they were not fetched."""


def address_of_version(client: MlflowClient, name: str, version: str) -> str:
    """Return the address from which MLflow loads ``models:/NAME/VERSION``; it may differ from the version's ``source``."""
    return followed(client, str(client.get_model_version_download_uri(name, version)))


def followed(client: MlflowClient, address: str) -> str:
    """Return the final address to which a model's address leads, as MLflow follows it; others are returned
    unchanged."""
    for _ in range(_MAX_STEPS):
        if not address.startswith(_MODELS):
            break
        names = get_model_name_and_version(client, address)
        if len(names) == 1:
            address = str(client.get_logged_model(names[0]).artifact_location)
        else:
            address = str(client.get_model_version_download_uri(*names))
    return address


def leads_nowhere(address: str) -> bool:
    """Return whether ``followed`` gave up, so that the address is still that of a model."""
    return address.startswith(_MODELS)


@contextmanager
def files_at(address: str, *, tracking_uri: str, digest: str) -> Iterator[Path]:
    """Yield the folder with the files of a published model; remote files are downloaded for the time of the block.

    Args:
        digest: content digest of the artifact that was published there; its manifest bounds the download.

    Raises:
        UnboundedFiles: there is more than was published.
        MlflowException, OSError: the server does not answer.
    """
    repository = get_artifact_repository(address, tracking_uri=tracking_uri)
    if isinstance(repository, LocalArtifactRepository):
        yield Path(repository.artifact_dir)
        return
    with tempfile.TemporaryDirectory(prefix="vantage-audit-") as temporary:
        _fetch(repository, Path(temporary), digest)
        yield Path(temporary)


def _fetch(repository: ArtifactRepository, target: Path, digest: str) -> None:
    """Download all files, if they have at most twice the manifest's bytes (MLflow has two copies of the tokenizer)."""
    sizes = dict(_listed(repository))
    if not sizes:
        return
    name = f"{WEIGHTS}/{MANIFEST}"
    if sizes.get(name, _MAX_MANIFEST_BYTES + 1) > _MAX_MANIFEST_BYTES:
        raise UnboundedFiles(f"there is no {name} of a sensible size, so nothing was fetched")
    repository.download_artifacts(name, dst_path=str(target))
    try:
        records = read_manifest(target / WEIGHTS, digest=digest)
    except (ValueError, OSError) as error:
        raise UnboundedFiles(f"{WEIGHTS}: {error}; nothing else was fetched") from None
    allowed = 2 * sum(record["size"] for record in records.values()) + _SLACK_BYTES
    if (total := sum(sizes.values())) > allowed:
        raise UnboundedFiles(
            f"{total:,} bytes lie there, and at most {allowed:,} were published; they were not fetched"
        )
    repository.download_artifacts("", dst_path=str(target))


def _listed(repository: ArtifactRepository) -> Iterator[tuple[str, int]]:
    """Yield path and bytes of every remote file."""
    folders, num_files = [""], 0
    while folders:
        try:
            entries = repository.list_artifacts(folders.pop())
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            continue
        for entry in entries:
            num_files += 1
            if num_files > _MAX_FILES:
                raise UnboundedFiles(f"there are more than {_MAX_FILES:,} files; they were not fetched")
            if entry.is_dir:
                folders.append(entry.path)
            elif entry.file_size is None:
                raise UnboundedFiles(f"{entry.path} has no size, so nothing was fetched")
            else:
                yield entry.path, int(entry.file_size)
