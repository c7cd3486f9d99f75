"""Bytes of a checkpoint within a stage: trained weights, the optimisers' state, and the best weights so far."""

from vantage.estimates.memory import optimizer_bytes, weight_bytes
from vantage.estimates.model_shape import model_shape
from vantage.estimates.stage_workloads import workload_of
from vantage.estimates.token_counts import DataCount, Lengths
from vantage.estimates.workload_parts import Subject
from vantage.models.model_config import read_config
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stages import ValuePretraining

_BEST = {
    "value_pretraining": "critic",
    "policy_optimization": "policy",
    "best_of_n": "policy",
    "distillation": "policy",
}
"""Kind → role of the network whose best weights a checkpoint contains besides the last ones."""
_ROW = Lengths((1,))
_NOT_COUNTED = DataCount(1, 1, 1, _ROW, (_ROW, _ROW), _ROW, 1.0, "not counted")


_NETWORKS, _MOST_OF_A_WEIGHT = 2, 24
"""Most networks that a stage trains, and most bytes of a checkpoint for each of their weights: the weight, the best one, and two
moments of both."""


def most_checkpoint_bytes(model: Model) -> int:
    """Return a number of bytes that no stage's checkpoint exceeds; this is quicker than ``checkpoint_bytes``.

    Raises:
        ValueError: the model's configuration cannot be read here.
    """
    return _NETWORKS * _MOST_OF_A_WEIGHT * model_shape(read_config(model.whole)).weights


def checkpoint_bytes(recipe: ResolvedRecipe, name: str) -> int:
    """Return the bytes of a checkpoint of ``stages.NAME``, on all ranks together; 0 for a stage that trains nothing.

    Responses that a stage keeps for its next step are left out, since they are small compared to the weights.

    Raises:
        ValueError: the model's configuration cannot be read here.
    """
    shape = model_shape(read_config(recipe.model.whole))
    subject = Subject(recipe, name, shape, lambda _: _NOT_COUNTED, _ROW)
    workload = workload_of(subject)
    trained = [each for each in workload.networks if each.is_trained]
    best = [each for each in trained if each.role == _BEST.get(subject.stage.kind)]
    moving = list(trained)
    if isinstance(subject.stage, ValuePretraining) and subject.stage.keep_optimizer:
        moving += best
    state = optimizer_bytes(sum(each.trained_weights for each in moving), in_8_bits=workload.has_8_bit_states)
    return state + sum(weight_bytes(each.trained_weights) for each in (*trained, *best))
