"""The largest passes that fit are found before the first step: in memory that is counted tensor by tensor."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.slow import slow
from tests.tasks.conftest import Pipeline
from tests.tasks.golden_results import Results
from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.live_memory import LiveMemory
from tests.tasks.test_stages_on_ranks import start
from vantage.ledger.journal import read
from vantage.schemas.metric_names import OF_MACHINE
from vantage.schemas.recipe.pass_limits import FoundLimits
from vantage.tasks.stages import run_stage
from vantage.tasks.training import cuts, found_limits, memory_meter, memory_probe
from vantage.tasks.training.scratch import JOURNAL, read_found, write_found

Contents = Callable[[Path], dict[str, bytes]]
PLENTY = 10**10
ROW = 80
"""Tokens of a row. No demonstration of the pipeline has more, and two of the longest together do."""
LEARNING_RATE = 1e-3
"""Learning rate of the pipeline's reward model and value pretraining, about the most by which a step moves a weight.
Fine-tuning has a tenth of it."""
DEVICE = "a device of the tests"


@contextmanager
def memory(limit: int, monkeypatch: pytest.MonkeyPatch, *, device: str = DEVICE) -> Iterator[LiveMemory]:
    """Give stages so many bytes, and count them."""
    live = LiveMemory(limit, device=device)
    with monkeypatch.context() as patched:
        patched.setattr(memory_meter, "meter", lambda: live)
        with live:
            yield live


@pytest.mark.parametrize(
    "name",
    [
        "sft",
        "reward",
        pytest.param("value", marks=pytest.mark.slow),
        pytest.param("policy", marks=pytest.mark.slow),
    ],
)
def test_where_all_fits_the_search_leaves_no_trace(
    name: str, pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No random state, weight, gradient or count of passes is another than without it."""
    expected, searched = pipeline.result(name), pipeline.job(name, folder=tmp_path)
    with memory(PLENTY, monkeypatch) as live:
        assert run_stage(searched) == expected
    assert live.asked == 1
    assert contents(searched.output) == contents(pipeline.folder(name))
    assert curve(searched.scratch) == curve(pipeline.root / name / "scratch")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return runs without the search; what several of them read is made once."""
    return Results(tmp_path_factory.mktemp("without"))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of the runs, which the test makes with the search."""
    return Results(tmp_path_factory.mktemp("searched"))


@pytest.mark.parametrize(
    "name",
    [
        "dpo",
        *slow(
            "dpo: collected responses",
            "reward_model: rankings",
            "best_of_n",
            "value_pretraining",
            "policy_optimization: vapo",
            "preference_collection",
            "evaluation",
        ),
    ],
)
def test_a_run_with_the_search_makes_what_one_without_it_makes(
    name: str, without: Results, searched: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without.of(name)
    with memory(PLENTY, monkeypatch):
        found = searched.of(name)
    assert found.artifact == expected.artifact
    assert found.result.metrics == expected.result.metrics


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return a pipeline whose model keeps so much of a pass that a row more or less is less than a fifth of it."""
    return Pipeline(tmp_path_factory.mktemp("wide"), width=128)


@pytest.mark.parametrize(
    ("name", "share", "copies"),
    [
        ("sft", 0.6, 0),
        ("reward", 0.6, 0),
        pytest.param("value", 0.85, 1, marks=pytest.mark.slow),
        pytest.param("policy", 0.9, 1, marks=pytest.mark.slow),
    ],
)
def test_passes_fill_the_memory_that_there_is_and_change_no_weight(
    name: str, share: float, copies: int, wide: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage has a share of the memory that it takes where there is plenty. It keeps as many copies of the weights
    off the GPU: the best so far, on the CPU.
    """
    monkeypatch.setitem(cuts.OVERHEAD, "cpu", 10**6)  # only memory bounds the passes
    shorter = {"iterations": 2} if name == "policy" else {}
    whole, cut = (wide.job(name, folder=tmp_path / each, **shorter) for each in ("whole", "cut"))
    with memory(PLENTY, monkeypatch) as live:
        run_stage(whole)
    limit = int(share * live.peak())
    with memory(limit, monkeypatch) as live:
        run_stage(cut)
    weights = sum(file.stat().st_size for file in cut.output.glob("*.safetensors"))
    assert 0.8 * limit < live.peak() - copies * weights <= limit
    found, unbounded = (read_found(job.scratch) for job in (cut, whole))
    assert found is not None
    assert unbounded is not None
    assert found.tokens < unbounded.tokens
    assert_alike_files(cut.output, whole.output)


@pytest.mark.parametrize("step", [0, 2])
def test_an_attempt_that_goes_on_has_the_limits_of_the_one_before(
    step: int, pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits stay though another amount of memory is free, also before the first checkpoint."""
    # the limits of the whole attempt, of the killed one, and of its successor
    limits = iter([10**6, 10**6, PLENTY])

    def run(job: Any) -> Any:
        with memory(next(limits), monkeypatch):
            return run_stage(job)

    monkeypatch.setitem(cuts.OVERHEAD, "cpu", 10**6)
    same_bytes_after_a_kill(
        run,
        lambda folder: pipeline.job("sft", folder=folder),
        tmp_path,
        step=step,
        contents=contents,
        monkeypatch=monkeypatch,
    )
    assert not list(limits)
    found = read_found(tmp_path / "cut" / "scratch")
    assert found is not None
    assert found.tokens < 200, "no more than one row, where there is too little memory for the weights"


@pytest.mark.slow
def test_all_ranks_have_the_limit_of_the_one_with_least_memory(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds whichever rank it is. That rank stays within its memory, and the weights are those of one process."""
    alone = pipeline.job("sft", folder=tmp_path / "alone")
    with memory(PLENTY, monkeypatch) as live:
        run_stage(alone)
    little = live.peak() * 6 // 10
    shares = [[PLENTY, little], [little, PLENTY], [PLENTY, PLENTY]]
    jobs = [pipeline.job("sft", folder=tmp_path / str(number)) for number in range(len(shares))]
    start(2, tmp_path / "jobs", jobs, memory=shares)
    first, second, plenty = (read_found(job.scratch) for job in jobs)
    assert first is not None
    assert plenty is not None
    assert ROW <= first.tokens < plenty.tokens
    assert second == first
    assert json.loads((jobs[0].scratch / "peak-1.json").read_text()) <= little
    assert json.loads((jobs[1].scratch / "peak-0.json").read_text()) <= little
    for job in jobs:
        assert_alike_files(job.output, alone.output)


def test_limits_of_another_device_are_found_anew(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pipeline.job("sft", folder=tmp_path)
    write_found(job.scratch, FoundLimits(tokens=100), device="a smaller one")
    with memory(PLENTY, monkeypatch) as live:
        run_stage(job)
    assert live.asked == 1
    assert read_found(job.scratch, device="a smaller one") is None
    found = read_found(job.scratch, device=DEVICE)
    assert found is not None
    assert found.tokens > 100


def test_what_the_recipe_says_is_not_looked_for(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pipeline.job("sft", folder=tmp_path, microbatch_tokens=500)
    with memory(PLENTY, monkeypatch) as live:
        run_stage(job)
    assert live.asked == 0
    assert read_found(job.scratch) is None


def test_after_memory_ran_out_the_smaller_bound_holds(pipeline: Any, tmp_path: Path) -> None:
    """The half of a sampling batch may be more than a pass that trains has room for."""
    found = FoundLimits(tokens=400, sampled_tokens=3000)
    for given, tokens, sampled in ((None, 400, 3000), (1500, 400, 1500), (200, 200, 200)):
        job = pipeline.job("value", folder=tmp_path, microbatch_tokens=given)
        within = found_limits.within_memory(job, found).work.pass_limits
        assert within.tokens == tokens
        assert found_limits.sampling_limits(within, found, given=given, rows=None).tokens == sampled


def test_what_does_not_fit_twice_goes_one_by_one(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = pipeline.job("sft", folder=tmp_path)
    embedding = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and ids.numel() > ROW:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embedding(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    with memory(PLENTY, monkeypatch):
        run_stage(job)
    found = read_found(job.scratch)
    assert found is not None
    assert found.tokens <= ROW
    assert "two of the longest sequences do not fit side by side: CUDA out of memory" in caplog.text


def test_dropout_draws_what_it_would_have_drawn(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[torch.Tensor] = []
    search = found_limits.found_limits

    def seen(*args: Any, **named: Any) -> Any:
        torch.manual_seed(7)
        found = search(*args, **named)
        states.append(torch.get_rng_state())
        return found

    monkeypatch.setattr("vantage.tasks.sft.found_limits", seen)
    compute = memory_probe._pass

    def drawing(*args: Any, **named: Any) -> Any:
        torch.rand(3)
        return compute(*args, **named)

    monkeypatch.setattr(memory_probe, "_pass", drawing)
    run_stage(pipeline.job("sft", folder=tmp_path / "whole"))
    with memory(PLENTY, monkeypatch):
        run_stage(pipeline.job("sft", folder=tmp_path / "searched"))
    assert torch.equal(*states)


def assert_alike_files(found: Path, expected: Path) -> None:
    """Assert that the weights are those, but for rounding."""
    for file in expected.glob("*.safetensors"):
        there, here = load_file(file), load_file(found / file.name)
        for tensor, values in there.items():
            apart = (here[tensor] - values).abs()
            assert apart.max() < LEARNING_RATE / 10, "AdamW magnifies what rounding does to a gradient near 0"
            assert apart.mean() < LEARNING_RATE / 1000


def curve(scratch: Path) -> list[dict[str, float]]:
    """Return the metrics of every step, without those of time and memory."""
    return [
        {name: value for name, value in entry.metrics.items() if name not in OF_MACHINE}
        for entry in read(scratch / JOURNAL)
    ]
