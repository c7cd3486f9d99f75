"""Switches that save memory, on a real GPU: ``make test-gpu``. They have not been run on one yet."""

import copy

import pytest
import torch
from torch import nn

from vantage.tasks.training import checkpoints
from vantage.tasks.training.offloading import offloaded, on_device
from vantage.tasks.training.optimization import make_optimizer, take_step

WIDTH, STEPS = 1024, 4
DEVICE = torch.device("cuda")


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    assert torch.cuda.is_available(), "torch finds no GPU"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        (module(inputs) - inputs.sin()).square().mean().backward()
        take_step(optimizer, module, learning_rate=1e-3, max_grad_norm=1.0)
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def test_an_offloaded_network_takes_memory_for_its_passes_alone() -> None:
    inputs = torch.randn(4, WIDTH, device=DEVICE)
    stays = network().to(DEVICE)
    expected = stays(inputs).detach()
    before = torch.cuda.memory_allocated()
    away = offloaded(network().requires_grad_(False), DEVICE)
    assert torch.cuda.memory_allocated() == before
    for _ in range(2):
        with on_device(away):
            assert torch.equal(away(inputs), expected)
            assert torch.cuda.memory_allocated() - before > 8 * WIDTH * WIDTH
        assert torch.cuda.memory_allocated() == before
    assert all(each.is_pinned() for each in away.parameters())


def test_moments_in_host_memory_give_the_weights_of_a_gpu_but_for_rounding() -> None:
    plain, hosted = network().to(DEVICE), network().to(DEVICE)
    expected = trained(plain, make_optimizer(plain, weight_decay=0.1), range(STEPS))
    optimizer = make_optimizer(hosted, weight_decay=0.1, in_host=True)
    found = trained(hosted, optimizer, range(STEPS))
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6)
    assert {tensor.device.type for state in optimizer.state.values() for tensor in state.values()} == {"cpu"}


@pytest.mark.parametrize(
    "options", [{}, {"states": "8bit"}, {"in_host": True}], ids=["plain", "8bit", "host"]
)
def test_a_resumed_stage_has_the_same_bits(options: dict[str, object]) -> None:
    module = network().to(DEVICE)
    optimizer = make_optimizer(module, weight_decay=0.1, **options)  # type: ignore[arg-type]
    trained(module, optimizer, range(2))
    saved = checkpoints.optimizer_tensors(optimizer, module.named_parameters(), part="o")
    saved = {name: tensor.to("cpu", copy=True) for name, tensor in saved.items()}
    resumed = copy.deepcopy(module)
    second = make_optimizer(resumed, weight_decay=0.1, **options)  # type: ignore[arg-type]
    checkpoints.restore_optimizer(second, resumed.named_parameters(), saved, part="o")
    expected = trained(module, optimizer, range(2, STEPS))
    found = trained(resumed, second, range(2, STEPS))
    assert all(torch.equal(found[name], each) for name, each in expected.items())
