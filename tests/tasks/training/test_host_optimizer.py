"""Moments in host memory have the bits of torch's own AdamW, also where weights and gradients are copied there and back."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tasks.training.test_eight_bit import DECAY, RATE, add_gradients, network
from vantage.schemas.recipe.stage import Resources
from vantage.tasks.stages import run_stage
from vantage.tasks.training import checkpoints, host_optimizer
from vantage.tasks.training.host_optimizer import HostAdamW
from vantage.tasks.training.memory_probe import moments_to_come
from vantage.tasks.training.optimization import make_optimizer, take_step

STEPS = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["in place", "copied"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return what was copied to the host: nothing on a CPU, and weights and gradients if these have a memory of their
    own.
    """
    found: list[Tensor] = []

    def in_host(tensor: Tensor) -> Tensor:
        found.append(tensor.clone())
        return found[-1]

    if request.param == "copied":
        monkeypatch.setattr(host_optimizer, "in_host", in_host)
    return found


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        add_gradients(module, step)
        take_step(optimizer, module, learning_rate=RATE, max_grad_norm=0.5)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = module.named_parameters()
    saved = checkpoints.optimizer_tensors(optimizer, names, part="o")
    return {**module.state_dict(), **saved}


def test_weights_and_moments_have_the_bits_of_torchs_adamw(copies: list[Tensor]) -> None:
    plain, hosted = network(), network()
    theirs = make_optimizer(plain, weight_decay=DECAY)
    ours = make_optimizer(hosted, weight_decay=DECAY, in_host=True)
    assert isinstance(ours, HostAdamW) and not isinstance(theirs, HostAdamW)
    train(plain, theirs, range(STEPS))
    train(hosted, ours, range(STEPS))
    expected, found = state_of(plain, theirs), state_of(hosted, ours)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert len(copies) in (0, 2 * STEPS * len([*hosted.parameters()]))


@pytest.mark.parametrize("saved_in_host", [True, False])
def test_a_checkpoint_is_read_wherever_the_moments_lie(copies: list[Tensor], saved_in_host: bool) -> None:
    whole = network()
    train(whole, optimizer := make_optimizer(whole, weight_decay=DECAY), range(STEPS))
    module = network()
    first = make_optimizer(module, weight_decay=DECAY, in_host=saved_in_host)
    train(module, first, range(2))
    saved = checkpoints.optimizer_tensors(first, module.named_parameters(), part="o")
    saved = {name: tensor.clone() for name, tensor in saved.items()}
    resumed = copy.deepcopy(module)
    second = make_optimizer(resumed, weight_decay=0.5, in_host=not saved_in_host)
    checkpoints.restore_optimizer(second, resumed.named_parameters(), saved, part="o")
    train(resumed, second, range(2, STEPS))
    expected, found = state_of(whole, optimizer), state_of(resumed, second)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_step_that_is_taken_back_leaves_the_moments_as_they_were() -> None:
    module = network()
    optimizer = make_optimizer(module, weight_decay=DECAY, in_host=True)
    train(module, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer, range(2, 3))
    optimizer.load_state_dict(copy.deepcopy(before))
    restored = optimizer.state_dict()
    for number, state in before["state"].items():
        assert all(torch.equal(restored["state"][number][name], each) for name, each in state.items())
    assert restored["param_groups"] == before["param_groups"]


def test_they_take_no_memory_of_the_device() -> None:
    module = network()
    assert moments_to_come([make_optimizer(module, weight_decay=DECAY, in_host=True)]) == 0
    weights = sum(each.numel() for each in module.parameters())
    assert moments_to_come([make_optimizer(module, weight_decay=DECAY)]) == 8 * weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "policy"])
def test_a_stage_makes_the_same_bytes(
    name: str,
    pipeline: Any,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"iterations": 2} if name == "policy" else {}
    plain = pipeline.job(name, folder=tmp_path / "plain", **changes)
    expected = run_stage(plain)
    offload = Resources(offload=("optimizer",))
    job = pipeline.job(name, folder=tmp_path / "offloaded", resources=offload, **changes)
    copied: list[int] = []

    def in_host(tensor: Tensor) -> Tensor:
        copied.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(host_optimizer, "in_host", in_host)
    assert run_stage(job) == expected
    assert copied
    assert contents(job.output) == contents(plain.output)
