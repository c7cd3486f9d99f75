"""Compute the outputs of networks in float64 without any code of ours, for the oracles of whole stages.

A response is a plain list of ids, and its numbers are a tensor of the same length. There is no padding and no mask.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

from tests.tasks.unequal_inputs import EOS, PAD
from vantage.schemas.recipe.resolved import ResolvedTraining
from vantage.schemas.records.job import StageJob
from vantage.tasks.training.seeds import derive_seed, generator

FRESH_HEAD_STD = 0.1
"""Standard deviation of a fresh head's weights, times √H."""
BETAS, EPSILON = (0.9, 0.95), 1e-8


def language_model(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    return model


class Scalar(nn.Module):
    """A scalar model: head(backbone) − shift."""

    def __init__(self, backbone: LlamaModel, weight: Tensor, bias: Tensor | None, shift: float = 0.0) -> None:
        super().__init__()
        self.backbone, self.shift = backbone, shift
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=torch.float64)
        self.head.weight.data.copy_(weight)
        if bias is not None:
            self.head.bias.data.copy_(bias)

    def read(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.head(hidden).mean(-1)
        return scores - self.shift


def reward_model(folder: Path) -> Scalar:
    classifier: LlamaForSequenceClassification = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    shift = json.loads((folder / "scalar.json").read_text())["score_shift"]
    return Scalar(classifier.model, classifier.score.weight.detach(), None, shift)


def critic_model(folder: Path, *, head_seed: int) -> Scalar:
    """Return a value model as it is, a reward model with its shift as bias, or a policy's trunk with a fresh head."""
    if (folder / "head.safetensors").is_file():
        trunk = LlamaModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        head = load_file(folder / "head.safetensors")
        return Scalar(trunk, head["weight"], head["bias"])
    if (folder / "scalar.json").is_file():
        reward = reward_model(folder)
        return Scalar(reward.backbone, reward.head.weight.detach(), torch.tensor([-reward.shift]))
    trunk = language_model(folder).model
    return Scalar(trunk, *fresh_head(trunk.config.hidden_size, head_seed))


def fresh_head(hidden_size: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.empty(1, hidden_size).normal_(0.0, FRESH_HEAD_STD / hidden_size**0.5, generator=draw)
    return weight, torch.zeros(1)


def hidden_states(trunk: LlamaModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, L, H) of whole rows; attention looks back only, so what fills the ends up has no influence."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
    hidden: Tensor = trunk(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def distributions(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
) -> list[Tensor]:
    """Return log softmax(logits / T) at each response token, (length, V) for each response."""
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    hidden = hidden_states(model.model, rows)
    return [
        (model.lm_head(row[len(prompt) - 1 : len(prompt) - 1 + len(response)]) / temperature).log_softmax(-1)
        for row, prompt, response in zip(hidden, prompts, responses, strict=True)
    ]


def of_tokens(log_distributions: Sequence[Tensor], responses: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return log π of the tokens themselves."""
    return [
        said[torch.arange(len(ids)), torch.tensor(ids)]
        for said, ids in zip(log_distributions, responses, strict=True)
    ]


def values(
    critic: Scalar, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return values: V_t has seen the prompt and the response tokens before t."""
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    read = critic.read(hidden_states(critic.backbone, rows))
    return [
        row[len(prompt) - 1 : len(prompt) - 1 + len(response)]
        for row, prompt, response in zip(read, prompts, responses, strict=True)
    ]


def scores(
    reward: Scalar, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return the score of each response, read at its last token."""
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    read = reward.read(hidden_states(reward.backbone, rows))
    return [row[len(ids) - 1] for row, ids in zip(read, rows, strict=True)]


@torch.no_grad()
def sample(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
    greedy: bool = False,
) -> list[list[int]]:
    """Sample by inversion: token t of row i is the first whose cumulative probability exceeds uniform[i, t]."""
    draw = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(prompts), max_tokens, generator=draw, dtype=torch.float64)
    responses: list[list[int]] = [[] for _ in prompts]
    for step in range(max_tokens):
        rows = [[*prompt, *ids] for prompt, ids in zip(prompts, responses, strict=True)]
        hidden = hidden_states(model.model, rows)
        for i, row in enumerate(rows):
            if responses[i][-1:] == [EOS]:
                continue
            logits = model.lm_head(hidden[i, len(row) - 1]) / temperature
            cumulative = logits.softmax(-1).cumsum(-1)
            drawn = int((cumulative <= uniform[i, step] * cumulative[-1]).sum())
            responses[i].append(int(logits.argmax()) if greedy else drawn)
    return responses


@dataclass(frozen=True)
class Snapshot:
    """A network and its optimiser as they were before a step."""

    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: int


@dataclass
class Optimizer:
    """AdamW (arXiv 1711.05101) of one network, whose gradient is clipped to a norm. Only matrices have weight decay."""

    module: nn.Module
    weight_decay: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0

    def gradients(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learning_rate: float) -> float:
        """Take a step, and return the norm before clipping."""
        norm = math.sqrt(sum((gradient**2).sum().item() for gradient in gradients))
        share = self.max_grad_norm / max(norm, self.max_grad_norm)
        self.steps += 1
        for i, parameter in enumerate(self.parameters):
            gradient = share * gradients[i]
            self.first[i] = BETAS[0] * self.first[i] + (1 - BETAS[0]) * gradient
            self.second[i] = BETAS[1] * self.second[i] + (1 - BETAS[1]) * gradient**2
            mean = self.first[i] / (1 - BETAS[0] ** self.steps)
            square = self.second[i] / (1 - BETAS[1] ** self.steps)
            if parameter.dim() >= 2:
                parameter.mul_(1 - learning_rate * self.weight_decay)
            parameter.sub_(learning_rate * mean / (square.sqrt() + EPSILON))
        self.module.zero_grad()
        return norm

    def snapshot(self) -> "Snapshot":
        return Snapshot(
            parameters=[tensor.detach().clone() for tensor in self.parameters],
            first=[tensor.clone() for tensor in self.first],
            second=[tensor.clone() for tensor in self.second],
            steps=self.steps,
        )

    @torch.no_grad()
    def go_back(self, snapshot: "Snapshot") -> None:
        self.steps = snapshot.steps
        self.first, self.second = ([t.clone() for t in old] for old in (snapshot.first, snapshot.second))
        for parameter, before in zip(self.parameters, snapshot.parameters, strict=True):
            parameter.copy_(before)


def learning_rate(work: ResolvedTraining, step: int, total_steps: int, *, peak: float | None = None) -> float:
    """Return the rate of a linear warm-up, then constant, or down to 0 in a line or half a cosine."""
    peak = work.learning_rate if peak is None else peak
    if step < work.warmup_steps:
        return peak * (step + 1) / work.warmup_steps
    left = 1 - (step - work.warmup_steps) / (total_steps - work.warmup_steps)
    if work.schedule == "linear":
        return peak * left
    if work.schedule == "cosine":
        return peak * (1 - torch.cos(torch.tensor(torch.pi * left, dtype=torch.float64)).item()) / 2
    return peak


# -- the documented streams of random numbers


def own_seed(job: StageJob) -> int:
    """Return the seed from which all random streams of a stage derive, made of its seed and its kind."""
    return derive_seed(job.seed, job.work.kind)


def stream(job: StageJob, name: str, *indices: int) -> int:
    """Return the seed of one stream of a stage."""
    return derive_seed(own_seed(job), name, *indices)


def shuffled(seed: int, count: int, name: str, *indices: int) -> list[int]:
    """Return a permutation drawn from one named stream of a seed."""
    order: list[int] = torch.randperm(count, generator=generator(seed, name, *indices)).tolist()
    return order


def batch_of(seed: int, number: int, *, size: int, count: int) -> list[int]:
    """Return batch ``number`` of the endless stream of examples, each epoch in an order of its own."""
    places = range(number * size, (number + 1) * size)
    return [shuffled(seed, count, "order", place // count)[place % count] for place in places]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_moved_alike(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> None:
    """Assert that training did to the weights what it should have done, but for rounding."""
    assert found.keys() == expected.keys()

    def change(after: Mapping[str, Tensor]) -> Tensor:
        return torch.cat(
            [(after[name].double() - before[name].double()).flatten() for name in sorted(before)]
        )

    moved = change(expected)
    assert float((change(found) - moved).norm()) <= 1e-3 * float(moved.norm()) + 1e-9
