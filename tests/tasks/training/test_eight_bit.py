"""Moments in 8 bits stay near AdamW in float64, take a quarter of its bytes, and are bitwise the same after a kill."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.tasks.kills import Killed
from tests.tasks.training.test_attempt import sft_job
from vantage.schemas.records.job import StageJob
from vantage.tasks.training import checkpoints
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.checkpoints import IncompleteCheckpoint
from vantage.tasks.training.memory_probe import moments_to_come
from vantage.tasks.training.networks import weights_of
from vantage.tasks.training.optimization import BETAS, EPS, OptimizerStates, make_optimizer, take_step
from vantage.tasks.training.scratch import CHECKPOINTS
from vantage.tasks.training.seeds import generator
from vantage.tasks.training.stage_state import NoState

TOTAL, WIDTH, DECAY, RATE = 6, 96, 0.1, 0.01


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network() -> nn.Sequential:
    """Return two matrices with 8-bit moments (9,216 weights), and vectors whose moments stay in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def add_gradients(module: nn.Module, step: int) -> None:
    inputs = torch.randn(16, WIDTH, generator=generator(5, "data", step))
    ((module(inputs) - inputs.sin()) ** 2).mean().backward()


def trained(states: OptimizerStates, steps: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    module = network()
    optimizer = make_optimizer(module, weight_decay=DECAY, states=states)
    for step in range(steps):
        add_gradients(module, step)
        take_step(optimizer, module, learning_rate=RATE, max_grad_norm=1e9)
    return module, optimizer


def by_hand(steps: int) -> dict[str, Tensor]:
    """Compute AdamW in float64 (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2)."""
    module = network().double()
    moments = {
        name: (torch.zeros_like(each), torch.zeros_like(each)) for name, each in module.named_parameters()
    }
    for step in range(steps):
        single = copy.deepcopy(module).float()
        add_gradients(single, step)
        for (name, parameter), of_single in zip(module.named_parameters(), single.parameters(), strict=True):
            gradient = of_single.grad.double()  # type: ignore[union-attr]
            first, second = moments[name]
            first.mul_(BETAS[0]).add_((1 - BETAS[0]) * gradient)
            second.mul_(BETAS[1]).add_((1 - BETAS[1]) * gradient**2)
            unbiased = first / (1 - BETAS[0] ** (step + 1)), second / (1 - BETAS[1] ** (step + 1))
            parameter.data *= 1 - RATE * (DECAY if parameter.dim() > 1 else 0.0)
            parameter.data -= RATE * unbiased[0] / (unbiased[1].sqrt() + EPS)
    return {name: each.detach() for name, each in module.named_parameters()}


def deviation(found: nn.Module, expected: dict[str, Tensor]) -> float:
    """Return the distance of all weights from the expected ones, divided by the distance of these from the first weights."""
    begun, moved = dict(network().named_parameters()), dict(found.named_parameters())
    squares = [
        ((moved[name] - each).square().sum().item(), (begun[name] - each).square().sum().item())
        for name, each in expected.items()
    ]
    off, way = (sum(each) ** 0.5 for each in zip(*squares, strict=True))
    return off / way


def test_thirty_steps_end_within_three_hundredths_of_the_way_of_exact_adamw() -> None:
    expected = by_hand(30)
    exact, _ = trained("float32", 30)
    rounded, _ = trained("8bit", 30)
    assert deviation(exact, expected) < 1e-4
    assert 1e-4 < deviation(rounded, expected) < 0.03


def test_the_moments_take_a_quarter_of_the_bytes_as_was_predicted() -> None:
    found = {}
    for states in ("float32", "8bit"):
        begun = make_optimizer(network(), weight_decay=DECAY, states=states)
        predicted = moments_to_come([begun])
        _, optimizer = trained(states, 1)
        held = {
            id(each): each.numel() * each.element_size()
            for state in optimizer.state.values()
            for name, each in state.items()
            if isinstance(each, Tensor) and name not in ("step", "qmap1", "qmap2")
        }
        found[states] = sum(held.values())
        assert predicted == pytest.approx(found[states], abs=4 * 4)  # the counters of steps
        assert moments_to_come([optimizer]) == 0
    matrices, vectors = 2 * WIDTH * WIDTH, 2 * WIDTH
    assert found["float32"] == 8 * (matrices + vectors)
    assert found["8bit"] == 2 * (matrices + 4 * matrices // 256) + 8 * vectors


# Going on


def attempted(job: StageJob, *, kill_after: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = network()
    optimizer = make_optimizer(module, weight_decay=DECAY, states="8bit")
    with Attempt(
        job,
        total=TOTAL,
        modules={"network": module},
        optimizers={"network": optimizer},
        state=NoState(),
    ) as attempt:
        for done, step in enumerate(attempt.remaining()):
            if done == kill_after:
                raise Killed
            add_gradients(module, step)
            take_step(optimizer, module, learning_rate=RATE, max_grad_norm=1.0)
            attempt.finish_step({"loss": 1.0}, num_tokens=16, headline="loss")
    return module, optimizer


@pytest.mark.parametrize("kill_after", range(1, TOTAL))
def test_killed_after_any_step_weights_and_moments_end_with_the_same_bits(
    tmp_path: Path, kill_after: int
) -> None:
    whole, states = attempted(sft_job(tmp_path / "whole", checkpoint_every=2))
    job = sft_job(tmp_path / "cut", checkpoint_every=2)
    with pytest.raises(Killed):
        attempted(job, kill_after=kill_after)
    resumed, found = attempted(job)
    expected = weights_of(whole)
    assert all(torch.equal(each, expected[name]) for name, each in weights_of(resumed).items())
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert found.state[one].keys() == states.state[other].keys()
        assert found.state[one]["state1"].dtype == (torch.uint8 if one.dim() > 1 else torch.float32)
        for name, each in states.state[other].items():
            assert torch.equal(torch.as_tensor(found.state[one][name]), torch.as_tensor(each)), name


def test_a_checkpoint_holds_them_in_8_bits(tmp_path: Path) -> None:
    job = sft_job(tmp_path, checkpoint_every=2)
    attempted(job)
    newest = checkpoints.latest(job.scratch / CHECKPOINTS)
    assert newest is not None
    weights = 2 * WIDTH * (WIDTH + 1)
    assert newest.folder.joinpath("tensors.safetensors").stat().st_size < 6.3 * weights + 3000
    tensors = checkpoints.load(
        newest,
        required={"network.weights", "network.optimizer", "stage", "stopped", "journal_offset"},
    ).tensors
    assert tensors["network.optimizer/0.weight/state1"].dtype == torch.uint8
    assert not [name for name in tensors if "qmap" in name]


def restore(states: OptimizerStates, saved: dict[str, Tensor]) -> None:
    module = network()
    optimizer = make_optimizer(module, weight_decay=DECAY, states=states)
    checkpoints.restore_optimizer(optimizer, module.named_parameters(), saved, part="o")


def saved_by(states: OptimizerStates) -> dict[str, Tensor]:
    module, optimizer = trained(states, 1)
    return checkpoints.optimizer_tensors(optimizer, module.named_parameters(), part="o")


def test_a_lost_scale_and_one_of_another_shape_are_refused_by_name() -> None:
    saved = saved_by("8bit")
    restore("8bit", saved)
    scales = saved.pop("o/0.weight/absmax2")
    with pytest.raises(IncompleteCheckpoint, match="o/0.weight/absmax2 is missing"):
        restore("8bit", saved)
    saved["o/0.weight/absmax2"] = scales[1:]
    with pytest.raises(
        IncompleteCheckpoint, match=r"o/0.weight/absmax2 has the shape \(35,\), .* needs \(36,\)"
    ):
        restore("8bit", saved)


@pytest.mark.parametrize(("saved", "wanted"), [("float32", "8bit"), ("8bit", "float32")])
def test_moments_of_another_type_are_refused(saved: OptimizerStates, wanted: OptimizerStates) -> None:
    with pytest.raises(IncompleteCheckpoint, match="o/"):
        restore(wanted, saved_by(saved))
