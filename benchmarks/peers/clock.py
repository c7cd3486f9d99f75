"""Time and count one side. Both sides use this code, which knows torch's optimisers, transformers' Llama, and no
trainer.

Time is taken at optimiser steps: from the last one of the iterations that warm up to the last one of those that are
measured. So a whole number of iterations lies between, with all that a trainer does in them. Imports, loading and what
follows training are not timed.
"""

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any, TextIO

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from transformers.models.llama import modeling_llama

from benchmarks.peers.workloads import BOS, EOS, GO, PAD, READY, Work, Workload


class Clock:
    """Counts from the moment it is made. After the warm-up it waits for the other side."""

    def __init__(self, workload: Workload, *, optimizers: int = 1) -> None:
        """Begin to time. Each of the ``optimizers`` takes every step of the workload."""
        self._workload, self._optimizers = workload, optimizers
        self._said = _own_stdout()
        self._calls: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._iterations = 0
        self._started, self._cpu_started = 0.0, 0.0
        register_optimizer_step_post_hook(self._after_step)
        self._count_passes()

    def generated(self, tokens: int) -> None:
        """Count so many tokens that were sampled."""
        self._counts["generated_tokens"] += tokens

    def finish_iteration(self) -> None:
        """Count one more iteration as done."""
        self._iterations += 1
        if self._iterations == self._workload.warmup:
            print(READY, file=self._said, flush=True)
            if sys.stdin.readline().strip() != GO:
                raise SystemExit("the other side did not begin")
            self._counts.clear()
            self._calls.clear()
            self._cpu_started, self._started = _cpu_seconds(), time.perf_counter()
        elif self._iterations == self._workload.warmup + self._workload.measured:
            print(json.dumps(asdict(self._work())), file=self._said, flush=True)
            # do not stop here: this side stays busy until the other one is done and the runner ends both

    def _work(self) -> Work:
        seconds, cpu_seconds = time.perf_counter() - self._started, _cpu_seconds() - self._cpu_started
        if len(set(self._calls.values())) > 1:
            raise SystemExit(f"optimisers made different numbers of steps: {sorted(self._calls.values())}")
        counts = {name: self._counts[name] for name in Work.__annotations__ if not name.endswith("seconds")}
        counts["optimizer_steps"] = max(self._calls.values(), default=0)
        return Work(
            seconds=seconds / self._workload.measured,
            cpu_seconds=cpu_seconds / self._workload.measured,
            **counts,
        )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._calls[id(optimizer)] += 1
        if sum(self._calls.values()) % (self._workload.steps * self._optimizers) == 0:
            self.finish_iteration()

    def _count_passes(self) -> None:
        """Count the passes of every Llama's trunk, whoever calls it."""
        forward: Callable[..., Any] = modeling_llama.LlamaModel.forward
        counts = self._counts

        @wraps(forward)
        def counted(model: Any, input_ids: Any = None, *arguments: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                counts["trained_positions"] += input_ids.numel()
                counts["trained_rows"] += int((input_ids == EOS).sum())
                # count only responses: one side may read a prompt once for several rows
                prompts = int((input_ids == BOS).sum())
                counts["trained_tokens"] += (
                    int((input_ids != PAD).sum()) - prompts * self._workload.prompt_tokens
                )
            else:
                counts["read_positions"] += input_ids.numel()
            return forward(model, input_ids, *arguments, **options)

        modeling_llama.LlamaModel.forward = counted  # type: ignore[method-assign]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _own_stdout() -> TextIO:
    """Return what the runner reads; all that libraries print goes to stderr from here on."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return said
