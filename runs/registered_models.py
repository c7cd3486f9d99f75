"""Pin registered models of MLflow that a recipe names to a version when a run begins, and fetch them when they are read."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vantage.ledger import tracking
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.inputs import OtherModel
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.sources import Registered
from vantage.schemas.recipe.work import ModelImport, Work
from vantage.schemas.steps import OTHER_MODEL_PREFIX, reward_imports
from vantage.storage.measured_file import METRICS_FILE
from vantage.storage.sealed_folders import MANIFEST


def with_registered(recipe: ResolvedRecipe, workspace: Workspace) -> ResolvedRecipe:
    """Return the recipe, with each registered model as the version that MLflow has now; nothing is written.

    Raises:
        RunError: there is no such version and no ``otherwise``, or stages can neither sample from it nor score with it.
        vantage.ledger.to_mlflow.published_models.RegistryUnavailable: MLflow does not answer.
    """
    named = [
        (name, model, origin)
        for name, model in recipe.models.items()
        if isinstance(origin := model.origin, Registered) and origin.pin is None
    ]
    if not named:
        return recipe
    rewards = reward_imports(recipe)
    pinned = {}
    for name, model, origin in named:
        is_reward_model = f"{OTHER_MODEL_PREFIX}{name}" in rewards
        found = _pin(name, model, origin, workspace, is_reward_model=is_reward_model)
        pinned[name] = model.model_copy(update={"source": str(found)})
    return recipe.model_copy(update={"models": {**recipe.models, **pinned}})


def missing_models(models: Mapping[str, OtherModel]) -> list[str]:
    """Return a sentence for each other model of a pinned recipe that MLflow does not have yet."""
    return [
        f"models.{name}: MLflow has no {_said(model.origin)} yet; {model.stand_in} stands in for it in this run"
        for name, model in models.items()
        if isinstance(model.origin, Registered) and model.stand_in is not None
    ]


def registered_version(work: Work) -> tuple[str, ...]:
    """Return in words the registered model that a step of a pinned recipe imports; empty: it imports another model."""
    origin = work.model.origin if isinstance(work, ModelImport) else None
    return (f"{origin.name} version {origin.version}",) if isinstance(origin, Registered) else ()


def fetch_registered(registered: Registered, workspace: Workspace, target: Path) -> None:
    """Write the model's folder to ``target``, and compare every byte with the pinned digest.

    Raises:
        RunError: MLflow does not answer, has the version no longer, or its copy is damaged.
    """
    assert registered.version is not None and registered.digest is not None, "pinned"
    tracking.set_up_client()
    from vantage.ledger.to_mlflow.published_models import (  # imports MLflow
        DamagedCopy,
        RegistryUnavailable,
        UnusableVersion,
        fetch_model,
    )

    shutil.rmtree(target, ignore_errors=True)  # left by an attempt that was interrupted
    with tempfile.TemporaryDirectory(prefix="registered-", dir=target.parent) as temporary:
        try:
            folder = fetch_model(
                tracking.address(None, workspace.root),
                registered.name,
                version=registered.version,
                digest=registered.digest,
                target=Path(temporary),
            )
        except RegistryUnavailable as error:
            raise RunError(
                f"{error}; start it, or set MLFLOW_TRACKING_URI, and run the same command again"
            ) from error
        except (DamagedCopy, UnusableVersion) as error:
            raise RunError(str(error)) from error
        # these files belong to the published artifact; the import writes its own
        for ours in (MANIFEST, METRICS_FILE):
            (folder / ours).unlink(missing_ok=True)
        folder.rename(target)


def _pin(
    name: str, model: OtherModel, registered: Registered, workspace: Workspace, *, is_reward_model: bool
) -> Registered:
    field = f"models.{name}.source={model.source!r}"
    address = tracking.address(None, workspace.root)
    if tracking.is_missing_database(address):  # MLflow would create a missing database
        return _without_version(field, registered, model)
    tracking.set_up_client()
    from vantage.ledger.to_mlflow.published_models import (  # imports MLflow
        DamagedCopy,
        RegistryUnavailable,
        UnusableVersion,
        find_model,
    )

    try:
        found = find_model(
            address,
            registered.name,
            version=registered.version,
            alias=registered.alias,
            is_reward_model=is_reward_model,
        )
    except RegistryUnavailable as error:
        raise RegistryUnavailable(f"{field}: {error}; start it, or set MLFLOW_TRACKING_URI") from error
    except (DamagedCopy, UnusableVersion) as error:
        raise RunError(f"{field}: {error}") from error
    if found is None:
        return _without_version(field, registered, model)
    return Registered(registered.name, version=found.version, pin=found.digest)


def _without_version(field: str, registered: Registered, model: OtherModel) -> Registered:
    if model.otherwise is None:
        raise RunError(
            f"{field}: MLflow has no {_said(registered)}; publish one first, or name the stage that stands in for it as "
            "`otherwise`"
        )
    return registered.as_absent()


def _said(registered: Registered) -> str:
    if registered.alias is not None:
        return f"registered model {registered.name} with the alias {registered.alias}"
    return f"version {registered.version} of a registered model {registered.name}"
