"""The records say so where a model equals the one that it started from, or the one that it is measured against."""

import re

import pytest

from tests.ledger.small_run import EVALUATION, artifact, sha
from vantage.ledger.operations import Input
from vantage.ledger.remarks import compared_with_itself, learned_nothing, left_critic_out, remark_on
from vantage.schemas.records.artifacts import PolicyCheckpoint


def policy(name: str, files: str | None) -> PolicyCheckpoint:
    made: PolicyCheckpoint = artifact(PolicyCheckpoint, name, {})
    return made.model_copy(update={"files_digest": files and sha(files)})


SFT = policy("sft", "the same weights")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ("the same weights", "learned nothing: the best weights are those of sft"),
        ("others", None),
        (None, None),
    ],
)
def test_a_policy_whose_files_are_those_it_started_from_learned_nothing(
    files: str | None, said: str | None
) -> None:
    inputs = {"init": Input(stage="sft", artifact=SFT), "reference": Input(stage="sft", artifact=SFT)}
    trained = policy("policy", files)
    assert trained.digest != SFT.digest, "what was measured of them differs"
    assert learned_nothing(trained, inputs) == remark_on(trained, inputs) == said
    assert learned_nothing(trained, {}) is None


@pytest.mark.parametrize("files", ["the same weights", "others", None])
def test_two_roles_of_one_model_are_compared_with_itself(files: str | None) -> None:
    inputs = {
        "candidate": Input(stage="policy", artifact=policy("policy", files)),
        "baseline": Input(stage="sft", artifact=SFT),
    }
    said = compared_with_itself(inputs)
    assert said == remark_on(EVALUATION, inputs)
    if files == "the same weights":
        assert said == "policy holds the weights of sft: a model is compared with itself"
    else:
        assert said is None


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (1.0, None),
        (0.75, "the critic explained too little: over the iterations it counted for 75% of the advantages"),
    ],
)
def test_a_critic_that_was_left_out_is_said_to_be(weight: float, said: str | None) -> None:
    trained = policy("policy", "others").model_copy(update={"metrics": {"critic_weight_mean": weight}})
    assert left_critic_out(trained) == remark_on(trained, {}) == said
    assert remark_on(policy("policy", "others"), {}) is None


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (None, None),
        (1.0, None),
        (0.96, None),
        (1.35, None),
        (
            1.6,
            "1.60 times .* 1 to 1.33 is recommended .*; raise undesirable_weight, or lower desirable_weight",
        ),
        (0.4, "0.40 times .*; raise desirable_weight, or lower undesirable_weight"),
    ],
)
def test_weights_that_do_not_balance_the_labels_are_named(ratio: float | None, said: str | None) -> None:
    metrics = {} if ratio is None else {"label_weight_ratio": ratio}
    found = remark_on(policy("kto", "others").model_copy(update={"metrics": metrics}), {})
    assert found is None if said is None else re.search(said, found or "")
