"""Find versions of registered models by name, and fetch their copies, which are compared with what was published."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient

from vantage.ledger.published_copies import WEIGHTS, problems_in
from vantage.ledger.to_mlflow.copies import problems_of_copy
from vantage.ledger.to_mlflow.logged_models import model_in
from vantage.ledger.to_mlflow.served_files import address_of_version
from vantage.ledger.tracking import without_login, without_password
from vantage.storage.sealed_folders import MANIFEST, file_sha256, read_manifest

_PARENT = "vantage.parent."
_PUBLISHED_TAGS = {"vantage.digest", "vantage.stage", "vantage.stage_key", "vantage.run_id"}
"""Tags of each version that a run has published."""
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
"""Version numbers; MLflow's databases fail on larger ones, which are out of their range."""
_QUOTES = frozenset("'\"`\\")


class NoSuchModel(ValueError):
    """MLflow has no such registered model, version or alias."""


class UnusableVersion(NoSuchModel):
    """The version exists, but Vantage has not published it, or it is not a whole policy."""


class RegistryUnavailable(ConnectionError):
    """MLflow does not answer."""


class DamagedCopy(OSError):
    """MLflow's copy of a published model differs from what was published."""


class PublishedVersion(NamedTuple):
    """A version of a registered model that a Vantage run has published."""

    name: str
    version: str
    location: str
    """The address from which MLflow loads it."""
    digest: str
    """Content digest of the artifact."""
    stage: str
    stage_key: str
    run_id: str
    """Id of the Vantage run."""
    parents: Mapping[str, str]
    """Role → content digest of the input."""
    params: Mapping[str, str]
    """The run's recipe, flattened, as text; empty if MLflow no longer has the run."""

    def param(self, name: str) -> Any:
        """Return a value of the recipe; None where there is none.

        Raises:
            UnusableVersion: MLflow's param is no JSON, and every run writes it as JSON.
        """
        text = self.params.get(name)
        try:
            return None if text is None else json.loads(text)
        except (ValueError, RecursionError):
            raise self.unusable(name) from None

    def unusable(self, name: str) -> UnusableVersion:
        """Return the error for a param that somebody has changed in MLflow."""
        return UnusableVersion(
            f"version {self.version} of {self.name}: MLflow's param {name}={self.params.get(name, '')[:100]!r} is no value that a run "
            f"has recorded; see what else differs (`vantage audit {self.name}/{self.version}`), and use another version"
        )


def find_version(
    tracking_uri: str, name: str, *, version: str | None = None, alias: str | None = None
) -> PublishedVersion:
    """Return a version by its number or alias; without both, the newest.

    Raises:
        NoSuchModel: there is no such version, or Vantage did not publish it.
        MlflowException, OSError: the server does not answer.
    """
    client = _client(tracking_uri, name)
    found = _find(client, name, version, alias)
    tags = found.tags
    if not set(tags) >= _PUBLISHED_TAGS or found.source is None:
        raise UnusableVersion(
            f"version {found.version} of {name} was not published by Vantage; load it with MLflow, and give its folder"
        )
    model_id = model_in(f"{found.source}/")
    if model_id is None:
        raise UnusableVersion(f"version {found.version} of {name} has no logged model; publish it again")
    model = client.get_logged_model(model_id)
    parents = {
        tag.removeprefix(_PARENT): value for tag, value in model.tags.items() if tag.startswith(_PARENT)
    }
    return PublishedVersion(
        name=name,
        version=str(found.version),
        location=address_of_version(client, found.name, str(found.version)),
        digest=tags["vantage.digest"],
        stage=tags["vantage.stage"],
        stage_key=tags["vantage.stage_key"],
        run_id=tags["vantage.run_id"],
        parents=parents,
        params=_recipe(client, found.run_id),
    )


def find_published(
    tracking_uri: str, name: str, *, version: str | None = None, alias: str | None = None
) -> PublishedVersion:
    """Find a version as ``find_version`` does. Raises RegistryUnavailable if MLflow does not answer."""
    with _answering(tracking_uri):
        return find_version(tracking_uri, name, version=version, alias=alias)


def version_of_alias(tracking_uri: str, name: str, alias: str) -> str:
    """Return the number of the version that an alias points to, also of one that Vantage did not publish.

    Raises:
        NoSuchModel: there is no such model or alias.
        RegistryUnavailable: MLflow does not answer.
    """
    with _answering(tracking_uri):
        return str(_find(_client(tracking_uri, name), name, None, alias).version)


def find_by_digest(tracking_uri: str, name: str, digest: str) -> PublishedVersion | None:
    """Return the version of a model that holds an artifact; None: MLflow has none. Raises RegistryUnavailable without an
    answer."""
    with _answering(tracking_uri):
        client = _client(tracking_uri, name)
        found = client.search_model_versions(f"name = '{name}' AND tags.`vantage.digest` = '{digest}'")
        if not found:
            return None
        first = min(found, key=lambda each: int(each.version))
        return find_version(tracking_uri, name, version=str(first.version))


def problems_of_published(tracking_uri: str, found: PublishedVersion) -> list[str]:
    """Return problems of MLflow's copy of a version, reading every byte. Raises RegistryUnavailable without an answer."""
    with _answering(tracking_uri):
        return problems_of_copy(found.location, tracking_uri=tracking_uri, digest=found.digest)


def find_model(
    tracking_uri: str,
    name: str,
    *,
    version: str | None = None,
    alias: str | None = None,
    is_reward_model: bool = False,
) -> PublishedVersion | None:
    """Return a version that holds a whole model; None: MLflow has no such model, version or alias. Fetches only descriptions.

    Args:
        is_reward_model: whether it must be a reward model, and not a policy.

    Raises:
        UnusableVersion: it was not published by Vantage, or holds adapters alone or a model of the other kind.
        DamagedCopy: its manifest differs from the published one.
        RegistryUnavailable: MLflow does not answer.
    """
    with _answering(tracking_uri):
        try:
            found = find_version(tracking_uri, name, version=version, alias=alias)
        except UnusableVersion:
            raise
        except NoSuchModel:
            return None
        copy = get_artifact_repository(found.location, tracking_uri=tracking_uri)
        with tempfile.TemporaryDirectory(prefix="vantage-version-") as temporary:
            weights = Path(temporary) / WEIGHTS
            copy.download_artifacts(f"{WEIGHTS}/{MANIFEST}", dst_path=temporary)
            try:
                files = read_manifest(weights, digest=found.digest)
            except ValueError as error:
                raise _damaged(found, str(error)) from None
            if "config.json" in files:
                copy.download_artifacts(f"{WEIGHTS}/config.json", dst_path=temporary)
                if file_sha256(weights / "config.json") != files["config.json"]["sha256"]:
                    raise _damaged(
                        found, f"{WEIGHTS}: config.json: its bytes are not those that were published"
                    )
            _require_kind(found, weights, files, is_reward_model=is_reward_model)
    return found


def fetch_model(tracking_uri: str, name: str, *, version: str, digest: str, target: Path) -> Path:
    """Return the folder of a version whose content digest is known, fetched into ``target``; every byte is compared.

    Raises:
        UnusableVersion: the version no longer exists, or holds something else.
        DamagedCopy: its files differ from the published ones.
        RegistryUnavailable: MLflow does not answer.
    """
    with _answering(tracking_uri):
        try:
            found = find_version(tracking_uri, name, version=version)
        except UnusableVersion:
            raise
        except NoSuchModel as error:
            raise UnusableVersion(f"the run compares with version {version} of {name}, and {error}") from None
        if found.digest != digest:
            raise UnusableVersion(
                f"version {version} of {name} holds {found.digest[:12]}, and the run compares with {digest[:12]}: the "
                "registered model was made anew; start a new run"
            )
        return fetch_copy(found, tracking_uri=tracking_uri, target=target)


@contextmanager
def _answering(tracking_uri: str) -> Iterator[None]:
    """Raise RegistryUnavailable for every way in which MLflow gives no answer."""
    try:
        yield
    except DamagedCopy:
        raise
    except (MlflowException, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise RegistryUnavailable(
            f"MLflow at {without_password(tracking_uri)} does not answer ({without_login(first, tracking_uri)})"
        ) from error


def _require_kind(
    found: PublishedVersion, weights: Path, files: Mapping[str, Any], *, is_reward_model: bool
) -> None:
    what = f"version {found.version} of {found.name}"
    if "adapter_config.json" in files:
        raise UnusableVersion(f"{what} holds adapters alone; publish the whole model, with merge: true")
    try:
        architectures = json.loads((weights / "config.json").read_bytes()).get("architectures") or [""]
        first = str(architectures[0])
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(found, "config.json is not a model's") from error
    if not is_reward_model and first.endswith("ForSequenceClassification"):
        raise UnusableVersion(f"{what} is a reward model; name one that a policy was published as")
    if is_reward_model and "scalar.json" not in files:
        raise UnusableVersion(f"{what} is a policy; name one that a reward model was published as")


def fetch_copy(found: PublishedVersion, *, tracking_uri: str, target: Path) -> Path:
    """Return the model's own folder, fetched into ``target``; every byte is compared with the digest.

    Raises:
        DamagedCopy: the copy differs, or is missing.
        MlflowException, OSError: the server does not answer.
    """
    get_artifact_repository(found.location, tracking_uri=tracking_uri).download_artifacts(
        "", dst_path=str(target)
    )
    problems = problems_in(target, found.digest)
    if problems:
        raise _damaged(found, "; ".join(problems))
    return target / WEIGHTS


def _damaged(found: PublishedVersion, problems: str) -> DamagedCopy:
    return DamagedCopy(
        f"MLflow's copy of {found.name} version {found.version} is damaged: {problems}; run the recipe again, which makes "
        "the copy again, or export it from its run"
    )


def _client(tracking_uri: str, name: str) -> MlflowClient:
    """Return a client for questions about a model. The name is checked first, since a client creates a missing database."""
    if set(name) & _QUOTES:  # in a search, the text after a quotation mark would be read as another condition
        raise NoSuchModel(
            f"{name!r} is no name of a registered model: it has a quotation mark or a backslash"
        )
    return MlflowClient(tracking_uri=tracking_uri)


def _find(client: MlflowClient, name: str, version: str | None, alias: str | None) -> Any:
    try:
        if alias is not None:
            return client.get_model_version_by_alias(name, alias)
        if version is not None and _VERSION.fullmatch(version):
            return client.get_model_version(name, version)
        versions = [] if version is not None else list(client.search_model_versions(f"name = '{name}'"))
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        versions = []
    if not versions:
        what = f" with the alias {alias}" if alias else f" with the version {version}" if version else ""
        raise NoSuchModel(f"MLflow has no registered model {name}{what}; `mlflow ui` shows what there is")
    return max(versions, key=lambda each: int(each.version))


def _recipe(client: MlflowClient, run_id: str | None) -> Mapping[str, str]:
    """Return the parameters of the parent run of the stage's run."""
    try:
        if run_id is None:
            return {}
        parent = client.get_run(run_id).data.tags.get("mlflow.parentRunId")
        return {} if parent is None else dict(client.get_run(parent).data.params)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {}
