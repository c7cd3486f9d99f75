"""The benchmark for GPUs works on a CPU: its counts equal hand-worked ones and torch's, and the whole script runs."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from benchmarks.gpu import devices
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.devices import Facts, data_sheet
from benchmarks.gpu.floor import Rates, Work, head_flops, read_cache, read_weights, trunk_flops, works
from benchmarks.gpu.parts import Iteration, config_of
from benchmarks.gpu.report import graphs_line, line, rows
from benchmarks.gpu.sizes import SIZES, Rollout, Size, TooLarge, fit, network_bytes
from benchmarks.gpu.timing import Timed, count_waits
from tests.support.uncaptured import Uncaptured
from vantage.models import replayed_steps

HAND = Size(
    "hand",
    hidden_size=4,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=8,
    vocab_size=10,
)
"""A layer has 4·4 + 2·(4·2) + 4·4 + 3·(4·8) = 144 weights in matrices, the head 10·4 = 40."""
FACTS = Facts("X", memory=1e9, peak=Rates(100.0, 50.0), measured=Rates(80.0, 40.0))
SHORT = Rollout(prompts=2, samples=3, prompt_tokens=2, response_tokens=3, minibatches=2)


@pytest.mark.parametrize(("name", "billions"), [("0.5b", 0.494), ("1.5b", 1.544)])
def test_sizes_are_those_of_the_models_that_they_are_named_after(name: str, billions: float) -> None:
    assert SIZES[name].shape.weights / 1e9 == pytest.approx(billions, abs=0.002)


def test_flops_by_hand() -> None:
    """Tokens 2, 3, 4 attend to 3, 4, 5 positions, 12 in all, at 4·2·2 FLOPs in each of two layers, and meet 144 weights each."""
    assert trunk_flops(HAND, first=2, last=5) == 2 * (2 * 144 * 3 + 4 * 4 * 12)
    assert head_flops(HAND, tokens=3) == 2 * 40 * 3
    whole = trunk_flops(HAND, first=0, last=5)
    assert whole == trunk_flops(HAND, first=0, last=2) + trunk_flops(HAND, first=2, last=5)


def test_products_are_those_that_torch_counts() -> None:
    """Torch counts every pair of positions; here those that a mask hides are left out."""
    size, length = SIZES["tiny"], 6
    config = config_of(size, length)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(torch.ones(1, length, dtype=torch.long))
    hidden = length * (length - 1) // 2
    masked = size.num_layers * 4 * size.num_heads * size.head_dim * hidden
    found = trunk_flops(size, first=0, last=length) + head_flops(size, tokens=length)
    assert counted.get_total_flops() == found + masked


def test_bytes_by_hand() -> None:
    """Tokens 3 and 4 read 3 and 4 positions, each of 2 layers · (key and value) · 2 wide · 2 bytes; the first token of a
    response comes with its prompt."""
    assert read_cache(HAND, SHORT) == (3 + 4) * 2 * 2 * 2 * 2
    assert read_weights(HAND) == 2 * (2 * 144 + 40)


def test_the_work_of_each_part_by_hand() -> None:
    found = works(HAND, SHORT, sampled_rows=4)
    trunk = 2 * (2 * 144 * 5 + 4 * 4 * 15)
    head = 2 * 40 * 3
    prompt = 2 * (2 * 144 * 2 + 4 * 4 * 3)
    decoded = 2 * (2 * 144 * 2 + 4 * 4 * (3 + 4))  # the last token is not read again
    sampling = found["sampling"]
    assert sampling.flops == 2 * prompt + 6 * (decoded + head)
    assert sampling.read == 6 * 112 + 2 * 3 * 656, "two batches of three tokens"
    assert sampling.tokens == 18
    assert found["reward"].flops == found["old values"].flops == 6 * trunk
    assert found["reference"].flops == found["old log-probabilities"].flops == 6 * (trunk + head)
    assert found["policy update"].flops == 18 * (trunk + head)
    assert found["critic update"].flops == 18 * trunk
    assert found["critic update"].tokens == 30


@pytest.mark.parametrize(("name", "seconds"), [("0.5b", 78), ("1.5b", 256)])
def test_the_floor_of_8192_responses_on_an_h200(name: str, seconds: float) -> None:
    """The floor was computed before, by other code, from products at 790 TFLOP/s and bytes at 4.8 TB/s, for policy,
    critic, reference and reward model of one shape and one epoch. It left out AdamW's bytes, which are counted here.
    """
    rollout = Rollout(prompts=512)
    parts = works(SIZES[name], rollout, sampled_rows=2048)
    rates = Rates(flops=790e12, bandwidth=4.8e12)
    assert sum(work.seconds(rates) for work in parts.values()) == pytest.approx(seconds, rel=0.01)


def test_what_fits_into_memory() -> None:
    rollout = Rollout()
    small, large = (fit(SIZES["1.5b"], rollout, memory=memory) for memory in (80e9, 141e9))
    assert small.sampled_rows <= large.sampled_rows
    assert large.sampled_rows >= 256
    assert small.pass_tokens < large.pass_tokens
    assert small.pass_tokens % rollout.total_tokens == 0
    with pytest.raises(
        TooLarge, match=r"--size 1.5b with 768 tokens a response needs .* this device has 24.0 GB"
    ):
        fit(SIZES["1.5b"], rollout, memory=24e9)
    # all of a small rollout fits: no more than there is
    assert fit(SIZES["tiny"], SHORT, memory=8e9).sampled_rows == SHORT.responses


def test_the_bytes_of_the_networks_by_hand() -> None:
    """Each of the four networks has 348 weights: 2·144 in matrices of layers, 2·2 + 1 norms of 4, and 40 embeddings."""
    weights = 2 * 144 + (2 * 2 + 1) * 4 + 40
    assert HAND.shape.weights == HAND.shape.trunk_weights == weights
    assert network_bytes(HAND) == weights * (16 + 16 + 4 + 2 + 2)


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4800e9),
        ("NVIDIA H100 80GB HBM3", 3350e9),
        ("NVIDIA A100-SXM4-80GB", 2039e9),
        ("NVIDIA L40S", 864e9),
        ("NVIDIA GeForce RTX 4090", 1008e9),
        ("Tesla T4", None),
    ],
)
def test_a_device_is_known_by_its_own_name(name: str, bandwidth: float | None) -> None:
    found = data_sheet(name)
    assert (None if found is None else found.bandwidth) == bandwidth


def test_rates_are_measured_where_there_is_no_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 2·64³ FLOPs and a copy of 1,000 bytes, which are read and written, take 0.5 s each."""
    monkeypatch.setitem(devices.WIDTH, "cpu", 64)
    monkeypatch.setitem(devices.COPIED, "cpu", 1000)
    monkeypatch.setattr(devices, "_quickest", lambda work, device: work() is None or 0.5)
    found = devices.facts(torch.device("cpu"))
    assert found.peak is None
    assert (found.measured.flops, found.measured.bandwidth) == (4 * 64**3, 4000.0)


def test_rows_by_hand() -> None:
    """Sampling has 60 FLOPs in 2 s at a peak of 100/s, so its MFU is 30 %. Its 40 bytes at 50/s would take 0.8 s of the
    2 s. Its floor is 60 FLOPs at the measured 80/s and these 0.8 s, together 1.55 s."""
    facts = FACTS
    parts = {"sampling": Work(60.0, read=40.0, tokens=10), "reward": Work(40.0, tokens=20)}
    timed = {"sampling": Timed(2.0, 1.0, 3.0, 5e9, waits=7), "reward": Timed(0.5, 0.5, 0.5, 6e9, waits=1)}
    sampling, reward, whole = rows(timed, parts, facts)
    assert (sampling.mfu, sampling.bandwidth_share) == pytest.approx((0.3, 0.4))
    assert sampling.floor_seconds == pytest.approx(1.55)
    assert (reward.mfu, reward.bandwidth_share, reward.floor_seconds) == (0.8, None, 0.5)
    assert (whole.seconds, whole.tokens_per_second, whole.peak_memory, whole.waits) == (2.5, 4.0, 6e9, 8)
    assert whole.mfu == pytest.approx(100 / 2.5 / 100)
    assert line(whole) == "| iteration | 2.5 (1.5–3.5) | 4 | 40.0% |  | 2.05 | 1.22 | 6 | 8 |"
    unknown = rows(timed, parts, replace(facts, peak=None))[0]
    assert unknown.mfu == pytest.approx(60 / 2 / 80)


def test_waits_are_counted_as_torch_tells_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three equal warnings count three times, and other warnings do not. The mode is restored, also after an error."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def part() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at …)", stacklevel=1)
        warnings.warn("deprecated", stacklevel=1)

    assert count_waits(part) == 3
    with pytest.raises(ZeroDivisionError):
        count_waits(lambda: print(1 // 0))
    assert modes == ["warn", "default"] * 2


def test_floors_are_printed_without_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--floor", "l40s", "--size", "tiny", "0.5b", "1.5b", "--iterations", "4"])
    first, tiny, half, large = capsys.readouterr().out.splitlines()
    assert first.startswith("L40S: products 362.1 TFLOP/s, memory 864 GB/s")
    assert tiny.startswith("tiny, 8,192 responses: ")
    assert half.startswith("0.5b, 8,192 responses: ")
    assert large.startswith("1.5b: --size 1.5b with 768 tokens a response needs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minibatches", "3"], "--minibatches=3 does not divide 2048 responses"),
        (["--size", "70b"], "invalid choice: '70b'"),
        (["--device", "cuda"], "torch finds no GPU"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


ABSENT = (
    "prefect",
    "mlflow",
    "pandera",
    "datasets",
    "pyarrow",
    "accelerate",
    "peft",
    "pandas",
    "sklearn",
    "obstore",
    "typer",
)
SCRIPT = """
import sys
sys.modules.update(dict.fromkeys({absent}, None))  # as if they were not installed
from benchmarks.gpu.__main__ import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_the_whole_script_runs_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    settings = "--device cpu --size tiny --precision float32 --warmup 0 --measured 2 --minibatches 2"
    sizes = "--prompts 2 --samples 2 --prompt-tokens 5 --response-tokens 4"
    other = ["--json", str(tmp_path / "found.json"), "--peers-python", str(tmp_path / "none")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(absent=ABSENT), *settings.split(), *sizes.split(), *other],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "2 × 2 responses of 4 tokens to prompts of 5, 2 steps; 4 sampled at once, passes of 18 positions"
        in done.stdout
    )
    assert "could not be started (No such file or directory)" in done.stdout
    [found] = json.loads((tmp_path / "found.json").read_text())
    names = [row["part"] for row in found["rows"]]
    assert names == [*works(SIZES["tiny"], SHORT, sampled_rows=1), "iteration"]
    assert all(row["seconds"] > 0 and row["mfu"] > 0 and row["waits"] is None for row in found["rows"])
    assert found["trl_seconds"] is None
    assert found["graphs"] == {"graphs_captured": 0, "graph_replays": 0, "graph_fallbacks": 0}
    assert "CUDA graphs while sampling: 0 captured, 0 replays, 0 times without\n" in done.stdout


def test_what_graphs_gained_is_told_beside_what_sampling_takes_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One graph is captured and replayed for two tokens in each of two batches; on a CPU a stand-in calls the steps
    directly. Sampling takes 2 s with graphs and 3 s without."""
    size, rollout = SIZES["tiny"], replace(SHORT, prompt_tokens=4)
    fits = replace(fit(size, rollout, memory=8e9), sampled_rows=3)
    iteration = Iteration(size, rollout, fits, device=torch.device("cpu"), precision="float32")
    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Uncaptured})
    monkeypatch.setattr(replayed_steps, "FEWEST_TOKENS", 2)
    iteration.sample()
    counts = iteration.counts
    assert (counts.graphs_captured, counts.graph_replays, counts.graph_fallbacks) == (1, 4, 0)
    replayed = iteration.sequences.response_ids
    row = rows({"sampling": Timed(2.0, 1.0, 3.0, 5e9)}, {"sampling": Work(60.0, read=40.0)}, FACTS)[0]
    assert graphs_line(counts, Timed(3.0, 3.0, 3.0, 5e9), sampling=row) == (
        "CUDA graphs while sampling: 1 captured, 4 replays, 0 times without; switched off: 3 s, 1.50 times as long"
    )
    iteration._seed = 0
    iteration.sample_plainly()
    assert iteration.counts.graph_replays == 0
    assert torch.equal(iteration.sequences.response_ids, replayed)
    assert replayed_steps.SWITCH not in os.environ
