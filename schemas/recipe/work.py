"""What a stage process can be asked to do: the base of every kind, and the kinds that no recipe writes."""

from typing import TYPE_CHECKING, Literal

from schemas.frozen import Frozen
from schemas.recipe.inputs import (
    Content,
    Data,
    Model,
    Shares,
    Verifier,
)


class Work(Frozen):
    """Something that a stage process can be asked to do; its ``kind`` is a row of ``schemas.kinds``."""

    if TYPE_CHECKING:  # every class has a literal of its own
        kind: str


class ImportModel(Work):
    """The implicit step that copies the recipe's model into the store."""

    kind: Literal["import_model"] = "import_model"
    model: Model


class PrepareData(Work):
    """The implicit step that maps, validates and splits one dataset of the recipe."""

    kind: Literal["prepare_data"] = "prepare_data"
    content: Content
    data: Data
    shares: Shares = Shares()
    """The recipe's, by which it is decided on which side a prompt is."""
    alone: bool = False
    """Whether no other dataset has to agree, so that a number of rows may reach beyond its share."""


class ImportVerifier(Work):
    """The implicit step that copies one of the recipe's verifiers into the store."""

    kind: Literal["import_verifier"] = "import_verifier"
    verifier: Verifier
