"""A small module ``vllm`` for tests: the calls that Vantage makes, a model of transformers behind them, and faults on request."""

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vantage.models.sampling import sample


@dataclass
class Faults:
    """Failures that the fake vLLM is asked for, and what it has seen."""

    raising_steps: set[int] = field(default_factory=set)
    """Numbers of steps, counted over all starts, that raise an error."""
    keeps_old_weights: bool = False
    """Whether updates after the first change nothing."""
    dropped: set[int] = field(default_factory=set)
    """Numbers of sampled requests, counted over all starts, whose output never comes."""
    failing_starts: set[int] = field(default_factory=set)
    failing_updates: set[int] = field(default_factory=set)
    starts: int = 0
    updates: int = 0
    steps: int = 0
    asked: list[int] = field(default_factory=list)
    """The seed of each sampled request, in order."""
    engines: list["FakeLLM"] = field(default_factory=list)
    """All that were started."""


FAULTS = Faults()


@dataclass
class SamplingParams:
    """The part of vLLM's class that is used."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True


@dataclass
class Request:
    """One that has not ended."""

    ids: list[int]
    logprobs: list[float]
    ended: bool
    prompt_logprobs: list[Any] | None
    is_dropped: bool = False
    shown: int = 0


class FakeEngine:
    """``llm.llm_engine``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.open: dict[str, Request] = {}
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        """Compute the whole response; ``step`` shows it token by token."""
        assert name not in self.open
        ids = prompt["prompt_token_ids"]
        if params.prompt_logprobs is not None:
            self.open[name] = Request([0], [0.0], False, self.read(ids))
            return
        assert params.seed is not None and params.ignore_eos and not params.detokenize
        FAULTS.asked.append(params.seed)
        found = sample(
            self.model,
            [ids],
            max_new_tokens=params.max_tokens,
            temperature=params.temperature or 1.0,
            eos_token_ids=params.stop_token_ids,
            pad_token_id=0,
            seed=params.seed,
            greedy=params.temperature == 0,
        )
        is_dropped = len(FAULTS.asked) - 1 in FAULTS.dropped
        self.open[name] = Request(
            found.responses[0], found.logprobs[0], found.ended[0], None, is_dropped=is_dropped
        )

    @torch.no_grad()
    def read(self, ids: list[int]) -> list[Any]:
        """Log-probabilities of the prompt's own ids, as vLLM has them: none of the first."""
        logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        read = [
            {token: SimpleNamespace(logprob=logprobs[at, token].item())} for at, token in enumerate(ids[1:])
        ]
        return [None, *read]

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def abort_request(self, names: Iterable[str]) -> None:
        for name in names:
            self.open.pop(name, None)

    def step(self) -> list[Any]:
        """One more token of every open request."""
        FAULTS.steps += 1
        if FAULTS.steps in FAULTS.raising_steps:
            raise RuntimeError(f"step {FAULTS.steps} is broken")
        outputs = []
        for name, request in list(self.open.items()):
            request.shown += 1
            is_done = request.shown == len(request.ids)
            if is_done:
                del self.open[name]
            if request.is_dropped:
                continue
            shown = slice(request.shown)
            response = SimpleNamespace(
                token_ids=request.ids[shown],
                logprobs=[
                    {token: SimpleNamespace(logprob=logprob)}
                    for token, logprob in zip(request.ids[shown], request.logprobs[shown], strict=True)
                ],
                finish_reason=("stop" if request.ended else "length") if is_done else None,
            )
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    finished=is_done,
                    outputs=[response],
                    prompt_logprobs=request.prompt_logprobs,
                )
            )
        return outputs


class FakeLLM:
    """``vllm.LLM``."""

    def __init__(self, model: str, **settings: Any) -> None:
        assert settings["load_format"] == "dummy" and settings["skip_tokenizer_init"]
        assert settings["logprobs_mode"] == "processed_logprobs"
        FAULTS.starts += 1
        if FAULTS.starts in FAULTS.failing_starts:
            raise RuntimeError(f"start {FAULTS.starts} is broken")
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):  # vLLM seeds all three
            seed(0)
        self.settings = settings
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        self.llm_engine = FakeEngine(self.model)
        self.prefix_resets = 0
        self._was_loaded = False
        FAULTS.engines.append(self)

    @torch.no_grad()
    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        """Take weights; only ``reload_weights`` is known."""
        assert method == "reload_weights"
        FAULTS.updates += 1
        if FAULTS.updates in FAULTS.failing_updates:
            raise RuntimeError(f"update {FAULTS.updates} is broken")
        own = dict(self.model.named_parameters())
        if not (FAULTS.keeps_old_weights and self._was_loaded):
            for name, weight in kwargs["weights_iterator"]:
                own[name].copy_(weight)
        self._was_loaded = True

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self.model)]

    def reset_prefix_cache(self) -> bool:
        self.prefix_resets += 1
        return True


def install(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Have ``import vllm`` find this, without faults, until the test ends."""
    global FAULTS
    FAULTS = Faults()
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams = FakeLLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return FAULTS
