"""Give an estimate the files of models that other runs have made: configuration, tokenizer, and weights that are here."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from vantage.runs.models_of_runs import model_before, pin_stage
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.inputs import SourcedModel
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.sources import StageOfRun

_AnyModel = TypeVar("_AnyModel", bound=SourcedModel)
_READ = ("config.json", "tokenizer.json")
"""Files of a model in a bucket that an estimate reads; its weights are not fetched."""


@contextmanager
def with_model_files(recipe: Recipe, workspace: Workspace) -> Iterator[tuple[Recipe, list[str]]]:
    """Yield the recipe with a folder in place of each model of another run, and notes for a reader of the estimate.

    For a stage that has made nothing yet, the model that its run begins with is taken, which has the same shape.

    Raises:
        RunError: there is no such run or stage, or it makes no model.
    """
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vantage-estimate-") as temporary:

        def located(place: str, model: _AnyModel) -> _AnyModel:
            origin = model.origin
            if not isinstance(origin, StageOfRun):
                return model
            if (before := model_before(f"{place}.source", origin, workspace)) is not None:
                notes.append(
                    f"{origin.named} is not made yet and is counted as the model that its run begins with"
                )
                return located(place, model.model_copy(update={"source": before.source, "base": before.base}))
            digest = str(pin_stage(f"{place}.source", origin, workspace).digest)
            folder = _folder(digest, workspace, Path(temporary))
            return model.model_copy(update={"source": str(folder)})

        models = {name: located(f"models.{name}", each) for name, each in recipe.models.items()}
        yield recipe.model_copy(update={"model": located("model", recipe.model), "models": models}), notes


def _folder(digest: str, workspace: Workspace, temporary: Path) -> Path:
    """Return the object's folder on this machine, or a folder with copies of its small files."""
    storage = workspace.storage
    if (folder := storage.local_folder(digest)) is not None:
        return folder
    (folder := temporary / digest).mkdir(exist_ok=True)
    for name in _READ:
        try:
            content = storage.read_file(digest, name)
        except (OSError, ValueError) as error:
            raise RunError(
                f"{name} of {digest[:12]} cannot be read ({error}); run its recipe again"
            ) from error
        if content is not None:
            (folder / name).write_bytes(content)
    return folder
