"""One vLLM in this process: start it, give it weights, ask it for log-probabilities and responses, and close it.

The package vllm is imported when the first vLLM starts. All calls of ``vllm.LLM``, its ``llm_engine`` and
``SamplingParams`` were tried with vllm 0.32.
"""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from vantage.models.policy import PolicyModel
from vantage.models.sharding import whole
from vantage.tasks.rollout import checksums
from vantage.tasks.rollout.checksums import GivenWeights
from vantage.tasks.rollout.sent_adapters import AdapterRoom
from vantage.tasks.rollout.vllm_worker import digests_of, pack_again
from vantage.tasks.training import ranks
from vantage.tasks.training.optimization import Precision

GPU_MEMORY_SHARE = 0.3
"""Most of a GPU's memory that vLLM takes for its weights and its cache, beside the networks that train."""
FREE_SHARE = 0.95
"""Largest share of the free memory that vLLM takes."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, and takes tensors directly
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRITON_F32_DEFAULT": "ieee",  # otherwise attention in float32 uses TF32, which the proof of an update refuses
}
"""Settings of vLLM; a variable that is set already stays as it is."""


ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False}
"""Settings of vLLM on CPUs. For a prompt that is read in two parts, vLLM would reset the random state of the response,
which vLLM 0.32 cannot do on a CPU: "CPU Generator does not use offset"."""

_one_has_slept = False
"""Whether a vLLM that can sleep was started in this process: its allocator serves only one per process, even after its
end."""


class VllmFailed(RuntimeError):
    """vLLM raised an error, or returned other results than requested."""


class VllmCannotStart(VllmFailed):
    """vLLM has not run in this process yet, and would fail again."""


@dataclass(frozen=True)
class Asked:
    """One response to be sampled."""

    name: str
    """Name that no other request to this vLLM has."""
    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Limits:
    """Sizes that vLLM is started with."""

    tokens: int
    """Most tokens of a prompt and its response."""
    rows: int | None
    """Most responses at once; None: vLLM's own bound."""
    adapters: AdapterRoom | None = None
    """Room for adapters; None: the policy has none."""


class RunningVllm:
    """The engine, from its start to ``close``."""

    def __init__(self, policy: PolicyModel, folder: Path, *, precision: Precision, limits: Limits) -> None:
        """Start vLLM for a model of the policy's shape, with random weights.

        Args:
            folder: folder for the model's configuration, which vLLM reads.

        Raises:
            VllmFailed: vllm cannot start with this model.
        """
        self.is_closed = False
        self.holds_base = False
        """Whether the weights beneath the adapters (all weights if there are none) are those of the last ``push``."""
        self._adapter: Any = None
        """vLLM's ``LoRARequest`` for all requests; None: there is no adapter."""
        self._num_adapters = 0
        self._device_type = policy.device.type
        self._dtype: torch.dtype = getattr(torch, precision)
        write_config(policy, folder)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        is_on_cpu = self._device_type == "cpu"
        placed: dict[str, Any] = dict(ON_CPU) if is_on_cpu else _on_gpu()
        self._can_sleep, self._is_asleep = "enable_sleep_mode" in placed, False
        if ranks.world_size() > 1:  # each rank's vLLM samples for itself, in the ranks' own process group
            placed["distributed_executor_backend"] = "external_launcher"
        if limits.rows is not None:
            placed["max_num_seqs"] = limits.rows
        if limits.adapters is not None:
            placed |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": limits.adapters.max_rank}
            placed["lora_target_modules"] = list(limits.adapters.targets)
        with self._calling("could not start"), _random_state_kept(policy.device):
            import vllm

            self._vllm = vllm
            self._llm = vllm.LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                load_format="dummy",  # the weights come from the policy
                dtype=precision,
                logprobs_mode="processed_logprobs",
                max_logprobs=1,
                max_model_len=limits.tokens,
                generation_config="vllm",
                disable_log_stats=True,
                **placed,
            )

    def sleep(self) -> None:
        """Free the GPU's memory for training: the weights move to the host, and the cache is dropped.

        The next call of another method wakes the vLLM, which takes the memory back. Does nothing on a CPU, and for a
        vLLM that is not the first of its process.
        """
        if not self._can_sleep or self._is_asleep:
            return
        with self._calling("could not go to sleep"):
            self._llm.sleep(level=1)
            self._is_asleep = True

    def _wake(self) -> None:
        if not self._is_asleep:
            return
        gc.collect()
        if self._device_type == "cuda":
            torch.cuda.empty_cache()  # blocks of torch's allocator that no tensor uses any more
        self._llm.wake_up()
        self._is_asleep = False

    def push(self, weights: Mapping[str, Tensor], *, hashed: GivenWeights | None = None) -> None:
        """Replace all weights but adapters by these, drop adapters, and clear caches of the old weights.

        Sharded weights are gathered one by one, for which all ranks must call this.

        Args:
            hashed: gets each weight; None: none is hashed.
        """
        self.holds_base, self._adapter = False, None
        with self._calling("could not take the weights"):
            self._wake()
            pairs = self._pairs(weights, hashed)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
            self._llm.apply_model(pack_again)
            self._forget()
        self.holds_base = True

    def _pairs(
        self, weights: Mapping[str, Tensor], hashed: GivenWeights | None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            gathered = self._gathered(weight.detach())
            if hashed is not None:
                hashed.add(name, gathered)
            yield name, gathered

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, str] | None:
        """Return the sha256 of the parameters with these names, or of all; None: this version computes none."""
        with self._calling("could not compute checksums of its weights"):
            self._wake()
            if names is not None:
                return checksums.by_parameter(self._llm.apply_model(partial(digests_of, names=names)))
            try:
                return checksums.by_parameter(self._llm.collective_rpc(checksums.METHOD))
            except (AttributeError, NotImplementedError):
                return None

    def _gathered(self, weight: Tensor) -> Tensor:
        """Return the whole weight, gathered if it is sharded, in vLLM's type."""
        return whole(weight.to(self._dtype)) if ranks.are_sharded() else weight

    def push_adapter(self, folder: Path) -> None:
        """Replace the adapter by the one in a folder of peft's format, which is read now, under a new id; clear caches
        of the old one."""
        with self._calling("could not take the adapter"):
            self._wake()
            from vllm.lora.request import LoRARequest

            if self._adapter is not None:
                self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
            self._num_adapters += 1
            number = self._num_adapters
            self._adapter = LoRARequest(f"adapter-{number}", number, str(folder))
            if not self._llm.llm_engine.add_lora(self._adapter):
                raise RuntimeError(f"it did not load adapter {number}")
            self._forget()

    def _forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("its cache still holds prefixes that the old weights computed")

    def logprobs(self, rows: Sequence[list[int]]) -> Tensor:
        """Return the log-probability of each id but the first of rows of one length, at temperature 1, float64."""
        sampling = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        found: dict[str, Any] = {}
        with self._calling("could not read the fixed rows"):
            self._wake()
            for number, row in enumerate(rows):
                prompt = {"prompt_token_ids": row}
                self._llm.llm_engine.add_request(
                    f"row-{number}", prompt, sampling, lora_request=self._adapter
                )
            while self._llm.llm_engine.has_unfinished_requests():
                found |= {each.request_id: each for each in self._llm.llm_engine.step() if each.finished}
            read = [found[f"row-{number}"].prompt_logprobs for number in range(len(rows))]
            return torch.tensor(
                [
                    [at[token].logprob for at, token in zip(steps[1:], row[1:], strict=True)]
                    for steps, row in zip(read, rows, strict=True)
                ],
                dtype=torch.float64,
            )

    def sample(
        self,
        asked: Sequence[Asked],
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        is_complete: Callable[[Sequence[int]], bool] | None,
    ) -> Iterator[dict[str, tuple[list[int], list[float]]]]:
        """Yield after each step the responses that ended in it: name → ids and log-probabilities. Some may never come.

        Args:
            temperature: 0 takes the likeliest ids.
            is_complete: returns whether these ids of a response end it; called after each id; None: token ids alone end
                it.

        Raises:
            VllmFailed: vLLM raised an error.
        """
        open_names = {each.name for each in asked}
        try:
            self._add(asked, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids)
            yield from self._steps(open_names, is_complete)
        finally:
            with contextlib.suppress(Exception):  # the engine may be broken
                self._llm.llm_engine.abort_request(sorted(open_names))

    def _add(
        self, asked: Sequence[Asked], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> None:
        with self._calling("could not begin with the responses"):
            self._wake()
            for each in asked:
                sampling = self._vllm.SamplingParams(
                    temperature=temperature,
                    top_p=1.0,
                    top_k=-1,
                    seed=each.seed,
                    max_tokens=max_tokens,
                    stop_token_ids=list(stop_token_ids),
                    ignore_eos=True,  # only the recipe's tokens end a response
                    logprobs=0,
                    detokenize=False,
                )
                prompt = {"prompt_token_ids": each.prompt}
                self._llm.llm_engine.add_request(each.name, prompt, sampling, lora_request=self._adapter)

    def _steps(
        self, open_names: set[str], is_complete: Callable[[Sequence[int]], bool] | None
    ) -> Iterator[dict[str, tuple[list[int], list[float]]]]:
        """Yield what ``sample`` does; ended responses are removed from ``open_names``."""
        engine = self._llm.llm_engine
        seen: dict[str, int] = {}
        while engine.has_unfinished_requests():
            with self._calling("raised an error while it sampled"):
                outputs = [each for each in engine.step() if each.request_id in open_names]
                ended: dict[str, tuple[list[int], list[float]]] = {}
                for output in outputs:
                    name, response = output.request_id, output.outputs[0]
                    ids = list(response.token_ids)
                    length = _complete_length(ids, seen.get(name, 0), is_complete)
                    seen[name] = len(ids)
                    if length is not None and not output.finished:
                        engine.abort_request([name])
                    if length is not None or output.finished:
                        open_names.discard(name)
                    if length is not None or response.finish_reason in ("stop", "length"):
                        ids = ids[:length]
                        steps = response.logprobs[: len(ids)]
                        ended[name] = ids, [at[token].logprob for at, token in zip(steps, ids, strict=True)]
            yield ended

    @contextlib.contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Hold this context around calls of vLLM: the stage's autocast is off, and any error becomes
        ``VllmFailed``.
        """
        try:
            with torch.autocast(self._device_type, enabled=False):
                yield
        except Exception as error:
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            raise VllmFailed(f"vLLM {what}: {reason}") from error

    def close(self) -> None:
        """Stop the engine and free its memory; a second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        with contextlib.suppress(Exception), _process_group_kept():  # the engine may be broken
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _process_group_kept() -> Iterator[None]:
    """Keep a vLLM that ends from ending the process group of torch: the ranks and the next vLLM need it."""
    if ranks.world_size() == 1:
        yield
        return
    from vllm.distributed import parallel_state

    ends = {
        name: getattr(parallel_state, name)
        for name in ("destroy_model_parallel", "destroy_distributed_environment")
    }
    for name in ends:
        setattr(parallel_state, name, lambda: None)
    try:
        yield
    finally:
        for name, end in ends.items():
            setattr(parallel_state, name, end)


def _on_gpu() -> dict[str, Any]:
    """Return the settings for a GPU that others use too; the first vLLM of a process can sleep."""
    global _one_has_slept
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = min(GPU_MEMORY_SHARE, FREE_SHARE * free / total)
    can_sleep, _one_has_slept = not _one_has_slept, True
    return {"gpu_memory_utilization": share} | ({"enable_sleep_mode": True} if can_sleep else {})


def _complete_length(
    ids: list[int], seen: int, is_complete: Callable[[Sequence[int]], bool] | None
) -> int | None:
    """Return the number of ids up to the one that completes a stop string; None: none does."""
    if is_complete is None:
        return None
    return next((end for end in range(seen + 1, len(ids) + 1) if is_complete(ids[:end])), None)


def write_config(policy: PolicyModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = policy.causal_lm.config
    if not config.architectures:
        config.architectures = [type(policy.causal_lm).__name__]
    config.save_pretrained(folder)


@contextlib.contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the global random states that vLLM seeds when it starts."""
    state, of_numpy = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(state)
            numpy.random.set_state(of_numpy)
