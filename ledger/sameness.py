"""What it means where an artifact holds the same files as what it was made from: nothing was learned, or compared."""

from collections.abc import Mapping

from ledger.operations import Input
from schemas.records.artifacts import StoredArtifact, is_same


def learned_nothing(artifact: StoredArtifact, inputs: Mapping[str, Input]) -> str | None:
    """Says so of a model that is, file by file, the one that its stage started from; None of any other."""
    init = inputs.get("init")
    if init is None or not is_same(artifact, init.artifact):
        return None
    return f"learned nothing: the best weights are those of {init.stage}"


def compared_with_itself(inputs: Mapping[str, Input]) -> str | None:
    """Says so where a stage's candidate and baseline are, file by file, one model; None where they are two."""
    candidate, baseline = inputs.get("candidate"), inputs.get("baseline")
    if candidate is None or baseline is None or not is_same(candidate.artifact, baseline.artifact):
        return None
    return f"{candidate.stage} holds the weights of {baseline.stage}: a model is compared with itself"


def remark_on(artifact: StoredArtifact, inputs: Mapping[str, Input]) -> str | None:
    """Whichever of the two can be said of a stage; None where neither can."""
    return learned_nothing(artifact, inputs) or compared_with_itself(inputs)
