"""Push an exported folder to a repository of the Hugging Face hub, in one commit, and read it back."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import httpx
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

from vantage.review.exports.pushing import PushRefused, card_last, sha256_of
from vantage.runs.named_models import PROVENANCE_FILE
from vantage.schemas.safe_text import without_secrets
from vantage.storage.hashed_files import chunks_of

_OF_THE_HUB = frozenset({".gitattributes"})
"""Files that the hub itself makes in a new repository."""


class HubRepository:
    """A repository of models that only ``vantage export --push`` writes."""

    def __init__(self, repository: str) -> None:
        self._repository = repository
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))

    def send(self, folder: Path, files: Mapping[str, str]) -> str:
        """Commit the files at once, and read that commit back; see ``vantage.review.exports.pushing.Pushed``.

        A repository that does not exist is created, and is private. Files of an earlier push that this model does not have are
        removed in the same commit.
        """
        try:
            commit = self._commit(folder, files)
            self._require_same(commit, files)
        except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
            reason = without_secrets(str(error) or type(error).__name__).strip().splitlines()[0][:300]
            raise PushRefused(
                f"hub:{self._repository} did not take the model ({reason}); check its name and the login (HF_TOKEN, with the right to "
                "write), and run the command again"
            ) from error
        return f"hub:{self._repository}@{commit}"

    def _commit(self, folder: Path, files: Mapping[str, str]) -> str:
        self._api.create_repo(self._repository, private=True, exist_ok=True)
        parent = self._api.repo_info(self._repository).sha
        there = self._listed(None)
        if there and PROVENANCE_FILE not in there:
            raise PushRefused(
                f"hub:{self._repository} has {min(there)}, which no push of Vantage has made; name a new repository"
            )
        added = [CommitOperationAdd(path, str(folder / path)) for path in card_last(files)]
        removed = [CommitOperationDelete(path) for path in sorted(there - set(files))]
        made = self._api.create_commit(
            self._repository,
            [*added, *removed],
            commit_message="Push an audited model with Vantage",
            parent_commit=parent if there else None,
        )
        return str(made.oid)

    def _require_same(self, commit: str, files: Mapping[str, str]) -> None:
        """Read every file of the commit back and compare it."""
        listed = self._listed(commit)
        for path, expected in files.items():
            found = self._sha256(commit, path) if path in listed else "missing"
            if found != expected:
                raise PushRefused(
                    f"{path} of hub:{self._repository}@{commit[:12]} is {found[:12]}, and the audited file {expected[:12]}: what is there "
                    "now is not the audited model; remove that commit, and find out what changes the repository"
                )

    def _listed(self, commit: str | None) -> set[str]:
        try:
            listed = self._api.list_repo_files(self._repository, revision=commit)
        except RevisionNotFoundError:  # a repository without a commit
            return set()
        return set(listed) - _OF_THE_HUB

    def _sha256(self, commit: str, path: str) -> str:
        with tempfile.TemporaryDirectory(prefix="vantage-read-back-") as folder:
            file = hf_hub_download(
                self._repository, path, revision=commit, local_dir=folder, endpoint=self._api.endpoint
            )
            return sha256_of(chunks_of(Path(file)))
