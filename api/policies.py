"""Load policies in Python, with the settings that their recipe samples with."""

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vantage.api.places import Place, workspace_of
from vantage.models.folders import load_tokenizer
from vantage.models.stored_models import load_stored_policy
from vantage.runs.meanings import MADE, Command, FolderNamed
from vantage.runs.named_models import open_named_model
from vantage.schemas.kind import ArtifactKind
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.records.model_files import ModelFiles


@dataclass(frozen=True)
class Policy:
    """A policy in memory."""

    model: PreTrainedModel
    """On the CPU, float32, in evaluation mode; adapters are merged."""
    tokenizer: PreTrainedTokenizerBase
    generation: Generation
    """Temperature, lengths and stop tokens with which its recipe samples."""
    label: str
    """The origin of the model, in words."""


def load_policy(named: str, *, workspace: Place = None) -> Policy:
    """Load a policy as a model of ``transformers``.

    Args:
        named: a run (its published policy, else its last), ``RUN/STAGE``, a registered model of MLflow (``NAME@ALIAS``), or a
            Hugging Face folder (docs/names.md).
        workspace: a folder or a bucket.

    Raises:
        ValueError: there is no such model, it is no policy, or its files are refused.
        OSError: its files are damaged.
    """
    kinds: tuple[ArtifactKind, ...] = ("policy",)
    command = Command("load_policy", (*MADE, FolderNamed))
    with open_named_model(workspace_of(workspace), named, command, kinds=kinds) as found:
        assert found.folder is not None, "a source is not accepted"
        files = ModelFiles(found.folder, found.base)
        model = load_stored_policy(files)
        tokenizer = load_tokenizer(files.folder)
    return Policy(model.eval(), tokenizer, found.generation, found.label)
