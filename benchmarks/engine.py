"""Tokens per second of the loop, of transformers' ``generate`` and continuous batching, and of vLLM, one after the other in one process.

    python -m benchmarks.engine [--shape smollm2 0.5b 7b] [--device cuda] [--rows 128] [--prompt 256] [--tokens 512] [--ragged 128]

The model has the shape of a known one and random weights. ``--ragged N`` ends a response after N tokens on average; without it
every response has --tokens. Each engine samples twice with different seeds, and the second time counts. The loop also computes each token's
log-probability, which the engines of transformers do not. vLLM runs where it is installed: on a CPU ``make test-engine`` makes such an
environment, ``.venv-engine``.
"""

import argparse
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from benchmarks.gpu.devices import synchronize
from benchmarks.gpu.parts import config_of
from benchmarks.gpu.sizes import SIZES
from vantage.models.builtin import write_tokenizer
from vantage.models.folders import load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.models.replayed_steps import SWITCH
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.engine import RolloutEngine, load_engine

PAD = 0
FIRST = 3
"""Lowest id of a prompt."""


@dataclass(frozen=True)
class Ending(Codec):
    """Codec of a model whose responses end with one of the first ids behind those of prompts."""

    ends: int = 0
    """Number of ids that end a response."""

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a response."""
        return tuple(range(FIRST, FIRST + self.ends))


@dataclass(frozen=True)
class Task:
    """Work of every engine."""

    policy: PolicyModel
    codec: Ending
    prompts: list[list[int]]
    precision: str
    rows: int
    """Most rows that are sampled side by side."""

    def generation(self) -> GenerationConfig:
        """Return the settings of sampling as transformers takes them."""
        return GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.codec.generation.max_response_tokens,
            eos_token_id=list(self.codec.stop_token_ids) or None,
            pad_token_id=PAD,
        )

    @contextlib.contextmanager
    def plain_model(self) -> Iterator[Any]:
        """Yield a copy of the model that is held in the precision of the computation."""
        held = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        model: Any = LlamaForCausalLM(self.policy.causal_lm.config)  # its type annotations lack ``generate``
        model.to(device=self.policy.device, dtype=held).eval()
        model.load_state_dict(self.policy.causal_lm.state_dict())
        yield model
        del model


Draw = Callable[[int], int]
"""Sample all responses with this seed; returns how many tokens they have."""


@contextlib.contextmanager
def with_engine(task: Task, rollout: Sampling) -> Iterator[tuple[Draw, RolloutEngine]]:
    """Yield a ``RolloutEngine`` that samples."""
    limits = PassLimits(rows=task.rows)
    engine = load_engine(task.policy, task.codec, limits=limits, precision=task.precision, rollout=rollout)  # type: ignore[arg-type]

    def draw(seed: int) -> int:
        return sum(map(len, engine.generate(task.prompts, count=1, seed=seed).responses))

    yield draw, engine


@contextlib.contextmanager
def loop(task: Task) -> Iterator[Draw]:
    """Yield Vantage's own sampler."""
    with with_engine(task, Sampling()) as (draw, _):
        yield draw


@contextlib.contextmanager
def loop_without_graphs(task: Task) -> Iterator[Draw]:
    """Yield the loop's sampler, without CUDA graphs."""
    os.environ[SWITCH] = "0"
    try:
        with loop(task) as draw:
            yield draw
    finally:
        del os.environ[SWITCH]


@contextlib.contextmanager
def generate(task: Task) -> Iterator[Draw]:
    """Yield ``generate``: a batch runs until its longest response has ended."""
    with task.plain_model() as model:

        def draw(seed: int) -> int:
            torch.manual_seed(seed)
            tokens = 0
            for first in range(0, len(task.prompts), task.rows):
                ids = torch.tensor(task.prompts[first : first + task.rows], device=model.device)
                found = model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=task.generation()
                )
                tokens += int(_lengths(found[:, ids.shape[1] :], task.codec.stop_token_ids).sum())
            return tokens

        yield draw


@contextlib.contextmanager
def continuous_batching(task: Task) -> Iterator[Draw]:
    """Yield ``generate_batch``: a response that has ended gives its place to another one."""
    with task.plain_model() as model:

        def draw(seed: int) -> int:
            torch.manual_seed(seed)
            found = model.generate_batch(
                task.prompts, generation_config=task.generation(), persistent_manager=True
            )
            assert len(found) == len(task.prompts)
            return sum(len(each.generated_tokens) for each in found.values())

        try:
            yield draw
        finally:
            model.destroy_cached_continuous_batching_manager()


@contextlib.contextmanager
def vllm(task: Task) -> Iterator[Draw]:
    """Yield vLLM, whose updates of all weights are timed too."""
    with with_engine(task, Sampling(engine="vllm")) as (draw, engine):
        yield draw
        begun = time.perf_counter()
        engine.take_weights(task.policy.causal_lm.named_parameters())
        print(f"  vllm: update of all weights {time.perf_counter() - begun:.2f} s", flush=True)


def _lengths(responses: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    """Return how many tokens each row (n, T) has up to its first end, which counts."""
    is_end = torch.isin(responses, torch.tensor(ends, device=responses.device))
    return torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, responses.shape[1])


ENGINES: Mapping[str, Callable[[Task], contextlib.AbstractContextManager[Draw]]] = {
    "loop": loop,
    "loop_without_graphs": loop_without_graphs,
    "generate": generate,
    "continuous_batching": continuous_batching,
    "vllm": vllm,
}


def main() -> None:
    """Print each engine's tokens, seconds, tokens per second, and ratio to the loop on a line of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SIZES, nargs="+", default=["smollm2"])
    parser.add_argument(
        "--engines", choices=ENGINES, nargs="+", help="all that can run here, if none is named"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=32, help="responses")
    parser.add_argument("--at-once", type=int, help="responses side by side; all, if it is left out")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a response")
    parser.add_argument(
        "--ragged", type=int, help="tokens of a response on average; all have --tokens if it is left out"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    names = asked.engines or [name for name in ENGINES if _can_run(name, asked.device)]
    for shape in asked.shape:
        print(
            f"{shape}, {asked.rows} prompts of {asked.prompt} tokens, {asked.precision}, {asked.device}",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as folder:
            task = _task(asked, shape, Path(folder))
        seconds_of_loop = None
        for name in names:
            rate = measure(name, task)
            seconds_of_loop = rate if name == "loop" else seconds_of_loop
            if rate and seconds_of_loop and name != "loop":
                print(f"  {name}: {rate / seconds_of_loop:.2f} times the loop", flush=True)
        del task
        _free(torch.device(asked.device))


def measure(name: str, task: Task) -> float | None:
    """Print what an engine does; returns tokens per second, or None where it failed."""
    device, seconds, tokens = task.policy.device, 0.0, 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        with ENGINES[name](task) as draw:
            for seed in (1, 2):
                synchronize(device)
                begun = time.perf_counter()
                tokens = draw(seed)
                synchronize(device)
                seconds = time.perf_counter() - begun
    except Exception as error:  # an engine that cannot run here must not end the others' measurement
        print(f"  {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return None
    finally:
        _free(device)
    peak = f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if device.type == "cuda" else ""
    print(f"  {name}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s{peak}", flush=True)
    return tokens / seconds


def _task(asked: argparse.Namespace, shape: str, folder: Path) -> Task:
    size, device = SIZES[shape], torch.device(asked.device)
    torch.manual_seed(0)
    with device:  # random weights are drawn where they are used
        model = LlamaForCausalLM(config_of(size, asked.prompt + asked.tokens)).eval()
    write_tokenizer(folder)
    ends = 0 if asked.ragged is None else (size.vocab_size - FIRST) // asked.ragged
    generation = Generation(max_prompt_tokens=asked.prompt, max_response_tokens=asked.tokens)
    codec = Ending(load_tokenizer(folder), generation, None, ends=ends)
    prompts = torch.randint(FIRST, size.vocab_size, (asked.rows, asked.prompt), device="cpu").tolist()
    return Task(PolicyModel(model), codec, prompts, asked.precision, asked.at_once or asked.rows)


def _can_run(name: str, device: str) -> bool:
    on_gpu = device == "cuda"
    has = {
        "loop_without_graphs": on_gpu,
        "continuous_batching": on_gpu,
        "vllm": find_spec("vllm") is not None,
    }
    return has.get(name, True)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
