"""An audit distinguishes the training state that a stage has left from another stage's."""

import pytest

from vantage.review.audit.shorter_stages import edge_problem, is_state, state_problems
from vantage.schemas.records.artifacts import PolicyCheckpoint, TrainingState
from vantage.schemas.records.extensions import state_key, state_key_parts
from vantage.storage.refs import Ref

OF = "a" * 64
DIGEST = "d" * 64


def state_ref(of: str = OF, *, parents: dict[str, str] | None = None) -> Ref:
    artifact = TrainingState(
        uri=f"objects/{DIGEST}", digest=DIGEST, stage_key=state_key(of), parents=parents or {}
    )
    return Ref(artifact=artifact, attempt=1, run_id="r", key_parts=state_key_parts(of), provenance={})


def test_a_state_belongs_to_the_stage_whose_key_it_names() -> None:
    assert edge_problem(state_ref(), OF) is None
    assert edge_problem(None, OF) is None
    said = edge_problem(state_ref("b" * 64), OF)
    assert (
        said == "it is the training state of stage key bbbbbbbbbbbb, and not of what the stage goes on from"
    )


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        (state_ref(), []),
        (state_ref(parents={"init": DIGEST}), ["a training state has no parents, and the ref names some"]),
        (
            state_ref().model_copy(update={"key_parts": {**state_key_parts(OF), "revision": 2}}),
            ["key_parts are not those of a training state"],
        ),
    ],
)
def test_a_state_has_the_key_of_a_state(ref: Ref, said: list[str]) -> None:
    assert list(state_problems(ref)) == said


def test_a_policy_is_no_state() -> None:
    policy = PolicyCheckpoint(
        uri=f"objects/{DIGEST}", digest=DIGEST, stage_key=OF, parents={}, tokenizer_digest=DIGEST
    )
    assert not is_state(state_ref().model_copy(update={"artifact": policy}))
    assert is_state(state_ref()) and not is_state(None)
