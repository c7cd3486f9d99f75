"""A state comes back from a checkpoint's JSON as it was, and one of another shape is refused by the field's name."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from vantage.algorithms.rewards import RunningMoments
from vantage.tasks.training.stage_state import (
    BestSoFar,
    FirstResponses,
    NoState,
    WatchedSoFar,
    state_from_json,
)
from vantage.tasks.updates.policy_state import AdaptingPolicyState, PolicyState
from vantage.tasks.value_pretraining import ValueState

STATES = [
    NoState(),
    BestSoFar(best=-0.1, best_iteration=3),
    BestSoFar(watched=WatchedSoFar(judged=(0.5,), first=FirstResponses(("a\ud7ff\n",), (3,), (0.25,)))),
    ValueState(best=None, without_gain=2),
    PolicyState(
        best=1 / 3, batches=7, kl_coef=0.1, kl_penalty_coef=3.0, moments=RunningMoments(4, 0.5, 16.0)
    ),
    AdaptingPolicyState(best=0.5, batches=2, entropy_coef=0.25, entropy_is_low=False),
]


@pytest.mark.parametrize("state", STATES)
def test_a_state_comes_back_exactly(state: Any) -> None:
    saved = json.loads(json.dumps(asdict(state)))
    assert state_from_json(type(state)(), saved, path="stage") == state


def test_the_checkpoints_before_states_had_classes_can_be_resumed() -> None:
    """The JSON of policy stages had these fields before states had classes."""
    saved = {
        "best": 0.25,
        "best_iteration": 4,
        "batches": 6,
        "kl_coef": 0.05,
        "kl_penalty_coef": 0.0,
        "moments": {"count": 0, "mean": 0.0, "m2": 0.0},
    }
    expected = PolicyState(best=0.25, best_iteration=4, batches=6, kl_coef=0.05)
    assert state_from_json(PolicyState(), saved, path="stage") == expected


def test_only_a_stage_whose_entropy_coefficient_adapts_keeps_it() -> None:
    """The training state of any other stage keeps its bits, since it has no field of the entropy coefficient."""
    added = asdict(AdaptingPolicyState()).keys() - asdict(PolicyState()).keys()
    assert added == {"entropy_coef", "entropy_is_low"}


def test_a_watch_of_an_earlier_version_can_be_resumed() -> None:
    """The state of that version did not contain the first policy's responses."""
    saved = {
        **asdict(BestSoFar(best=0.5)),
        "watched": {"judged": [0.5, 1.0], "rewards": [0.1, 0.2], "falls": 1, "worse": 2},
    }
    watched = WatchedSoFar(judged=(0.5, 1.0), rewards=(0.1, 0.2), falls=1, worse=2)
    assert state_from_json(BestSoFar(), saved, path="stage") == BestSoFar(best=0.5, watched=watched)


def test_another_shape_is_refused_by_name() -> None:
    saved = asdict(PolicyState())
    with pytest.raises(ValueError, match="stage.batches is missing"):
        state_from_json(PolicyState(), {k: v for k, v in saved.items() if k != "batches"}, path="stage")
    with pytest.raises(ValueError, match="stage.momenta is not expected"):
        state_from_json(PolicyState(), {**saved, "momenta": 1}, path="stage")
    with pytest.raises(ValueError, match="stage.moments.m2 is missing"):
        state_from_json(PolicyState(), {**saved, "moments": {"count": 0, "mean": 0.0}}, path="stage")
