"""The memory search gets the networks that an update computes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.training.memory_probe import Row
from vantage.tasks.updates.actor_critic import taken_by


class Policy:
    """Records how it is called."""

    def __init__(self, value_head: object) -> None:
        self.value_head = value_head
        self.asked: dict[str, Any] = {}

    def __call__(self, batch: object, **asked: Any) -> dict[str, torch.Tensor]:
        self.asked = asked
        return {"logprobs": torch.ones(2, 3), "entropy": torch.full((2, 3), 0.5)}


@pytest.mark.parametrize(
    ("coef", "kind", "reads_reference"), [(0.1, "full", True), (0.1, "k3", False), (0.0, "full", False)]
)
@pytest.mark.parametrize("value_head", [None, "a head"])
def test_a_pass_reads_what_the_losses_read(
    coef: float, kind: str, reads_reference: bool, value_head: str | None
) -> None:
    """The exact KL also holds the logits of the reference, which takes twice the memory of a pass without it."""
    policy = Policy(value_head)
    networks: Any = SimpleNamespace(
        models=SimpleNamespace(sampler="the sampler", reference="the reference"),
        policy=policy,
        critic=None,
        temperature=0.7,
        optimizers={"policy": "its optimizer"},
    )
    job: Any = SimpleNamespace(
        work=SimpleNamespace(
            algorithm=SimpleNamespace(kl_loss_coef=coef, kl_loss_kind=kind),
            pass_limits=PassLimits(share_prompts=True),
            arithmetic="bfloat16",
        ),
        generation=SimpleNamespace(max_response_tokens=5),
    )
    prompts: Any = SimpleNamespace(ids=[[1], [1, 2, 3]])
    taken: Any = taken_by(networks, prompts, job)
    assert taken.row == Row(3, 5, shares_prompt=True)
    assert (taken.precision, taken.optimizers, taken.sampler) == (
        "bfloat16",
        ["its optimizer"],
        "the sampler",
    )
    [read] = taken.computes
    sums = read("a batch")
    assert sums.tolist() == [6.0, 3.0]
    assert policy.asked == {
        "temperature": 0.7,
        "with_entropy": True,
        "reference": "the reference" if reads_reference else None,
        "with_values": value_head is not None,
    }
