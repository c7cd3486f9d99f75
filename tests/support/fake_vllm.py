"""Stand in for the module ``vllm`` in tests: the calls that Vantage makes, a model of transformers behind them, and faults on request."""

import copy
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.single_row import respond


@dataclass
class Faults:
    """Failures that the fake vLLM is asked for, and what it has seen."""

    raising_steps: set[int] = field(default_factory=set)
    """Numbers of steps, counted over all starts, that raise an error."""
    keeps_old_weights: bool = False
    """Whether updates after the first change nothing."""
    dropped: set[int] = field(default_factory=set)
    """Numbers of sampled requests, counted over all starts, whose output never comes."""
    loses_adapters: bool = False
    """Whether adapters are taken and applied to nothing."""
    keeps_old_adapter: bool = False
    """Whether adapters after the first change nothing."""
    scaling: float = 1.0
    """Factor by which the scaling of adapters is wrong."""
    failing_adapters: set[int] = field(default_factory=set)
    """Numbers of adapters, counted over all starts, that raise an error."""
    failing_starts: set[int] = field(default_factory=set)
    failing_updates: set[int] = field(default_factory=set)
    flipped: set[int] = field(default_factory=set)
    """Updates, from 1, after which the last bit of one number of the weights is another."""
    has_no_checksums: bool = False
    """Whether this is a vLLM that computes no checksums."""
    fails_to_sleep: bool = False
    starts: int = 0
    updates: int = 0
    sent: list[int] = field(default_factory=list)
    """Bytes of each update: of whole weights, or of an adapter's folder."""
    adapters: list[int] = field(default_factory=list)
    """Ids of the adapters, in order."""
    steps: int = 0
    asked: list[int] = field(default_factory=list)
    """The seed of each sampled request, in order."""
    engines: list["FakeLLM"] = field(default_factory=list)
    """All engines that were started."""


FAULTS = Faults()


@dataclass(frozen=True)
class LoRARequest:
    """vLLM's class of this name, which has an adapter's name, number and folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@torch.no_grad()
def adapted(model: Any, folder: Path, *, factor: float = 1.0) -> Any:
    """Return a copy of the model with an adapter of peft's files in its weights: W + (alpha / rank)·B·A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    matrices = load_file(folder / "adapter_model.safetensors")
    scaling = factor * config["lora_alpha"] / config["r"]
    found = copy.deepcopy(model)
    names = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in matrices}
    assert {name.rsplit(".", 1)[1] for name in names} <= {*config["target_modules"]}
    for name in names:
        a, b = (matrices[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        found.get_parameter(f"{name}.weight").add_(scaling * (b @ a))
    return found


def targets_of(folder: Path) -> set[str]:
    """Return the last parts of the names of the layers with an adapter."""
    names = load_file(folder / "adapter_model.safetensors")
    return {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[1] for name in names}


def checksums_of(model: Any) -> dict[str, str]:
    """Return the sha256 of each parameter as vLLM holds it."""
    return {
        f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(weight.tobytes()).hexdigest()
        for name, weight in held_of(model).items()
    }


def held_of(model: Any) -> dict[str, Any]:
    """Return the parameters as vLLM holds them: queries, keys and values in one matrix, gate and up projections in
    another, and embeddings padded with rows of zeros.
    """
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    for first in [name for name in weights if ".q_proj." in name]:
        parts = [weights.pop(first.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        weights[first.replace("q_proj", "qkv_proj")] = numpy.concatenate(parts)
    for first in [name for name in weights if ".gate_proj." in name]:
        parts = [weights.pop(first.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
        weights[first.replace("gate_proj", "gate_up_proj")] = numpy.concatenate(parts)
    embedding = weights["model.embed_tokens.weight"]
    rows = -len(embedding) % 64
    weights["model.embed_tokens.weight"] = numpy.pad(embedding, ((0, rows), (0, 0)))
    return weights


class Held:
    """A model with its parameters as vLLM holds them."""

    def __init__(self, model: Any) -> None:
        self.modules = model.modules
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in held_of(self._model).items():
            yield name, torch.from_numpy(weight)


def compute_tensor_digests(model: Any) -> dict[str, str]:
    """Return what vLLM's function of this name does."""
    return {
        name: hashlib.sha256(weight.numpy().tobytes()).hexdigest()
        for name, weight in model.named_parameters()
    }


def flip_last_bit(model: Any) -> None:
    """Change one number of the last value projection by its last bit: no log-probability shows it."""
    [*_, weight] = [each for name, each in model.named_parameters() if "v_proj.weight" in name]
    weight.data.view(torch.int32)[0, 0] ^= 1


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
    """A request that has not ended."""

    ids: list[int]
    logprobs: list[float]
    ended: bool
    prompt_logprobs: list[Any] | None
    is_dropped: bool = False
    shown: int = 0


def shut_down() -> None:
    """End the process group of torch, as vLLM does."""
    sys.modules["vllm.distributed.parallel_state"].destroy_distributed_environment()


def destroy_distributed_environment() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


class FakeEngine:
    """``llm.llm_engine``."""

    def __init__(self, model: Any, room: dict[str, Any] | None) -> None:
        self.base, self.room = model, room
        self.loaded: dict[int, Any] = {}
        """Adapter's number → the model with it."""
        self.last: Any = None
        """The model with the adapter that was taken last."""
        self.open: dict[str, Request] = {}
        self.is_asleep = False
        self.engine_core = SimpleNamespace(shutdown=shut_down)

    def add_lora(self, request: LoRARequest) -> bool:
        """Read the adapter; vLLM has room for one."""
        assert not self.is_asleep
        folder = Path(request.lora_path)
        FAULTS.sent.append((folder / "adapter_model.safetensors").stat().st_size)
        FAULTS.adapters.append(request.lora_int_id)
        if len(FAULTS.adapters) in FAULTS.failing_adapters:
            raise RuntimeError(f"adapter {len(FAULTS.adapters)} is broken")
        assert self.room is not None and not self.loaded
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] <= self.room["max_lora_rank"] in (1, 8, 16, 32, 64, 128, 256, 320, 512)
        assert targets_of(folder) <= {*self.room["lora_target_modules"]} and self.room["max_loras"] == 1
        if FAULTS.keeps_old_adapter and len(FAULTS.adapters) > 1:
            self.loaded[request.lora_int_id] = self.last
        elif FAULTS.loses_adapters:
            self.loaded[request.lora_int_id] = self.base
        else:
            self.loaded[request.lora_int_id] = adapted(self.base, folder, factor=FAULTS.scaling)
        self.last = self.loaded[request.lora_int_id]
        return True

    def remove_lora(self, number: int) -> bool:
        assert not self.is_asleep
        return self.loaded.pop(number, None) is not None

    def add_request(
        self,
        name: str,
        prompt: dict[str, list[int]],
        params: SamplingParams,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Compute the whole response; ``step`` shows it token by token."""
        assert name not in self.open
        model = self.base if lora_request is None else self.loaded[lora_request.lora_int_id]
        ids = prompt["prompt_token_ids"]
        if params.prompt_logprobs is not None:
            self.open[name] = Request([0], [0.0], False, self.read(model, ids))
            return
        assert params.seed is not None and params.ignore_eos and not params.detokenize
        FAULTS.asked.append(params.seed)
        found = respond(
            model,
            ids,
            max_new_tokens=params.max_tokens,
            temperature=params.temperature,
            eos_token_ids=params.stop_token_ids,
            seed=params.seed,
        )
        is_dropped = len(FAULTS.asked) - 1 in FAULTS.dropped
        self.open[name] = Request(found.ids, found.logprobs, found.ended, None, is_dropped=is_dropped)

    @staticmethod
    @torch.no_grad()
    def read(model: Any, ids: list[int]) -> list[Any]:
        """Return log-probabilities of the prompt's own ids, with None for the first, as vLLM does."""
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
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
        """Sample one more token of every open request."""
        assert not self.is_asleep
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
        assert settings["enable_chunked_prefill"] is False, "what vLLM needs on a CPU"
        FAULTS.starts += 1
        is_one_of_several = distributed.is_initialized() and distributed.get_world_size() > 1
        assert (settings.get("distributed_executor_backend") == "external_launcher") == is_one_of_several
        if is_one_of_several:  # all ranks agree on the free memory
            distributed.all_reduce(torch.tensor(1))
        if FAULTS.starts in FAULTS.failing_starts:
            raise RuntimeError(f"start {FAULTS.starts} is broken")
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):  # vLLM seeds all three
            seed(0)
        self.settings = settings
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        self.llm_engine = FakeEngine(self.model, settings if settings.get("enable_lora") else None)
        self.prefix_resets = 0
        self._was_loaded = False
        FAULTS.engines.append(self)

    @torch.no_grad()
    def collective_rpc(
        self, method: str, kwargs: dict[str, Any] | None = None
    ) -> list[dict[str, str] | None]:
        """Take weights, or return checksums."""
        assert not self.llm_engine.is_asleep
        if method == "compute_weight_checksums":
            if FAULTS.has_no_checksums:
                raise AttributeError(method)
            return [checksums_of(self.model)]
        assert method == "reload_weights" and kwargs is not None
        FAULTS.updates += 1
        if FAULTS.updates in FAULTS.failing_updates:
            raise RuntimeError(f"update {FAULTS.updates} is broken")
        own = dict(self.model.named_parameters())
        given = dict(kwargs["weights_iterator"])
        FAULTS.sent.append(sum(weight.nbytes for weight in given.values()))
        self.llm_engine.loaded.clear()  # as vLLM does
        if not (FAULTS.keeps_old_weights and self._was_loaded):
            for name, weight in given.items():
                own[name].copy_(weight)
        self._was_loaded = True
        if FAULTS.updates in FAULTS.flipped:
            flip_last_bit(self.model)
        return [None]

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(Held(self.model))]

    def sleep(self, level: int) -> None:
        assert level == 1 and not self.llm_engine.open, "weights are kept only at level 1"
        if FAULTS.fails_to_sleep:
            raise RuntimeError("no memory on the host")
        self.llm_engine.is_asleep = True

    def wake_up(self) -> None:
        self.llm_engine.is_asleep = False

    def reset_prefix_cache(self) -> bool:
        self.prefix_resets += 1
        return True


def modules() -> dict[str, ModuleType]:
    """Return the modules that Vantage imports, and forget earlier faults."""
    global FAULTS
    FAULTS = Faults()
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams = FakeLLM, SamplingParams  # type: ignore[attr-defined]
    requests = ModuleType("vllm.lora.request")
    requests.LoRARequest = LoRARequest  # type: ignore[attr-defined]
    of_groups, groups = ModuleType("vllm.distributed"), ModuleType("vllm.distributed.parallel_state")
    of_groups.parallel_state = groups  # type: ignore[attr-defined]
    groups.destroy_model_parallel = lambda: None  # type: ignore[attr-defined]
    groups.destroy_distributed_environment = destroy_distributed_environment  # type: ignore[attr-defined]
    checksums = ModuleType("vllm.model_executor.model_loader.weight_checksum")
    checksums.compute_tensor_digests = compute_tensor_digests  # type: ignore[attr-defined]
    loaders = map(ModuleType, ("vllm.model_executor", "vllm.model_executor.model_loader"))
    found = (module, ModuleType("vllm.lora"), requests, of_groups, groups, *loaders, checksums)
    return {each.__name__: each for each in found}


def install(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Have ``import vllm`` find this, without faults, until the test ends."""
    for name, each in modules().items():
        monkeypatch.setitem(sys.modules, name, each)
    return FAULTS
