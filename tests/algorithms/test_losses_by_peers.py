"""Our losses on a thousand random minibatches equal those of verl, TRL and Skywork-OR1, recorded by ``record_peers.py``."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.peer_cases import COUNT, PeerCase, entropies_of, peer_case, projected
from vantage.algorithms.bounded_ratio import clipped_weight_gradient, geometric_mean_surrogate, soft_gate
from vantage.algorithms.covariance import (
    selected_kl_loss,
    token_covariances,
    tokens_to_clip,
    tokens_to_hold,
)
from vantage.algorithms.entropy_control import EntropyController
from vantage.algorithms.kl_loss import reference_kl_loss
from vantage.algorithms.policy_loss import clipped_surrogate, log_range, where_clip_binds


@cache
def record() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("losses_by_peers.json").read_text())
    return found


def both(case: PeerCase) -> dict[str, float | None]:
    return {"clip_range_low": case.clip_range_low, "clip_range_high": case.clip_range_high}


def gspo(case: PeerCase, leaf: Tensor, advantages: Tensor) -> Tensor:
    tokens = (leaf, case.old_logprobs, advantages, case.mask)
    return clipped_surrogate(*tokens, **both(case), ratio_level="sequence", aggregation="sequence").loss


def cispo(case: PeerCase, leaf: Tensor, advantages: Tensor, *, low: float | None) -> Tensor:
    return clipped_weight_gradient(
        leaf,
        case.old_logprobs,
        advantages,
        case.mask,
        clip_range_low=low,
        clip_range_high=case.clip_range_high,
        aggregation="token",
    ).loss


def sapo(case: PeerCase, leaf: Tensor, advantages: Tensor, *, level: Any = "token") -> Tensor:
    positive, negative = case.temperatures
    return soft_gate(
        leaf,
        case.old_logprobs,
        advantages,
        case.mask,
        temperature_positive=positive,
        temperature_negative=negative,
        ratio_level=level,
        aggregation="sequence",
    ).loss


def gmpo(case: PeerCase, leaf: Tensor) -> Tensor:
    tokens = (leaf, case.old_logprobs, case.response_advantages, case.mask)
    return geometric_mean_surrogate(*tokens, **both(case), aggregation="sequence").loss


def clip_cov(case: PeerCase, leaf: Tensor) -> Tensor:
    lowest, highest = log_range(case.clip_range_low, case.clip_range_high)
    selected = tokens_to_clip(
        token_covariances(leaf, case.advantages, case.mask),
        case.mask,
        where_clip_binds(leaf - case.old_logprobs, case.advantages, lowest=lowest, highest=highest),
        low=0.1,
        high=2.0,
        share=case.share,
        generator=torch.Generator().manual_seed(7),
    )
    advantages = case.advantages.masked_fill(selected, 0.0)
    tokens = (leaf, case.old_logprobs, advantages, case.mask)
    return clipped_surrogate(*tokens, **both(case), aggregation="token").loss


def kl_cov(case: PeerCase, leaf: Tensor) -> Tensor:
    covariances = token_covariances(leaf, case.advantages, case.mask)
    selected = tokens_to_hold(covariances, case.mask, share=case.share)
    held = selected_kl_loss(leaf, case.old_logprobs, case.mask, selected, aggregation="token")
    tokens = (leaf, case.old_logprobs, case.advantages, case.mask)
    plain = clipped_surrogate(*tokens, clip_range_low=None, clip_range_high=None, aggregation="token")
    return plain.loss + case.kl_coef * held.loss


def decoupled_ppo(case: PeerCase, leaf: Tensor) -> Tensor:
    """Return the loss whose proximal policy is old, and whose weights are of old over the sampler."""
    tokens = (leaf, case.old_logprobs, case.advantages * case.weights, case.mask)
    return clipped_surrogate(*tokens, **both(case), dual_clip=3.0, aggregation="token").loss


def unbiased_k3(case: PeerCase, leaf: Tensor) -> Tensor:
    tokens = (leaf, case.ref_logprobs, case.old_logprobs, case.mask)
    return reference_kl_loss(*tokens, kind="k3", through_ratio=True, aggregation="sequence").loss


OURS: dict[tuple[str, str], Callable[[PeerCase, Tensor], Tensor]] = {
    ("verl", "gspo"): lambda case, leaf: gspo(case, leaf, case.advantages),
    ("verl", "cispo"): lambda case, leaf: cispo(case, leaf, case.advantages, low=case.clip_range_low),
    ("verl", "sapo"): lambda case, leaf: sapo(case, leaf, case.advantages),
    ("verl", "geo_mean"): gmpo,
    ("verl", "clip_cov"): clip_cov,
    ("verl", "kl_cov"): kl_cov,
    ("verl", "vanilla"): decoupled_ppo,
    ("trl", "gspo"): lambda case, leaf: gspo(case, leaf, case.response_advantages),
    ("trl", "cispo"): lambda case, leaf: cispo(case, leaf, case.response_advantages, low=None),
    ("trl", "sapo"): lambda case, leaf: sapo(case, leaf, case.response_advantages),
    ("trl", "sapo of responses"): lambda case, leaf: sapo(
        case, leaf, case.response_advantages, level="sequence"
    ),
    ("trl", "k3 with its bias corrected"): unbiased_k3,
}


def test_every_recorded_loss_has_ours() -> None:
    assert set(OURS) == {(library, name) for library in ("verl", "trl") for name in record()[library]}


@pytest.mark.parametrize("library, name", OURS, ids=[" ".join(each) for each in OURS])
def test_a_thousand_minibatches_have_the_loss_and_gradient_of_another_library(
    library: str, name: str
) -> None:
    ours = []
    for number in range(COUNT):
        case = peer_case(number)
        leaf = case.logprobs.clone().requires_grad_()
        ours.append(projected(OURS[library, name](case, leaf), leaf, case.direction))
    theirs = record()[library][name]
    expected = torch.tensor(theirs, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), expected, rtol=1e-6, atol=1e-8)


def test_the_entropy_coefficient_moves_as_its_authors_code_moves_it() -> None:
    for number, theirs in enumerate(record()["skywork"]):
        controller = EntropyController(0.01, is_low=True, target=0.25, step=0.005, highest=0.02)
        applied = []
        for entropy in entropies_of(number):
            controller = controller.update(entropy)
            applied.append(controller.applied)
        assert applied == pytest.approx(theirs, abs=1e-9), number
