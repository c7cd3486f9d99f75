"""What holds of every loss: what is masked, padded, permuted, split or spread over ranks changes no gradient.

The two-rank test runs this file as a script, once for each rank.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.aggregation import aggregate, denominator_of
from algorithms.kl import kl_estimate
from algorithms.metrics import metrics_of
from algorithms.policy_loss import clipped_surrogate, positive_example_nll
from algorithms.preference_loss import bradley_terry
from algorithms.supervised_loss import token_nll
from algorithms.value_loss import value_loss

MAX_LENGTH = 9
NUM_FEATURES = 3


@dataclass(frozen=True)
class Batch:
    """Rows for every loss. `features` (B,T,F) feed a linear model, whose outputs (B,T) the losses see."""

    features: torch.Tensor
    old: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    is_positive: torch.Tensor
    pair_weights: torch.Tensor

    def rows(self, indices):
        """Some rows, trimmed to the longest among them, as a micro-batch would be."""
        mask = self.mask[indices]
        width = max(1, int(mask.any(dim=0).nonzero().max()) + 1 if mask.any() else 1)
        per_token = (
            tensor[indices][:, :width] for tensor in (self.features, self.old, self.targets, self.mask)
        )
        return Batch(*per_token, self.is_positive[indices], self.pair_weights[indices])


def random_batch(seed, num_rows=6):
    """Ragged rows with gaps, an empty row among them, right-padded to MAX_LENGTH."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, MAX_LENGTH)
    mask = (np.arange(MAX_LENGTH) < rng.integers(1, MAX_LENGTH + 1, size=(num_rows, 1))) & (
        rng.random(shape) < 0.85
    )
    mask[0, 0], mask[-1] = True, False
    is_positive = rng.random(num_rows) < 0.5
    is_positive[0] = True
    return Batch(
        features=torch.tensor(rng.normal(size=(*shape, NUM_FEATURES))),
        old=torch.tensor(rng.normal(size=shape)),
        targets=torch.tensor(rng.normal(size=shape)),
        mask=torch.tensor(mask),
        is_positive=torch.tensor(is_positive),
        pair_weights=torch.tensor(mask.any(axis=1) * rng.integers(1, 4, size=num_rows) / 2),
    )


@dataclass(frozen=True)
class Case:
    """A loss on (model outputs, batch, denominator), and what a batch contributes to its denominator."""

    loss: Callable
    denominator: Callable
    whole_minibatch_by_default: bool = True


def surrogate(outputs, batch, denominator, *, aggregation, clip_range=0.2):
    return clipped_surrogate(
        outputs,
        batch.old,
        batch.targets,
        batch.mask,
        clip_range_low=clip_range,
        clip_range_high=clip_range,
        aggregation=aggregation,
        denominator=denominator,
    )


@dataclass(frozen=True)
class BareLoss:
    loss: torch.Tensor


def kl_loss(outputs, batch, denominator, *, kind, aggregation):
    per_token = kl_estimate(outputs, batch.old, kind=kind)
    return BareLoss(aggregate(per_token, batch.mask, aggregation=aggregation, denominator=denominator))


def preference(outputs, batch, denominator):
    """Each row is a pair: its summed outputs against its first old value; an empty row has weight 0."""
    chosen = torch.where(batch.mask, outputs, 0.0).sum(dim=1)
    return bradley_terry(
        chosen,
        batch.old[:, 0],
        margin=batch.targets[:, 0],
        weights=batch.pair_weights,
        denominator=denominator,
    )


def count(aggregation):
    return lambda batch: denominator_of(batch.mask, aggregation=aggregation, max_length=MAX_LENGTH)


TOKENS = count("token")
CASES = {
    **{
        f"clipped_surrogate by {aggregation}": Case(
            partial(surrogate, aggregation=aggregation), count(aggregation), aggregation != "constant"
        )
        for aggregation in ("token", "sequence", "sequence_sum", "constant")
    },
    "unclipped surrogate": Case(partial(surrogate, aggregation="token", clip_range=None), TOKENS),
    "k2 loss by token": Case(partial(kl_loss, kind="k2", aggregation="token"), TOKENS),
    "k3 loss by sequence": Case(partial(kl_loss, kind="k3", aggregation="sequence"), count("sequence")),
    "abs loss by constant": Case(
        partial(kl_loss, kind="abs", aggregation="constant"), count("constant"), False
    ),
    "positive_example_nll": Case(
        lambda outputs, batch, denominator: positive_example_nll(
            outputs, batch.mask, batch.is_positive, denominator=denominator
        ),
        lambda batch: denominator_of(batch.mask & batch.is_positive[:, None], aggregation="token"),
    ),
    "value_loss": Case(
        lambda outputs, batch, denominator: value_loss(
            outputs, None, batch.targets, batch.mask, denominator=denominator
        ),
        TOKENS,
    ),
    "clipped value_loss": Case(
        lambda outputs, batch, denominator: value_loss(
            outputs, batch.old, batch.targets, batch.mask, value_clip_range=0.5, denominator=denominator
        ),
        TOKENS,
    ),
    "bradley_terry": Case(preference, lambda batch: float(batch.pair_weights.sum())),
    "token_nll": Case(
        lambda outputs, batch, denominator: token_nll(outputs, batch.mask, denominator=denominator), TOKENS
    ),
}
every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
seeds = st.integers(0, 2**32 - 1)
few = settings(deadline=None, max_examples=15)


def initial_weights():
    return torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64, requires_grad=True)


def result_and_gradient(case, batch, denominator):
    weights = initial_weights()
    result = case.loss(batch.features @ weights, batch, denominator)
    return result, torch.autograd.grad(result.loss, weights)[0]


def assert_close(measured, expected):
    np.testing.assert_allclose(measured.detach().numpy(), expected.detach().numpy(), rtol=1e-10, atol=1e-13)


@every_loss
@few
@given(seed=seeds, assignment=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_micro_batches_add_up_to_the_minibatch(case, seed, assignment):
    batch = random_batch(seed)
    parts = [
        batch.rows([row for row in range(6) if assignment[row] == part]) for part in sorted(set(assignment))
    ]
    denominator = sum(case.denominator(part) for part in parts)
    assert denominator == pytest.approx(case.denominator(batch))

    whole, gradient = result_and_gradient(case, batch, denominator)
    results, gradients = zip(*(result_and_gradient(case, part, denominator) for part in parts), strict=True)
    assert_close(sum(result.loss for result in results), whole.loss)
    assert_close(sum(gradients), gradient)
    for name, expected in metrics_of(whole).items():
        total = sum((metrics_of(result)[name] for result in results[1:]), start=metrics_of(results[0])[name])
        assert_close(total.sum, expected.sum)
        assert total.count == expected.count

    if case.whole_minibatch_by_default:
        by_default, default_gradient = result_and_gradient(case, batch, None)
        assert_close(by_default.loss, whole.loss)
        assert_close(default_gradient, gradient)


@every_loss
@few
@given(seed=seeds, garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_masked_positions_leave_no_trace_in_loss_gradient_or_metrics(case, seed, garbage):
    batch = random_batch(seed)
    denominator = case.denominator(batch)
    outputs = (batch.features @ initial_weights()).detach()
    leaf = outputs.clone().requires_grad_()
    clean = case.loss(leaf, batch, denominator)
    gradient = torch.autograd.grad(clean.loss, leaf)[0]

    dirty_leaf = torch.where(batch.mask, outputs, garbage).requires_grad_()
    dirty_batch = batch
    if case is not CASES["bradley_terry"]:  # whose old and targets stand for scores, one for each row
        dirty_batch = Batch(
            features=batch.features,
            old=torch.where(batch.mask, batch.old, garbage),
            targets=torch.where(batch.mask, batch.targets, garbage),
            mask=batch.mask,
            is_positive=batch.is_positive,
            pair_weights=batch.pair_weights,
        )
    dirty = case.loss(dirty_leaf, dirty_batch, denominator)
    assert torch.equal(dirty.loss, clean.loss)
    assert torch.equal(torch.autograd.grad(dirty.loss, dirty_leaf)[0], gradient)
    assert (gradient[~batch.mask] == 0).all()
    assert metrics_of(dirty) == metrics_of(clean)


@every_loss
@few
@given(seed=seeds)
def test_more_padding_and_another_row_order_change_nothing(case, seed):
    batch = random_batch(seed)
    denominator = case.denominator(batch)
    expected, gradient = result_and_gradient(case, batch, denominator)

    pad = torch.nn.functional.pad
    padded = Batch(
        features=pad(batch.features, (0, 0, 0, 4), value=7.0),
        old=pad(batch.old, (0, 4), value=7.0),
        targets=pad(batch.targets, (0, 4), value=7.0),
        mask=pad(batch.mask, (0, 4)),
        is_positive=batch.is_positive,
        pair_weights=batch.pair_weights,
    )
    assert case.denominator(padded) == denominator
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    for other in (padded, batch.rows(order)):
        other_result, other_gradient = result_and_gradient(case, other, denominator)
        assert_close(other_result.loss, expected.loss)
        assert_close(other_gradient, gradient)


@every_loss
def test_gradient_by_finite_differences(case):
    batch = random_batch(12)
    outputs = (batch.features @ initial_weights()).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda leaf: case.loss(leaf, batch, case.denominator(batch)).loss, outputs
    )


@every_loss
def test_float32_is_enough_and_half_precision_is_widened(case):
    batch = random_batch(3)
    outputs = (batch.features @ initial_weights()).detach()
    exact = case.loss(outputs, batch, case.denominator(batch)).loss.item()
    single_batch = Batch(
        *(getattr(batch, name).float() for name in ("features", "old", "targets")),
        batch.mask,
        batch.is_positive,
        batch.pair_weights.float(),
    )
    single = case.loss(outputs.float(), single_batch, case.denominator(batch)).loss
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(exact, rel=1e-5)
    half = outputs.bfloat16().requires_grad_()
    half_loss = case.loss(half, single_batch, case.denominator(batch)).loss
    assert half_loss.dtype == torch.float32
    assert torch.autograd.grad(half_loss, half)[0].isfinite().all()


def test_two_ranks_that_average_gradients_equal_one_process(tmp_path):
    root = Path(__file__).parents[2]
    environment = dict(os.environ, PYTHONPATH=str(root), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    arguments = [sys.executable, __file__, str(tmp_path)]
    ranks = [
        subprocess.Popen([*arguments, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors

    batch = random_batch(7)
    for rank in range(2):
        measured = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert measured.keys() == CASES.keys()
        for name, case in CASES.items():
            result, gradient = result_and_gradient(case, batch, case.denominator(batch))
            np.testing.assert_allclose(measured[name]["gradient"], gradient.numpy(), rtol=1e-10, atol=1e-13)
            for metric, expected in metrics_of(result).items():
                np.testing.assert_allclose(
                    measured[name]["metrics"][metric],
                    [expected.sum.item(), expected.count.item()],
                    rtol=1e-10,
                )


def run_rank(folder: str, rank: int) -> None:
    """One of two gloo ranks, with 2 or 4 of the 6 rows, whose gradients are averaged.

    DistributedDataParallel would average them as well, but it holds the process group beyond its
    destruction, and the group's threads then race the end of the interpreter (and now and then abort it).
    """
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    own = random_batch(7).rows([0, 3] if rank == 0 else [1, 2, 4, 5])
    measured = {}
    for name, case in CASES.items():
        linear = torch.nn.Linear(NUM_FEATURES, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(initial_weights()[None])
        denominator = torch.tensor(case.denominator(own), dtype=torch.float64)
        torch.distributed.all_reduce(denominator)
        result = case.loss(linear(own.features).squeeze(2), own, denominator / 2)  # 2 ranks, averaged
        result.loss.backward()
        torch.distributed.all_reduce(linear.weight.grad)
        linear.weight.grad /= 2
        metrics = {}
        for metric, part in metrics_of(result).items():
            total = torch.stack([part.sum.double(), part.count.double()])
            torch.distributed.all_reduce(total)
            metrics[metric] = total.tolist()
        measured[name] = {"gradient": linear.weight.grad[0].tolist(), "metrics": metrics}
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(measured))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_rank(sys.argv[1], int(sys.argv[2]))
