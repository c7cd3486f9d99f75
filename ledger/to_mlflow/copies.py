"""Compare MLflow's copy of a published model with the artifact's manifest."""

import tempfile
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from vantage.ledger.published_copies import problems_in

_MISSING = "RESOURCE_DOES_NOT_EXIST"


def problems_of_copy(location: str, *, tracking_uri: str, digest: str) -> list[str]:
    """Return problems of the copy, one line each; empty: it is equal to the artifact, byte by byte.

    Every byte is read (about 1 GB/s from a disk); a server's copy is downloaded into a temporary folder.

    Args:
        location: MLflow's address of the logged model's files.
        digest: the artifact's content digest, which is the sha256 of its manifest.

    Raises:
        MlflowException, OSError: the server does not answer.
    """
    repository = get_artifact_repository(location, tracking_uri=tracking_uri)
    if isinstance(repository, LocalArtifactRepository):
        return problems_in(Path(repository.artifact_dir), digest)
    with tempfile.TemporaryDirectory(prefix="vantage-compare-") as temporary:
        try:
            repository.download_artifacts("", dst_path=temporary)
        except (MlflowException, OSError) as error:
            if not _is_missing(error):
                raise
        return problems_in(Path(temporary), digest)


def _is_missing(error: Exception) -> bool:
    """Return whether the server answers that there is no such copy (it may also not answer)."""
    if isinstance(error, MlflowException):
        return bool(error.error_code == _MISSING)
    return getattr(getattr(error, "response", None), "status_code", None) == 404
