"""Masking, padding, permuting, splitting and spreading over ranks change no gradient of any loss.

The two-rank test runs this file as a script, once for each rank.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.loss_cases import (
    CASES,
    NUM_FEATURES,
    Batch,
    initial_weights,
    random_batch,
    result_and_gradient,
)
from vantage.algorithms.metrics import metrics_of

every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=15)


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
    if not case.of_pairs:
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


@pytest.mark.slow
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
    denominator = case.denominator(batch)
    if case.held is None:
        assert torch.autograd.gradcheck(lambda leaf: case.loss(leaf, batch, denominator).loss, outputs)
        return
    at = outputs.detach().clone()  # gradcheck moves its input in place
    assert torch.autograd.gradcheck(lambda leaf: case.held(leaf, at, batch, denominator), outputs)
    measured, held = case.loss(outputs, batch, denominator).loss, case.held(outputs, at, batch, denominator)
    assert_close(measured, held)
    assert_close(torch.autograd.grad(measured, outputs)[0], torch.autograd.grad(held, outputs)[0])


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


@pytest.mark.slow
def test_two_ranks_that_average_gradients_equal_one_process(tmp_path):
    root = Path(__file__).parents[2]
    environment = dict(os.environ, PYTHONPATH=str(root), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    arguments = [sys.executable, __file__, str(tmp_path)]
    ranks = [
        subprocess.Popen([*arguments, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks]
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
    """Run one of two gloo ranks, with 2 or 4 of the 6 rows, whose gradients are averaged.

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
