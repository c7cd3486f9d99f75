"""The rules of the proof judge hand-made log-probabilities: an engine that rounds, one that is old, and one that is half new."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vantage.tasks.rollout.held_weights import WeightsDiffer, check_held


def numbers(seed: int, *, size: float) -> Tensor:
    """Return (4, 15) numbers whose mean absolute value is about ``size``."""
    drawn = torch.randn(4, 15, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn * size / drawn.abs().mean()


EXACT = numbers(0, size=3.0) - 10.0


@pytest.mark.parametrize("seed", range(1, 40))
def test_rounding_in_bfloat16_is_no_other_policy(seed: int) -> None:
    """The gaps are those measured on SmolLM2: 0.1 for vLLM and 0.04 for the policy. Between the two checks nothing but
    rounding changes.
    """
    engine = EXACT + numbers(seed, size=0.1)
    before, now = (EXACT + numbers(100 * seed + each, size=0.04) for each in range(2))
    first = check_held(engine, before, None, precision="bfloat16")
    assert 0.07 < first.gap < 0.15
    again = engine + numbers(-seed, size=0.02)
    check_held(again, now, before, earlier=(before, engine), precision="bfloat16")


@pytest.mark.parametrize(
    ("precision", "moved", "message"),
    [
        ("float32", 5e-6, None),
        ("float32", 2e-5, "has moved by 2e-05 nats per token, and vLLM computes the same bits as before"),
        ("bfloat16", 0.04, None),
        ("bfloat16", 0.06, "has moved by 0.06 nats per token, and vLLM computes the same bits as before"),
    ],
)
def test_an_engine_that_computes_the_same_bits_has_not_taken_an_update(
    precision: Any, moved: float, message: str | None
) -> None:
    engine = EXACT + numbers(1, size=moved / 100)
    now = EXACT + numbers(2, size=moved)
    if message is None:
        check_held(engine, now, EXACT, earlier=(EXACT, engine), precision=precision)
        return
    with pytest.raises(WeightsDiffer, match=message):
        check_held(engine, now, EXACT, earlier=(EXACT, engine), precision=precision)
    check_held(
        engine, now, None, precision=precision
    )  # without an earlier proof the engine's earlier bits are unknown


@pytest.mark.parametrize(
    ("precision", "moved", "is_found"),
    [("float32", 5e-5, True), ("float32", 5e-6, False), ("bfloat16", 0.3, True), ("bfloat16", 0.2, False)],
)
def test_an_engine_that_has_taken_a_part_of_an_update_is_nearer_to_the_policy_of_before(
    precision: Any, moved: float, is_found: bool
) -> None:
    update = numbers(2, size=moved)
    half = EXACT + 0.3 * update
    if is_found:
        with pytest.raises(WeightsDiffer, match="per token from the policy before the update and"):
            check_held(half, EXACT + update, EXACT, earlier=(EXACT, EXACT), precision=precision)
    else:
        check_held(half, EXACT + update, EXACT, earlier=(EXACT, EXACT), precision=precision)


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-4), ("bfloat16", 0.25)])
def test_a_gap_above_rounding_is_refused(precision: Any, bound: float) -> None:
    check_held(EXACT + numbers(1, size=0.9 * bound), EXACT, None, precision=precision)
    for engine in (EXACT + numbers(1, size=1.1 * bound), EXACT * torch.nan):
        with pytest.raises(WeightsDiffer, match=f"is above {bound:g}, all that rounding explains"):
            check_held(engine, EXACT, None, precision=precision)
