"""Remarks on artifacts that are equal to their inputs: nothing was learned, or a model was compared with itself."""

from collections.abc import Mapping

from ledger.operations import Input
from schemas.records.artifacts import StoredArtifact, is_same


def learned_nothing(artifact: StoredArtifact, inputs: Mapping[str, Input]) -> str | None:
    """A remark if the model has the same files as the one that its stage started from, else None."""
    init = inputs.get("init")
    if init is None or not is_same(artifact, init.artifact):
        return None
    return f"learned nothing: the best weights are those of {init.stage}"


def compared_with_itself(inputs: Mapping[str, Input]) -> str | None:
    """A remark if a stage's candidate and baseline have the same files, else None."""
    candidate, baseline = inputs.get("candidate"), inputs.get("baseline")
    if candidate is None or baseline is None or not is_same(candidate.artifact, baseline.artifact):
        return None
    return f"{candidate.stage} holds the weights of {baseline.stage}: a model is compared with itself"


def remark_on(artifact: StoredArtifact, inputs: Mapping[str, Input]) -> str | None:
    """The remark on a stage, if one of the two applies, else None."""
    return learned_nothing(artifact, inputs) or compared_with_itself(inputs)
