"""From two measurements to the most positions that fit."""

import pytest
import torch

from schemas.recipe.pass_limits import FoundLimits
from tasks.training.found_limits import rounded
from tasks.training.memory_probe import Cost, Measured, cost_of, gradients_to_come, moments_to_come
from tasks.training.optimization import make_optimizer


def test_two_passes_tell_what_a_position_takes() -> None:
    cost = cost_of(Measured(100, 5_000), Measured(200, 8_000))
    assert cost == Cost(fixed=2_000, each=30)
    assert cost.positions_in(11_000) == 300
    assert cost.positions_in(11_029) == 300
    assert cost.positions_in(11_000, share=0.5) == 150, "half of what nothing fixed takes"
    assert cost.positions_in(1_999) == 0


def test_a_pass_that_takes_no_more_than_a_smaller_one_has_no_end() -> None:
    cost = cost_of(Measured(10, 500), Measured(20, 500))
    assert cost == Cost(fixed=490, each=1)


@pytest.mark.parametrize(
    ("positions", "down"),
    [(0, 0), (1, 1), (7, 7), (15, 15), (17, 16), (1023, 960), (1024, 1024), (70_000, 65_536)],
)
def test_a_few_bytes_change_no_limit(positions: int, down: int) -> None:
    assert rounded(positions) == down


def test_the_state_of_adamw_is_counted_until_it_is_there() -> None:
    model = torch.nn.Linear(3, 5)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, weight_decay=0.0)
    assert moments_to_come([optimizer]) == 2 * 15 * 4
    assert gradients_to_come([optimizer]) == 15 * 4
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert moments_to_come([optimizer]) == 0
    taken = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    )
    assert taken == 2 * 15 * 4


def test_it_is_told_in_words() -> None:
    assert FoundLimits(tokens=65_536).described == "found: passes of at most 65,536 positions"
    assert FoundLimits(tokens=512, sampled_tokens=4096).described == (
        "found: passes of at most 512 positions, responses of 4,096 sampled side by side"
    )
