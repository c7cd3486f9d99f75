"""One vLLM in this process: started, given weights, asked for log-probabilities and responses, and closed.

vllm is imported when the first one starts. Everything here uses calls of ``vllm.LLM``, its ``llm_engine`` and ``SamplingParams``
that were tried with vllm 0.32.
"""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from vantage.models.policy import PolicyModel
from vantage.tasks.rollout.vllm_worker import pack_again
from vantage.tasks.training.optimization import Precision

GPU_MEMORY_SHARE = 0.3
"""Share of a GPU's memory that vLLM takes for its weights and its cache, beside the networks that train."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, and takes tensors as they are
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Settings of vLLM; a variable that is set already stays as it is."""


class VllmFailed(RuntimeError):
    """vLLM raised an error, or returned something other than what it was asked for."""


@dataclass(frozen=True)
class Asked:
    """One response to be sampled."""

    name: str
    """Unlike that of all others that this vLLM was asked for."""
    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Limits:
    """Sizes that vLLM is started with."""

    tokens: int
    """Most tokens of a prompt and its response."""
    rows: int | None
    """Most responses side by side; None: vLLM's own bound."""


class RunningVllm:
    """The engine, from its start to ``close``."""

    def __init__(self, policy: PolicyModel, folder: Path, *, precision: Precision, limits: Limits) -> None:
        """Start vLLM for a model of the policy's shape, with random weights.

        Args:
            folder: where the model's configuration is written for vLLM to read.

        Raises:
            VllmFailed: vllm cannot start with this model.
        """
        self.is_closed = False
        self._device_type = policy.device.type
        write_config(policy, folder)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        is_on_cpu = self._device_type == "cpu"
        placed: dict[str, Any] = {} if is_on_cpu else {"gpu_memory_utilization": GPU_MEMORY_SHARE}
        if limits.rows is not None:
            placed["max_num_seqs"] = limits.rows
        with self._calling("could not start"), _random_state_kept(policy.device):
            import vllm

            self._vllm = vllm
            self._llm = vllm.LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                load_format="dummy",  # the weights come from the policy
                dtype=precision,
                enforce_eager=is_on_cpu,
                logprobs_mode="processed_logprobs",
                max_logprobs=1,
                max_model_len=limits.tokens,
                generation_config="vllm",
                disable_log_stats=True,
                **placed,
            )

    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights by these, and forget what was computed with the old ones."""
        with self._calling("could not take the weights"):
            pairs = iter([(name, weight.detach()) for name, weight in weights.items()])
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
            self._llm.apply_model(pack_again)
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("its cache still holds prefixes that the old weights computed")

    def logprobs(self, rows: Sequence[list[int]]) -> Tensor:
        """Return the log-probability of each id but the first of rows of one length, at temperature 1, float64."""
        sampling = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        found: dict[str, Any] = {}
        with self._calling("could not read the fixed rows"):
            for number, row in enumerate(rows):
                self._llm.llm_engine.add_request(f"row-{number}", {"prompt_token_ids": row}, sampling)
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
            is_complete: whether these ids of a response end it; asked for after each id; None: token ids alone end it.

        Raises:
            VllmFailed: vLLM raised an error.
        """
        open_names = {each.name for each in asked}
        try:
            self._add(asked, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids)
            yield from self._steps(open_names, is_complete)
        finally:
            with contextlib.suppress(Exception):  # it may be broken
                self._llm.llm_engine.abort_request(sorted(open_names))

    def _add(
        self, asked: Sequence[Asked], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> None:
        with self._calling("could not begin with the responses"):
            for each in asked:
                sampling = self._vllm.SamplingParams(
                    temperature=temperature,
                    top_p=1.0,
                    top_k=-1,
                    seed=each.seed,
                    max_tokens=max_tokens,
                    stop_token_ids=list(stop_token_ids),
                    ignore_eos=True,  # the end tokens are those of the recipe alone
                    logprobs=0,
                    detokenize=False,
                )
                self._llm.llm_engine.add_request(each.name, {"prompt_token_ids": each.prompt}, sampling)

    def _steps(
        self, open_names: set[str], is_complete: Callable[[Sequence[int]], bool] | None
    ) -> Iterator[dict[str, tuple[list[int], list[float]]]]:
        """Yield what ``sample`` does; what has ended is removed from ``open_names``."""
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
        """Hold this around calls of vLLM: the stage's autocast is off, and whatever is raised becomes ``VllmFailed``."""
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
        with contextlib.suppress(Exception):  # it may be broken
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _complete_length(
    ids: list[int], seen: int, is_complete: Callable[[Sequence[int]], bool] | None
) -> int | None:
    """Return how many ids there are up to the one that completes a stop string; None: none does."""
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
