"""Test stages and sampler on a real GPU: ``make test-gpu``. The file's name keeps it out of ``make test``, whose machine may have none.

It needs torch, transformers, pydantic and what ``pip install -e '.[dev]'`` brings beside them; neither Prefect nor MLflow.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.attempts.golden_digests import golden, read, unlike
from tests.tasks.golden_results import Results
from tests.tasks.golden_runs import RUNS
from vantage.models import replayed_steps
from vantage.models.pass_counts import taken_counts
from vantage.models.sampling import Samples, sample
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.training import checkpoints
from vantage.tasks.training.offloading import offloaded, on_device
from vantage.tasks.training.optimization import make_optimizer, take_step
from vantage.tasks.training.scratch import read_found

COSTS = {"mean of prompt_reads"}
"""Counts that depend on the device: how often a prompt is read is decided by what a pass costs there."""


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    assert torch.cuda.is_available(), "torch finds no GPU"


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    return Results(tmp_path_factory.mktemp("first")), Results(tmp_path_factory.mktemp("second"))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_makes_what_a_cpu_makes_and_the_same_bits_every_time(
    name: str, twice: tuple[Results, Results]
) -> None:
    """The run has every kind of stage and every preset, in float32. Uniform numbers are drawn on the CPU, so responses
    are the same.
    """
    recorded = read()["numbers"][name]
    first, second = (golden(results.of(name), recorded) for results in twice)
    assert first.digest == second.digest
    assert [each for each in unlike(first.numbers, recorded) if each.partition(":")[0] not in COSTS] == []


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    found = LlamaForCausalLM(config)
    nn.Module.to(found, device="cuda", dtype=request.param)
    found.eval()
    return found


def prompt_of(row: int, length: int) -> list[int]:
    return [3 + (row * 7 + at) % 400 for at in range(length + row % 5)]


def drawn(model: LlamaForCausalLM, *, rows: int, most: int, prompt: int, greedy: bool, ends: int) -> Samples:
    return sample(
        model,
        [prompt_of(row, prompt) for row in range(rows)],
        max_new_tokens=most,
        temperature=0.8,
        eos_token_ids=tuple(range(450, 450 + ends)),
        pad_token_id=0,
        seed=7,
        greedy=greedy,
        limits=PassLimits(rows=64),
    )


@pytest.mark.parametrize(
    ("rows", "most", "prompt", "ends"),
    [
        (8, 40, 10, 0),
        pytest.param(64, 300, 100, 0, id="a cache that grows past its room: all graphs are dropped"),
        pytest.param(150, 300, 60, 5, id="rows that leave, three batches"),
    ],
)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_captured_steps_draw_what_the_plain_loop_draws(
    rows: int,
    most: int,
    prompt: int,
    ends: int,
    greedy: bool,
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Responses are equal up to near ties: captured steps compute in other kernels, and after a tie the rest of a
    response differs too. In bfloat16 ties come early, so the log-probabilities are compared with those of one pass over
    the whole responses.
    """
    with torch.no_grad():
        monkeypatch.setenv(replayed_steps.SWITCH, "0")
        expected = drawn(model, rows=rows, most=most, prompt=prompt, greedy=greedy, ends=ends)
        monkeypatch.delenv(replayed_steps.SWITCH)
        taken_counts()
        found = drawn(model, rows=rows, most=most, prompt=prompt, greedy=greedy, ends=ends)
    counts = taken_counts()
    assert counts.graphs_captured > 0
    assert counts.graph_fallbacks == 0
    assert len(found.responses) == rows
    if model.dtype == torch.bfloat16:
        assert read_gap(model, found, prompt=prompt) < 0.02
        return
    gap, alike, tokens = 0.0, 0, 0
    for row in range(rows):
        one, other = expected.responses[row], found.responses[row]
        same = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )
        alike, tokens = alike + same, tokens + len(one)
        gap += sum(
            abs(a - b) for a, b in zip(expected.logprobs[row][:same], found.logprobs[row][:same], strict=True)
        )
    assert gap / max(alike, 1) < 1e-5
    assert alike / tokens > 0.95


@torch.no_grad()
def read_gap(model: LlamaForCausalLM, found: Samples, *, prompt: int) -> float:
    """Return the mean |Δ| of the sampled log-probabilities to those of a pass without a cache, at temperature 0.8."""
    gaps = []
    for row, (ids, logprobs) in enumerate(zip(found.responses, found.logprobs, strict=True)):
        asked = prompt_of(row, prompt)
        logits = (
            model(torch.tensor([asked + ids], device="cuda")).logits[0, len(asked) - 1 : -1].float() / 0.8
        )
        own = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0]
        gaps.append((own.cpu() - torch.tensor(logprobs)).abs())
    return torch.cat(gaps).mean().item()


def test_a_stage_finds_the_largest_passes_in_the_memory_that_is_free(tmp_path: Path) -> None:
    """A stage of a small model has room for more positions than its recipe's rows would fill."""
    made = Results(tmp_path).of("dpo")
    found = read_found(made.job.scratch)
    assert found is not None
    assert found.tokens > 10_000


# -- switches that save memory

WIDTH, STEPS = 1024, 4
DEVICE = torch.device("cuda")


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
