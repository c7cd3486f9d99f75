"""The other side: TRL's trainers, and transformers' ``generate``; runs in the peers' environment.

    python -m benchmarks.peers.trl_side MATERIAL CORE

They are called as a user would call them, in float32, without gradient checkpointing, logging, saving and evaluation.
Rows are given as ids where a trainer takes ids. TRL's defaults stay: it logs the metrics of PPO, GRPO and RLOO at each
step, and pads.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.generation.utils import GenerationMixin

from benchmarks.peers.clock import Clock
from benchmarks.peers.workloads import (
    EOS,
    LEARNING_RATE,
    PAD,
    Kind,
    Material,
    prompt_ids,
    read_material,
    response_ids,
)

FOREVER = 100_000
"""Iterations, epochs: the runner ends this process."""


def main(path: str, core: str) -> None:
    """Work until the runner ends this process."""
    os.sched_setaffinity(0, {int(core)})
    torch.set_num_threads(1)
    material = read_material(Path(path))
    clock = Clock(material.workload)
    count_generated(clock)
    if material.workload.kind == "sampling":
        generate_again(material, clock)
        return
    with TemporaryDirectory() as folder:
        TRAINERS[material.workload.kind](material, folder)


def count_generated(clock: Clock) -> None:
    """Tell the clock of all tokens that ``generate`` returns, up to each row's end of sequence."""
    generate = GenerationMixin.generate

    def generate_and_count(model: Any, *arguments: Any, **options: Any) -> Any:
        output = generate(model, *arguments, **options)
        ids = getattr(output, "sequences", output)
        clock.generated(int((ids[:, options["input_ids"].shape[1] :] != PAD).sum()))
        return output

    GenerationMixin.generate = generate_and_count  # type: ignore[method-assign, assignment]


def generate_again(material: Material, clock: Clock) -> None:
    """Generate from all prompts at once, again and again until the clock stops it."""
    model = policy(material)
    input_ids = torch.tensor([prompt_ids(prompt) for prompt in material.prompts])
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=material.workload.longest,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    for _ in range(FOREVER):
        if material.workload.continuous:
            found = model.generate_batch(input_ids.tolist(), generation_config=config)
            clock.generated(sum(len(each.generated_tokens) for each in found.values()))
        else:
            model.generate(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
            )
        clock.finish_iteration()


def policy(material: Material) -> Any:
    """Return a fresh copy of the policy's weights."""
    return AutoModelForCausalLM.from_pretrained(material.model, dtype=torch.float32)


def scalar_model(material: Material) -> Any:
    """Return a fresh copy of the reward model's weights."""
    return AutoModelForSequenceClassification.from_pretrained(
        material.reward, num_labels=1, dtype=torch.float32
    )


def common(material: Material, folder: str) -> dict[str, Any]:
    """Return the arguments of every trainer."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": material.workload.precision == "bfloat16",
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": material.workload.minibatch_rows,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def ppo(material: Material, folder: str) -> None:
    """Train policy and critic by PPO, beside a reference and a reward model."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    workload = material.workload
    arguments = common(material, folder) | {
        "num_ppo_epochs": workload.epochs,
        "num_mini_batches": workload.minibatches,
        "gradient_accumulation_steps": workload.minibatches,  # a rollout is this many batches of a device
        "local_rollout_forward_batch_size": workload.rows,
        "response_length": workload.longest,
        "stop_token": "eos",
        "temperature": 1.0,
        "total_episodes": FOREVER * workload.rows,
        "num_sample_generations": 0,
    }
    PPOTrainer(
        args=PPOConfig(**arguments),
        processing_class=AutoTokenizer.from_pretrained(material.model),
        model=policy(material),
        ref_model=policy(material),
        reward_model=scalar_model(material),
        value_model=scalar_model(material),
        train_dataset=Dataset.from_dict({"input_ids": [prompt_ids(each) for each in material.prompts]}),
    ).train()


def groups(material: Material) -> dict[str, Any]:
    """Return the arguments of the trainers that sample groups."""
    workload = material.workload
    return {
        "num_train_epochs": FOREVER,
        "num_generations": workload.group,
        "steps_per_generation": workload.minibatches,
        "num_iterations": workload.epochs,
        "max_completion_length": workload.longest,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
    }


def grpo(material: Material, folder: str) -> None:
    """Train as in arXiv 2402.03300; the reward model reads text, so that a response's end of sequence is not scored."""
    from trl import GRPOConfig, GRPOTrainer

    arguments = common(material, folder) | groups(material) | {"beta": 0.04, "loss_type": "grpo"}
    GRPOTrainer(
        model=policy(material),
        reward_funcs=scalar_model(material),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": material.prompts}),
        processing_class=AutoTokenizer.from_pretrained(material.model),
    ).train()


def rloo(material: Material, folder: str) -> None:
    """Train as in arXiv 2402.14740."""
    from trl import RLOOConfig, RLOOTrainer

    RLOOTrainer(
        model=policy(material),
        reward_funcs=scalar_model(material),
        args=RLOOConfig(**common(material, folder) | groups(material) | {"beta": 0.05}),
        train_dataset=Dataset.from_dict({"prompt": material.prompts}),
        processing_class=AutoTokenizer.from_pretrained(material.model),
    ).train()


def sft(material: Material, folder: str) -> None:
    """Train with padding; only responses count in the loss."""
    from trl import SFTConfig, SFTTrainer

    rows: dict[str, list[list[int]]] = {"input_ids": [], "completion_mask": []}
    for prompt, [response] in zip(map(prompt_ids, material.prompts), material.responses, strict=True):
        learnt = response_ids(response)
        rows["input_ids"].append(prompt + learnt)
        rows["completion_mask"].append([0] * len(prompt) + [1] * len(learnt))
    SFTTrainer(
        model=policy(material),
        args=SFTConfig(**common(material, folder), num_train_epochs=FOREVER, completion_only_loss=True),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(material.model),
    ).train()


def reward(material: Material, folder: str) -> None:
    """Train a Bradley-Terry model on pairs."""
    from trl import RewardConfig, RewardTrainer

    rows = {
        name: [
            prompt_ids(prompt) + response_ids(pair[side])
            for prompt, pair in zip(material.prompts, material.responses, strict=True)
        ]
        for side, name in enumerate(("chosen_ids", "rejected_ids"))
    }
    RewardTrainer(
        model=scalar_model(material),
        args=RewardConfig(**common(material, folder), num_train_epochs=FOREVER),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(material.model),
    ).train()


TRAINERS: dict[Kind, Callable[[Material, str], None]] = {
    "ppo": ppo,
    "grpo": grpo,
    "rloo": rloo,
    "sft": sft,
    "reward": reward,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
