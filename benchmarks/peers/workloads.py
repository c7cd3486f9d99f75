"""The workloads of the table, and the lengths of their responses.

One iteration is what is timed: of PPO, GRPO and RLOO one rollout with all of its optimiser steps; of fine-tuning and reward
modelling one pass over the rows; of sampling one response to each prompt. Nothing here imports more than the standard library, since
both sides read it.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["ppo", "grpo", "rloo", "sft", "reward", "sampling"]
Shape = Literal["tiny", "smollm2"]
"""Shape of the model: the built-in one's, or that of SmolLM2-135M; its weights are random in both."""

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS = 0, 1, 2
STATES, VARIANTS = 128, 2
"""Tokens of the counting model: state s in two variants, s from 0 to 127 (see ``counting_model``)."""
READY, GO = "ready", "go"
"""The line that a side prints after its warm-up, and the line that it then gets."""
LEARNING_RATE = 1e-6
"""So small that the model goes on counting; AdamW's work does not depend on it."""


@dataclass(frozen=True)
class Workload:
    """Rows of work, as both sides do it."""

    name: str
    kind: Kind
    rows: int
    """Rows of one iteration: responses of a rollout, demonstrations, or pairs."""
    shortest: int
    longest: int
    """Tokens of a response, its end-of-sequence token included."""
    prompt_tokens: int = 32
    """Tokens of a prompt, its beginning-of-sequence token included."""
    group: int = 1
    """Responses to each prompt."""
    epochs: int = 1
    minibatches: int = 1
    """Optimiser steps in an epoch of an iteration."""
    warmup: int = 1
    measured: int = 3
    """Iterations that are timed, after those that warm up."""
    shape: Shape = "tiny"
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products; weights are float32 on both sides."""
    packed: bool = False
    """Our side packs its rows; TRL packs only where there is FlashAttention, so it pads."""
    compiled: bool = False
    """Our side compiles the layers of its networks (``compile: true``), before what is timed."""
    continuous: bool = False
    """The peer is transformers' continuous batching."""

    @property
    def steps(self) -> int:
        """Optimiser steps of one iteration."""
        return 0 if self.kind == "sampling" else self.epochs * self.minibatches

    @property
    def minibatch_rows(self) -> int:
        """Rows in one optimiser step."""
        return self.rows // self.minibatches

    @property
    def sides(self) -> int:
        """Responses in one row of data."""
        return 2 if self.kind == "reward" else 1


FIXED, RAGGED = (32, 32), (8, 128)
WORKLOADS = {
    each.name: each
    for each in (
        Workload("ppo", "ppo", 64, *FIXED, epochs=4, minibatches=4),
        Workload("ppo-ragged", "ppo", 64, *RAGGED, epochs=4, minibatches=4),
        Workload("sft", "sft", 512, *FIXED, minibatches=16),
        Workload("sft-ragged", "sft", 512, *RAGGED, minibatches=16, measured=2),
        Workload("sft-packed", "sft", 512, *RAGGED, minibatches=16, measured=2, packed=True),
        Workload("reward", "reward", 256, *FIXED, minibatches=16),
        Workload("reward-ragged", "reward", 256, *RAGGED, minibatches=16, measured=2),
        Workload("grpo", "grpo", 64, *FIXED, group=8, minibatches=4, warmup=2, measured=8),
        Workload("rloo", "rloo", 64, *FIXED, group=4, warmup=2, measured=8),
        Workload("sampling", "sampling", 64, *FIXED, measured=8),
        Workload("sampling-ragged", "sampling", 64, *RAGGED, measured=4),
        Workload("sampling-continuous", "sampling", 64, *RAGGED, measured=2, continuous=True),
        Workload(
            "ppo-smollm2",
            "ppo",
            16,
            *FIXED,
            epochs=4,
            minibatches=4,
            measured=1,
            shape="smollm2",
            precision="bfloat16",
        ),
    )
}


def draw_lengths(workload: Workload, count: int) -> list[int]:
    """Return tokens of ``count`` responses: uniform from ``shortest`` to ``longest``, the same at every call."""
    drawn = random.Random(f"{workload.kind} {workload.shortest} {workload.longest}")
    return [drawn.randint(workload.shortest, workload.longest) for _ in range(count)]


def character(state: int, variant: int) -> str:
    """Return the one character of a token: neither case nor white space, so that preparing data keeps it."""
    return chr(0x4E00 + VARIANTS * state + variant)


def token(text: str) -> int:
    """Return the id of a token's character."""
    return len(SPECIAL_TOKENS) + ord(text) - 0x4E00


def prompt_ids(prompt: str) -> list[int]:
    """Encode a prompt as the tokenizer does."""
    return [BOS, *map(token, prompt)]


def response_ids(response: str) -> list[int]:
    """Encode a response as a whole response is learnt."""
    return [*map(token, response), EOS]


@dataclass(frozen=True)
class Work:
    """What a side did while it was timed."""

    seconds: float
    """Wall time of one iteration."""
    cpu_seconds: float
    """CPU seconds of this process in one iteration."""
    optimizer_steps: int
    trained_rows: int
    """Responses that went through a network for a gradient."""
    trained_tokens: int
    """Tokens of these, ends of sequence included."""
    generated_tokens: int
    """Tokens of sampled responses, ends of sequence included."""
    trained_positions: int
    """``trained_tokens``, prompts as often as they were read, and padding: what was computed for a gradient."""
    read_positions: int
    """Positions of all passes without a gradient, sampling included."""


@dataclass(frozen=True)
class Material:
    """What both sides read: the workload, its models and its rows."""

    workload: Workload
    model: str
    """Folder of the policy, which is also the reference and what fine-tuning and reward modelling start from."""
    reward: str
    """Folder of the reward model, which is also what the critic starts from."""
    data: str
    """Folder of the rows as Vantage prepared them; ``prompts`` and ``responses`` are those of its training split."""
    prompts: list[str]
    responses: list[list[str]]
    """The responses to each prompt, one or (``reward``: chosen, rejected) two; without the end-of-sequence token. Empty where responses are sampled."""

    def write(self, path: Path) -> None:
        """Write the workload as JSON."""
        path.write_text(json.dumps(asdict(self)))


def read_material(path: Path) -> Material:
    """Return what ``Material.write`` wrote."""
    found = json.loads(path.read_text())
    return Material(**{**found, "workload": Workload(**found["workload"])})
