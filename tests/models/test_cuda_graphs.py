"""A capture calls the GPU in the right order; the GPU is a stand-in that only records its calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import pytest
import torch

from vantage.models.cuda_graphs import CudaGraphs


class FakeGPU:
    """What `CudaGraphs` asks of torch, written down in its order; a step that is captured is not computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.generator = FakeGenerator(self)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, partial(self.say, name))
        numbers = count()
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {next(numbers)}")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream(self, "side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream(self, "current"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))

    def say(self, what: str) -> None:
        self.said.append(what)

    @contextmanager
    def on(self, stream: "FakeStream") -> Iterator[None]:
        self.say(f"to {stream.name}")
        yield
        self.say(f"from {stream.name}")


@dataclass
class FakeStream:
    gpu: FakeGPU
    name: str

    def wait_stream(self, other: "FakeStream") -> None:
        self.gpu.say(f"{self.name} waits for {other.name}")


@dataclass
class FakeGenerator:
    gpu: FakeGPU
    state: str = "own"

    def graphsafe_get_state(self) -> str:
        return self.state

    def clone_state(self) -> str:
        return "spare"

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state
        self.gpu.say(f"{state} state")


@dataclass
class FakeGraph:
    gpu: FakeGPU

    def capture_begin(self, *, pool: str, capture_error_mode: str) -> None:
        self.gpu.say(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self.gpu.say("end")
        if self.gpu.said[-2] == "broken":
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.gpu.say("replay")


WARM_UP = ["side waits for current", "to side", "step", "restore", "from side", "current waits for side"]
BEGUN = ["synchronize", "empty_cache", "to side", "spare state", "begin pool 0 thread_local"]


def test_a_capture_asks_the_gpu_for_what_it_needs_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch)
    graphs = CudaGraphs()
    replay = graphs(partial(gpu.say, "step"), restore=partial(gpu.say, "restore"))
    assert gpu.said == [*WARM_UP, *BEGUN, "step", "end", "own state", "from side"]
    gpu.said.clear()
    replay()
    graphs.end_all()
    assert gpu.said == ["replay", "synchronize"]


def test_no_pool_is_used_again_after_its_graphs_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch frees a pool with its last graph, and a capture into a freed pool is an internal error (2.11: CachingHostAllocator)."""
    gpu = FakeGPU(monkeypatch)
    graphs = CudaGraphs()
    for _ in range(2):
        graphs(partial(gpu.say, "step"), restore=partial(gpu.say, "restore"))
    graphs.end_all()
    graphs(partial(gpu.say, "step"), restore=partial(gpu.say, "restore"))
    assert [each.split()[2] for each in gpu.said if each.startswith("begin")] == ["0", "0", "1"]


def test_a_capture_that_fails_ends_and_tells_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch)

    def step() -> None:
        if gpu.said[-1].startswith("begin"):
            gpu.say("broken")
            raise ValueError("a step that cannot be captured")
        gpu.say("step")

    with pytest.raises(ValueError, match="a step that cannot be captured"):
        CudaGraphs()(step, restore=partial(gpu.say, "restore"))
    assert gpu.said == [*WARM_UP, *BEGUN, "broken", "end", "own state"]
    assert gpu.generator.state == "own"
