"""Two measured passes give the most positions that fit, and limits are shared out, remembered and described in words."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.tasks.live_memory import LiveMemory
from vantage.models.builtin import build_builtin, builtin_config
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.pass_counts import count_prompts, taken_counts
from vantage.models.policy import PolicyModel
from vantage.models.sampling import sample
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import FoundLimits, PassLimits
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.tasks.data.examples import Codec, Completions, Prompts
from vantage.tasks.training import found_limits, memory_meter, memory_probe
from vantage.tasks.training.found_limits import (
    Sampler,
    Taken,
    longest_response,
    longest_row,
    rounded,
    sampling_limits,
    taken_by_reading,
)
from vantage.tasks.training.memory_probe import (
    Cost,
    Measured,
    Row,
    cost_of,
    gradients_to_come,
    moments_to_come,
    pass_costs,
    sampling_cost,
)
from vantage.tasks.training.optimization import make_optimizer
from vantage.tasks.training.scratch import describe_found, forget_found, read_found, write_found

CPU = torch.device("cpu")
PLENTY = 10**10


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
    """The log describes the limits that were found in words."""
    assert FoundLimits(tokens=65_536).described == "found: passes of at most 65,536 positions"
    assert FoundLimits(tokens=512, sampled_tokens=4096).described == (
        "found: passes of at most 512 positions, responses of 4,096 sampled side by side"
    )


class Bytes:
    """A meter of a device with so many bytes, none of which is ever taken."""

    device = "a device of the tests"

    def __init__(self, limit: int) -> None:
        self._limit, self.begun = limit, 0

    def begin(self) -> None:
        self.begun += 1

    def peak(self) -> int:
        return 0

    def taken(self) -> int:
        return 0

    def limit(self) -> int:
        return self._limit


@pytest.mark.parametrize(
    ("beside", "trains", "tokens", "sampled"),
    [(False, True, 6656, 9216), (True, True, 2816, 3328), (True, False, 3328, 4096)],
)
def test_memory_is_shared_out_by_hand(
    beside: bool, trains: bool, tokens: int, sampled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of 100,000 bytes is left free, and AdamW needs 20,000 for 2,500 weights. Positions are rounded down.

    If training and sampling alternate, training has (70,000 − 2,000) / 10 = 6,800 positions, rounded to 6,656, and
    sampling (70,000 − 1,000) / 7 = 9,857, rounded to 9,216.

    If they run beside each other, each has half. A copy of the weights takes 10,000 bytes, and while sampling so do the
    gradients: (60,000 − 2,000) / 10 / 2 = 2,900 is 2,816, and (50,000 − 1,000) / 7 / 2 = 3,500 is 3,328. A fixed policy
    is not copied: (70,000 − 2,000) / 10 / 2 = 3,400 is 3,328, and (60,000 − 1,000) / 7 / 2 = 4,214 is 4,096.
    """
    meter = Bytes(100_000)
    monkeypatch.setattr(memory_meter, "meter", lambda: meter)
    monkeypatch.setattr(found_limits, "pass_costs", lambda *_, **__: [Cost(500, 1), Cost(2_000, 10)])
    monkeypatch.setattr(found_limits, "sampling_cost", lambda *_, **__: Cost(1_000, 7))
    optimizer = make_optimizer(torch.nn.Linear(100, 25, bias=False), weight_decay=0.0)
    policy = torch.nn.Linear(100, 25, bias=False).requires_grad_(trains)
    sampler = Sampler(cast(Any, policy), "float32", pad_token_id=0, beside_training=beside)
    taken = Taken(Row(10, 20), optimizers=[optimizer], sampler=sampler)
    job = cast(Any, SimpleNamespace(scratch=tmp_path, work=SimpleNamespace(microbatch_tokens=None)))

    found = found_limits.found_limits(job, taken, device=CPU)

    assert found == FoundLimits(tokens=tokens, sampled_tokens=sampled)
    assert meter.begun == 1, "what was measured is no part of the first step's peak"


def test_a_row_is_computed_however_little_memory_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_meter, "meter", lambda: Bytes(10))
    monkeypatch.setattr(found_limits, "pass_costs", lambda *_, **__: [Cost(500, 1)])
    job = cast(Any, SimpleNamespace(scratch=tmp_path, work=SimpleNamespace(microbatch_tokens=None)))
    found = found_limits.found_limits(job, Taken(Row(10, 20)), device=CPU)
    assert found == FoundLimits(tokens=30)


def test_the_longest_row_is_that_of_prompt_and_response_together() -> None:
    """Of rows of 9 + 3, 2 + 11 and 5 + 6 tokens the second is the longest. A row to sample is the longest prompt with
    the longest response that is allowed."""
    examples = Completions(
        prompt_ids=[[1] * 9, [1] * 2, [1] * 5],
        response_ids={"chosen": [[7] * 3, [7] * 4, [7] * 6], "rejected": [[7] * 2, [7] * 11, [7]]},
        pad_token_id=0,
        num_too_long=0,
    )
    assert longest_row(examples) == Row(2, 11)
    assert longest_row(examples, shares_prompt=True) == Row(2, 11, shares_prompt=True)
    prompts = Prompts(["a", "b", "c"], [[1] * 4, [1] * 7, [1]], [None] * 3, num_too_long=0)
    generation = Generation(max_prompt_tokens=48, max_response_tokens=24)
    assert longest_response(prompts, generation, shares_prompt=True) == Row(7, 24, shares_prompt=True)


def test_a_policy_that_only_samples_reads_the_longest_prompt_of_all_splits(tmp_path: Path) -> None:
    build_builtin("tiny", tmp_path, seed=1)
    policy = PolicyModel(load_policy(tmp_path))
    codec = Codec(load_tokenizer(tmp_path), Generation(max_response_tokens=24), None)
    splits = [
        Prompts(["a"] * len(lengths), [[1] * length for length in lengths], [None] * len(lengths), 0)
        for lengths in ((3, 4), (1, 7, 2), (), (6,))
    ]
    work = RolloutCollection(
        kind="rollout_collection", policy="p", prompts="d", reward="r", precision="bfloat16"
    )
    taken = taken_by_reading(policy, codec, splits, work)
    assert taken.row == Row(7, 24, shares_prompt=True)
    assert taken.sampler == Sampler(policy, "bfloat16", codec.pad_token_id)
    assert (taken.precision, taken.optimizers) == ("bfloat16", ())


def test_limits_of_several_policies_are_remembered_beside_each_other(tmp_path: Path) -> None:
    """The limits of the first policy are found first, and are the only ones in what other stages write."""
    limits = [FoundLimits(tokens=number, sampled_tokens=10 * number) for number in (1, 2, 3)]
    write_found(tmp_path, limits[0], device="d")
    assert json.loads((tmp_path / "found_limits.json").read_bytes()) == {
        "device": "d",
        "limits": {"tokens": 1, "sampled_tokens": 10},
    }
    write_found(tmp_path, limits[1], device="d", other="baseline")
    write_found(tmp_path, limits[2], device="d", other="teacher")
    others = (None, "baseline", "teacher")
    assert [read_found(tmp_path, device="d", other=other) for other in others] == limits
    assert [read_found(tmp_path, device="e", other=other) for other in others] == [None] * 3
    assert read_found(tmp_path, other="critic") is None
    assert describe_found(tmp_path) == (
        "found: passes of at most 1 positions, responses of 10 sampled side by side; "
        "baseline: responses of 20 sampled side by side; teacher: responses of 30 sampled side by side"
    )
    write_found(tmp_path, limits[1], device="e")
    assert [read_found(tmp_path, other=other) for other in others] == [limits[1], None, None]
    forget_found(tmp_path)
    assert describe_found(tmp_path) is None


def test_sampling_keeps_the_other_bounds() -> None:
    limits, found = PassLimits(3, 400, share_prompts=False), FoundLimits(tokens=400, sampled_tokens=3000)
    assert sampling_limits(limits, found, given=None, rows=None) == PassLimits(
        None, 3000, share_prompts=False
    )
    assert sampling_limits(limits, found, given=None, rows=7) == PassLimits(7, 3000, share_prompts=False)
    unfound = FoundLimits(tokens=400)
    assert sampling_limits(limits, unfound, given=None, rows=None) == limits
    assert sampling_limits(limits, unfound, given=None, rows=7) == replace(limits, rows=7)


def test_measuring_moves_nothing() -> None:
    """Measuring changes neither counts of passes, nor random numbers, weights or gradients."""
    weights = torch.nn.Parameter(torch.ones(4))

    def compute(batch: Sequences) -> Tensor:
        count_prompts(70, 7)
        return weights * torch.rand(4)

    taken_counts()
    count_prompts(5, 4)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    costs = pass_costs(
        [compute, compute], [optimizer], Row(2, 3), precision="float32", device=CPU, meter=Bytes(100)
    )
    assert len(costs) == 2
    assert torch.equal(torch.rand(2), expected)
    counts = taken_counts()
    assert (counts.prompt_positions, counts.prompt_tokens) == (5, 4)
    assert weights.grad is None
    assert torch.equal(weights, torch.ones(4))


class Held(torch.autograd.Function):
    """A function whose value and gradient are 0, and which holds a tensor until the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, held: Tensor) -> Tensor:
        ctx.save_for_backward(held)
        return 0 * weight

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        return 0 * given[0], None


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("shares_prompt", [True, False])
def test_what_a_pass_takes_is_what_it_holds(shares_prompt: bool, learns: bool) -> None:
    """By hand, weights of 4,000 bytes have gradients as large, if they learn, and a position of a pass keeps 4,000
    bytes until the backward pass. Where a prompt of 6 tokens is shared by responses of 2, each response also has a copy
    of its keys, here of 12,000 bytes, so that 2 positions more take 20,000 bytes.
    """
    weights = torch.nn.Parameter(torch.ones(1000), requires_grad=learns)

    def compute(batch: Sequences) -> Tensor:
        layout = batch.layout
        positions = batch.input_ids.numel() if layout is None else 6 + 2 * len(batch)
        copies = 0 if layout is None else len(batch)
        held: Tensor = Held.apply(weights[:1], torch.ones(1000 * positions + 3000 * copies))
        return held

    with LiveMemory(PLENTY) as live:
        costs = pass_costs(
            [compute], [], Row(6, 2, shares_prompt), precision="float32", device=CPU, meter=live
        )
    assert [round(cost.each) for cost in costs] == ([4_000, 10_000] if shares_prompt else [4_000])
    assert 4_000 * (1 + learns) <= costs[0].fixed


@pytest.fixture
def tiny(tmp_path: Path) -> PolicyModel:
    build_builtin("tiny", tmp_path, seed=0)
    return PolicyModel(load_policy(tmp_path))


def test_a_position_of_a_cache_has_a_key_and_a_value_in_each_layer(tiny: PolicyModel) -> None:
    with LiveMemory(PLENTY) as live:
        tiny.causal_lm(torch.tensor([[5]]))  # its weights are counted from now on
        found = memory_probe._cache_bytes(tiny, 10, precision="float32", meter=live)
    config = builtin_config("tiny")
    assert found == 2 * config.num_hidden_layers * config.hidden_size * 4


@pytest.mark.parametrize("row", [Row(prompt=30, response=90), Row(prompt=200, response=10)])
def test_what_sampling_takes_is_foreseen(row: Row, tiny: PolicyModel) -> None:
    """Two short measurements predict the peak of sampling 24 responses, where prompts and responses are the longest."""
    count = 24
    with LiveMemory(PLENTY) as live:
        cost = sampling_cost(tiny, row, precision="float32", pad_token_id=0, meter=live)
        live.begin()
        sample(
            tiny.causal_lm,
            [[4 + number] * row.prompt for number in range(count)],
            max_new_tokens=row.response,
            temperature=1.0,
            eos_token_ids=(),
            pad_token_id=0,
            seed=0,
        )
        taken = live.peak()
    foreseen = cost.fixed + cost.each * count * row.total
    assert taken <= foreseen <= 1.5 * taken
