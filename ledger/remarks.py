"""Remarks on stages: nothing was learned, a model was compared with itself, a critic was left out, weights do not balance labels."""

from collections.abc import Mapping

from vantage.ledger.operations import Input
from vantage.schemas.records.alarms import COMPARED_WITH_ITSELF, LEARNED_NOTHING
from vantage.schemas.records.artifacts import StoredArtifact, is_same
from vantage.schemas.records.label_weights import imbalance


def learned_nothing(artifact: StoredArtifact, inputs: Mapping[str, Input]) -> str | None:
    """Return a remark if the model has the same files as the one that its stage started from, else None."""
    init = inputs.get("init")
    if init is None or not is_same(artifact, init.artifact):
        return None
    return f"{LEARNED_NOTHING}the best weights are those of {init.stage}"


def compared_with_itself(inputs: Mapping[str, Input]) -> str | None:
    """Return a remark if a stage's candidate and baseline have the same files, else None."""
    candidate, baseline = inputs.get("candidate"), inputs.get("baseline")
    if candidate is None or baseline is None or not is_same(candidate.artifact, baseline.artifact):
        return None
    return f"{candidate.stage} holds the weights of {baseline.stage}: {COMPARED_WITH_ITSELF}"


def left_critic_out(artifact: StoredArtifact) -> str | None:
    """Return a remark if not all advantages came from the critic, because it explained too little; else None."""
    weight = artifact.metrics.get("critic_weight_mean")
    if weight is None or weight == 1:
        return None
    return (
        f"the critic explained too little: over the iterations it counted for {weight:.0%} of the advantages"
    )


def unbalanced_labels(artifact: StoredArtifact) -> str | None:
    """Return a remark if the weights of labelled responses do not balance their numbers, else None."""
    ratio = artifact.metrics.get("label_weight_ratio")
    return None if ratio is None else imbalance(ratio)


def remark_on(artifact: StoredArtifact, inputs: Mapping[str, Input]) -> str | None:
    """Return the remarks that apply to a stage; None if none applies."""
    remarks = (
        learned_nothing(artifact, inputs),
        compared_with_itself(inputs),
        left_critic_out(artifact),
        unbalanced_labels(artifact),
    )
    return "; ".join(remark for remark in remarks if remark) or None
