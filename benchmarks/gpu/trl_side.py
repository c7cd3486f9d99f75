"""TRL's side, in the peers' environment: ``PPOTrainer`` on random weights, timed from optimiser step to optimiser step.

    python -m benchmarks.gpu.trl_side SETTINGS

SETTINGS is the JSON that ``benchmarks.gpu.trl`` gives. The trainer is set up as a user would for such a GPU, in
bfloat16 without gradient checkpointing, and with our rollout, minibatches and epochs. The last line of stdout is its
answer in JSON.
"""

import json
import statistics
import sys
import time
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

PAD, END = "<pad>", "</s>"


class Done(Exception):
    """All iterations were measured."""


class Clock:
    """Times iterations of ``steps`` optimiser steps each."""

    def __init__(self, *, steps: int, warmup: int, measured: int, device: str) -> None:
        self._steps, self._warmup, self._measured, self._device = steps, warmup, measured, device
        self._count, self._marks = 0, [0.0]
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self._count += 1
        if self._count % self._steps:
            return
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._marks.append(time.perf_counter())
        if len(self._marks) > self._warmup + self._measured:
            raise Done

    @property
    def seconds(self) -> float:
        """The median duration of the iterations after those that warm up."""
        marks = self._marks[self._warmup :]
        return statistics.median(after - before for before, after in pairwise(marks))


def main(text: str) -> None:
    """Train until enough was measured."""
    settings = json.loads(text)
    size, rollout = settings["size"], settings["rollout"]
    steps = rollout["minibatches"]
    clock = Clock(
        steps=steps, warmup=settings["warmup"], measured=settings["measured"], device=settings["device"]
    )
    with TemporaryDirectory() as folder:
        try:
            trainer(settings, size, rollout, folder).train()
        except Done:
            print(json.dumps({"seconds": clock.seconds}), flush=True)
            return
    raise SystemExit("training ended before enough was measured")


def trainer(
    settings: dict[str, Any], size: dict[str, Any], rollout: dict[str, int], folder: str
) -> PPOTrainer:
    """Return a trainer of policy, critic, reference and reward model, whose prompts come ``samples`` times each."""
    responses, at_once = rollout["prompts"] * rollout["samples"], settings["at_once"]
    minibatch = responses // rollout["minibatches"]
    per_pass = min(at_once, minibatch)
    config = config_of(size, rollout["prompt_tokens"] + rollout["response_tokens"])
    on_gpu = settings["device"] == "cuda"
    arguments = PPOConfig(
        output_dir=folder,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=responses // per_pass,
        num_mini_batches=rollout["minibatches"],
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=min(at_once, responses),
        response_length=rollout["response_tokens"],
        stop_token=None,
        temperature=1.0,
        total_episodes=responses * (settings["warmup"] + settings["measured"] + 2),
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    draw = torch.Generator().manual_seed(2)
    shape = (rollout["prompts"], rollout["prompt_tokens"])
    prompts = torch.randint(2, size["vocab_size"], shape, generator=draw).tolist()
    return PPOTrainer(
        args=arguments,
        processing_class=tokenizer(size["vocab_size"]),
        model=LlamaForCausalLM(config),
        ref_model=LlamaForCausalLM(config),
        reward_model=LlamaForSequenceClassification(config),
        value_model=LlamaForSequenceClassification(config),
        train_dataset=Dataset.from_dict(
            {"input_ids": [prompt for prompt in prompts for _ in range(rollout["samples"])]}
        ),
    )


def config_of(size: dict[str, Any], positions: int) -> LlamaConfig:
    """Return the shape of our side."""
    config = LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=size["hidden_size"],
        intermediate_size=size["intermediate_size"],
        num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_heads"],
        num_key_value_heads=size["num_kv_heads"],
        head_dim=size["head_dim"],
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.num_labels = 1
    return config


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer of words that nobody reads: rows are ids. PPOTrainer asks which token ends a text, and lets none end one."""
    words = {PAD: 0, END: 1, **{f"w{number}": number for number in range(2, vocab_size)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token=END)),
        pad_token=PAD,
        unk_token=END,
        eos_token=END,
        padding_side="left",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
