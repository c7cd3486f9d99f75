"""The table against peers refuses unequal work, lets cores change sides, and uses the same drawn lengths for both."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from benchmarks.peers.__main__ import row
from benchmarks.peers.counting_model import SHAPES, build_counting_model, smollm2_shape
from benchmarks.peers.ours import work_of
from benchmarks.peers.pairs import Pair, SideFailed, UnequalWork, check_equal, run_pair, spread, two_cores
from benchmarks.peers.prepare import make_rows, prepare
from benchmarks.peers.workloads import (
    BOS,
    EOS,
    PAD,
    WORKLOADS,
    Work,
    Workload,
    draw_lengths,
    prompt_ids,
    read_material,
    response_ids,
)
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.sampling import sample

WORK = Work(
    seconds=2.0,
    cpu_seconds=1.0,
    optimizer_steps=16,
    trained_rows=64,
    trained_tokens=4096,
    generated_tokens=2048,
    trained_positions=5000,
    read_positions=6000,
)
CORE = min(os.sched_getaffinity(0))
CORES = (CORE, CORE)
SMALL = Workload("small", "ppo", 12, 2, 9, prompt_tokens=6)


@pytest.mark.parametrize("field", ["optimizer_steps", "trained_rows", "trained_tokens", "generated_tokens"])
def test_unequal_work_is_refused(field: str) -> None:
    other = replace(WORK, **{field: getattr(WORK, field) + 1})
    said = (
        f"small: {field} is {getattr(WORK, field):,} on our side and {getattr(other, field):,} on the other"
    )
    with pytest.raises(UnequalWork, match=said):
        check_equal("small", Pair(WORK, other))


def test_padding_and_time_may_differ_and_no_work_is_refused() -> None:
    check_equal("small", Pair(WORK, replace(WORK, seconds=9.0, trained_positions=1, read_positions=1)))
    none = Work(1.0, 1.0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(UnequalWork, match="neither side counted any work"):
        check_equal("small", Pair(none, none))


def test_cores_change_sides_from_pair_to_pair() -> None:
    assert [two_cores(number, [2, 5, 7]) for number in range(4)] == [(2, 5), (5, 2), (2, 5), (5, 2)]
    with pytest.raises(ValueError, match="this process may use 1 core"):
        two_cores(0, [3])


def test_ratios_by_hand() -> None:
    """The peer takes 3, 4 and 8 s and our side 2, 2 and 5 s, so the ratios are 1.5, 2 and 1.6. The ratio of the
    medians, 4 s and 2 s, is another number."""
    times = ((2.0, 3.0), (2.0, 4.0), (5.0, 8.0))
    pairs = [Pair(replace(WORK, seconds=ours), replace(WORK, seconds=peer)) for ours, peer in times]
    found = spread([pair.ratio for pair in pairs])
    assert (found.median, found.lowest, found.highest) == pytest.approx((1.6, 1.5, 2.0))
    line = row(SMALL, pairs)
    assert "| small | 2.00 (2.00–5.00) | 4.00 (3.00–8.00) | 1.60 (1.50–2.00) | 1.00 (1.00–1.00) |" in line


def test_lengths_are_drawn_once() -> None:
    ragged = WORKLOADS["ppo-ragged"]
    drawn = draw_lengths(ragged, 1000)
    assert drawn == draw_lengths(ragged, 1000) == [*draw_lengths(ragged, 600), *drawn[600:]]
    assert (min(drawn), max(drawn)) == (8, 128)
    assert set(draw_lengths(WORKLOADS["ppo"], 100)) == {32}


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counting")
    build_counting_model(folder, seed=1)
    return folder


@pytest.mark.slow
def test_both_samplers_give_the_drawn_lengths(counting: Path) -> None:
    ragged = WORKLOADS["sampling-ragged"]
    lengths, rows = draw_lengths(ragged, 40), make_rows(ragged, (), 40)
    prompts = [prompt_ids(row["prompt"]) for row in rows]
    assert {len(prompt) for prompt in prompts} == {32}

    ours = sample(
        load_policy(counting),
        prompts,
        max_new_tokens=128,
        temperature=1.0,
        eos_token_ids=[EOS],
        pad_token_id=PAD,
        seed=3,
    )
    assert [len(response) for response in ours.responses] == lengths
    assert all(ours.ended)

    torch.manual_seed(3)
    config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=128, eos_token_id=EOS, pad_token_id=PAD
    )
    model = AutoModelForCausalLM.from_pretrained(counting)
    output = model.generate(input_ids=torch.tensor(prompts), generation_config=config)[:, 32:]
    assert (output != PAD).sum(dim=1).tolist() == lengths

    of_one = set(ours.responses[0][:-1])
    assert len(of_one) == lengths[0] - 1, "each state once"
    assert ours.responses[0] != output[0, : lengths[0]].tolist(), "one of two tokens at random"


def test_the_tokenizer_encodes_as_both_sides_do(counting: Path) -> None:
    tokenizer = load_tokenizer(counting)
    [row] = make_rows(WORKLOADS["sft-ragged"], ("response",), 1)
    assert tokenizer(row["prompt"])["input_ids"] == prompt_ids(row["prompt"])
    whole = tokenizer(row["response"] + tokenizer.eos_token)["input_ids"]
    assert whole == [BOS, *response_ids(row["response"])]


def test_the_material_has_the_rows_that_vantage_prepared(tmp_path: Path) -> None:
    pairs = replace(SMALL, kind="reward")
    material = read_material(prepare(pairs, tmp_path))
    assert material.workload == pairs
    assert len(material.prompts) == len(material.responses) == 12
    made = {
        each["prompt"]: [each["chosen"], each["rejected"]]
        for each in make_rows(pairs, ("chosen", "rejected"), 44)
    }
    assert [made[prompt] for prompt in material.prompts] == material.responses


SIDE = """
import os, sys
from vantage.attempts.launchers.quick_imports import quick_imports
with quick_imports():
    import torch
    from transformers import LlamaConfig, LlamaModel
from benchmarks.peers.clock import Clock
from benchmarks.peers.workloads import Workload

os.sched_setaffinity(0, {int(sys.argv[2])})
clock = Clock(Workload("small", "ppo", 2, 1, 2, prompt_tokens=2, epochs=2, warmup=1, measured=2), optimizers=2)
print("libraries may print")
model = LlamaModel(LlamaConfig(
    vocab_size=9, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, pad_token_id=0
))
optimizers = [torch.optim.SGD(model.parameters()) for _ in range(2)]
ids = torch.tensor([[1, 5, 6, 2], [1, 5, 2, 0]])
while True:
    with torch.no_grad():
        model(ids[:1])
    clock.generated(5)
    for _ in range(2):
        model(ids, attention_mask=(ids != 0).long()).last_hidden_state.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
"""


@pytest.mark.slow
def test_a_pair_of_processes_counts_whole_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side measures 2 iterations of 2 steps, on responses of 2 and 1 tokens to prompts of 2: 8 positions with
    padding. An iteration also samples 5 tokens and reads 4 positions without a gradient."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    script = tmp_path / "side.py"
    script.write_text(SIDE)
    side = [sys.executable, str(script)]
    pair = run_pair(tmp_path / "material.json", ours=side, peer=side, cores=CORES)
    for work in (pair.ours, pair.peer):
        assert replace(work, seconds=0, cpu_seconds=0) == Work(0, 0, 4, 8, 12, 10, 32, 8)
        assert 0 < work.cpu_seconds < 60
        assert work.seconds > 0
    check_equal("small", pair)


def test_a_side_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "raise SystemExit('no such library')"]
    with pytest.raises(SideFailed, match=r"(?s)ours ended early.*no such library"):
        run_pair(tmp_path / "material.json", ours=failing, peer=failing, cores=CORES)


@pytest.mark.slow
def test_a_large_vocabulary_counts_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model has SmolLM2's shape but fewer layers; tokens without a state are never sampled."""

    def shallow() -> LlamaConfig:
        config = smollm2_shape()
        config.num_hidden_layers = 2
        return config

    monkeypatch.setitem(SHAPES, "smollm2", shallow)
    build_counting_model(tmp_path, seed=1, shape="smollm2")
    workload = WORKLOADS["ppo-smollm2"]
    prompts = [prompt_ids(row["prompt"]) for row in make_rows(replace(workload, shortest=3), (), 4)]
    found = sample(
        load_policy(tmp_path),
        prompts,
        max_new_tokens=32,
        temperature=1.0,
        eos_token_ids=[EOS],
        pad_token_id=PAD,
        seed=3,
    )
    assert [len(response) for response in found.responses] == draw_lengths(replace(workload, shortest=3), 4)


def test_both_sides_have_the_workloads_precision_and_packing(tmp_path: Path) -> None:
    smollm2 = replace(SMALL, precision="bfloat16")
    material = read_material(prepare(smollm2, tmp_path / "one"))
    assert work_of(material)["precision"] == "bfloat16"
    packed = replace(SMALL, kind="sft", packed=True)
    material = read_material(prepare(packed, tmp_path / "two"))
    assert work_of(material)["packing"] is True
    plain = replace(packed, packed=False)
    assert not {"packing", "compile"} & work_of(replace(material, workload=plain)).keys()
    assert work_of(replace(material, workload=replace(plain, compiled=True)))["compile"] is True
