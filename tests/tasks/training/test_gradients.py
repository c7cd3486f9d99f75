"""Gradients of two ranks are added up during the last backward pass of a step, as they are after it, and in as few messages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.on_ranks import Collectives, on_ranks
from vantage.tasks.training import gradients, ranks
from vantage.tasks.training.gradients import add_gradients, backward, settle
from vantage.tasks.training.optimization import make_optimizer, take_step

STEPS, ROWS, WIDTH = 3, 12, 16


class Network(nn.Module):
    """Layers of which one is frozen, and one is read only by rows that begin above 0, which a micro-batch may have none of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.layers[2].requires_grad_(False)
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        branches = rows[:, 0] > 0.5
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        if not branches.any():
            return rows
        return torch.cat([rows[~branches], self.branch(rows[branches])])


def rows_of(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(*, microbatches: int, overlaps: bool) -> tuple[Network, Collectives]:
    """Train on this rank's rows; a loss is divided by all rows."""
    network = Network()
    optimizer = make_optimizer(network, weight_decay=0.1)
    with Collectives() as counted:
        for step in range(STEPS):
            parts = rows_of(step)[ranks.own(ROWS)].chunk(microbatches)
            for number, part in enumerate(parts):
                loss = network(part).square().sum() / ROWS
                backward(loss, network, is_last=overlaps and number + 1 == len(parts))
            take_step(optimizer, network, learning_rate=0.01, max_grad_norm=0.5)
    return network, counted


def weights_of(network: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in network.parameters()])


def two_ways(folder: Path) -> dict[str, Any]:
    """Return the results of this rank with both ways to add up gradients."""
    vars(gradients)["BUCKET_ELEMENTS"] = WIDTH * WIDTH  # a layer and its vector
    found: dict[str, Any] = {}
    for name, overlaps in (("overlapping", True), ("plain", False)):
        for microbatches in (1, 2, 4):
            network, counted = train(microbatches=microbatches, overlaps=overlaps)
            found[f"{name} {microbatches}"] = {
                "weights": weights_of(network),
                "messages": counted.messages["reduced"],
                "bytes": counted.bytes["reduced"],
            }
    return found


def order_of_events(folder: Path) -> dict[str, Any]:
    """Return the numbers of buckets that are sent while the gradient of the first layer, the last one to be computed,
    is missing.
    """
    vars(gradients)["BUCKET_ELEMENTS"] = WIDTH * WIDTH
    network = Network()
    seen: list[int] = []
    with Collectives() as counted:
        first = network.layers[0].weight
        first.register_hook(lambda _: seen.append(counted.messages["reduced"]))
        rows = 1.0 + rows_of(0)[ranks.own(ROWS)].abs()  # all ranks take the branch
        backward(network(rows).square().sum(), network, is_last=True)
        in_all = counted.messages["reduced"]
        settle(network)
        assert first.grad is not None
        first.grad.fill_(7.0)  # as a gradient that is spoiled: it is not added up, nor overwritten
        add_gradients(network)
    return {"before": seen, "in all": in_all, "later": counted.messages["reduced"], "kept": first.grad}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(two_ways, tmp_path_factory.mktemp("gradients"))


@pytest.mark.slow
def test_overlapping_sums_of_three_ranks_have_the_bits_of_sums_after_the_pass(tmp_path: Path) -> None:
    """The sum of two ranks has one order; gloo adds three up in an order that depends on a number's place in its bucket."""
    first = on_ranks(two_ways, tmp_path, world_size=3)
    for of_rank in first:
        for microbatches in (1, 2, 4):
            found = of_rank[f"overlapping {microbatches}"]["weights"]
            assert torch.equal(found, of_rank[f"plain {microbatches}"]["weights"])
            assert torch.equal(found, first[0][f"overlapping {microbatches}"]["weights"])


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_overlapping_sums_have_the_bits_of_sums_after_the_pass(
    both: list[dict[str, Any]], microbatches: int
) -> None:
    for of_rank in both:
        found = of_rank[f"overlapping {microbatches}"]["weights"]
        assert torch.equal(found, of_rank[f"plain {microbatches}"]["weights"])
        assert torch.equal(found, both[0][f"overlapping {microbatches}"]["weights"]), (
            "all ranks go on from equal weights"
        )


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_two_ranks_take_the_steps_of_one_process(both: list[dict[str, Any]], microbatches: int) -> None:
    alone, counted = train(microbatches=microbatches, overlaps=True)
    torch.testing.assert_close(
        both[0][f"overlapping {microbatches}"]["weights"], weights_of(alone), atol=2e-6, rtol=0
    )
    assert not counted.messages, "one process sends nothing"


def test_messages_of_a_step_do_not_grow_with_the_number_of_microbatches(both: list[dict[str, Any]]) -> None:
    trained = [each for each in Network().parameters() if each.requires_grad]
    for of_rank in both:
        for name in ("overlapping", "plain"):
            counts = [of_rank[f"{name} {microbatches}"] for microbatches in (1, 2, 4)]
            assert {each["bytes"] for each in counts} == {STEPS * sum(each.numel() for each in trained) * 4}
            # six trained layers: a matrix and the vector beside it fill a bucket
            assert {each["messages"] for each in counts} == {STEPS * 6}


def test_buckets_are_sent_during_the_backward_pass(tmp_path: Path) -> None:
    for of_rank in on_ranks(order_of_events, tmp_path):
        assert of_rank["before"][0] >= 4 and of_rank["in all"] == 6
        assert of_rank["later"] == 6, "nothing is sent twice"
        assert of_rank["kept"].eq(7.0).all()
