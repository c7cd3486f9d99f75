"""The recipe that ``vantage init`` writes: commented YAML from a few answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vantage.schemas.recipe.inputs import Content
from vantage.schemas.recipe.verifiers import EXACT_MATCH
from vantage.schemas.steps import BUILTIN_VERIFIERS

OWN = "check"
"""Name of the recipe's own verifier."""
BOXED = r"\\boxed\{([^}]{0,500})\}"
"""An example: LaTeX's box around an answer. The bound limits the time for boxes that are never closed."""

Reward = Literal["model", "verifier", "none"]


@dataclass(frozen=True)
class DataDraft:
    """One dataset."""

    source: str
    content: Content
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Labels of judgments; empty: the usual words."""
    held_out: float = 0.05
    """Share of the rows for validation; the share for test is equal."""


@dataclass(frozen=True)
class Draft:
    """Choices for the recipe to write."""

    name: str
    model: str
    reward: Reward
    """Source of the reward. ``none``: DPO if there are preferences, else only SFT."""
    data: Mapping[str, DataDraft]
    """``demonstrations``, ``preferences`` and ``prompts``, if the recipe has them."""
    verifier: str = EXACT_MATCH
    """A built-in verifier's name, ``builtin:exact_match``, or a file; read with ``reward: verifier``."""
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512
    has_lora: bool = False
    """Whether stages train adapters instead of all weights."""
    gpus: int = 0
    is_sharded: bool = False
    """Whether the weights with their optimiser state do not fit on one GPU."""

    @property
    def start(self) -> str:
        """The policy from which the stages after SFT start."""
        return "sft" if "demonstrations" in self.data else "model"

    @property
    def prompts(self) -> str:
        """The dataset whose prompts are sampled."""
        return "prompts" if "prompts" in self.data else "demonstrations"

    @property
    def last(self) -> str:
        """The stage whose policy is published."""
        if self.reward != "none":
            return "policy"
        return "dpo" if "preferences" in self.data else "sft"


def recipe_text(draft: Draft, *, file: str) -> str:
    """Return the recipe as YAML; ``file`` is its name, for the comments."""
    parts = [
        _head(draft, file),
        *_data(draft),
        *(_verifier(draft) if draft.reward == "verifier" and _verifier_name(draft) == OWN else []),
        *(_reward(draft) if draft.reward != "none" else []),
        "stages:",
        *([_sft(draft)] if "demonstrations" in draft.data else []),
        *(_with_reward_model(draft) if draft.reward == "model" else []),
        *(_with_verifier(draft) if draft.reward == "verifier" else []),
        *([_dpo(draft)] if draft.last == "dpo" else []),
        *([_evaluation(draft)] if draft.reward != "none" else []),
        _publish(draft),
    ]
    return "\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _head(draft: Draft, file: str) -> str:
    hardware = f"{draft.gpus} GPU{'s' if draft.gpus > 1 else ''}" if draft.gpus else "the CPU"
    lora = (
        ", lora: {rank: 16, alpha: 32}}   # adapters alone are trained; publishing merges them"
        if draft.has_lora
        else "}   # a Hugging Face folder, gguf:FILE, package:NAME, hub:org/name@revision"
    )
    return f"""\
# Written by `vantage init` for {hardware}.
#
#   vantage plan {file}       what each stage would do
#   vantage estimate {file}   memory and time, before anything runs
#   vantage run {file}        runs it; the same command resumes it, and runs again only what a change affects
recipe: {draft.name}
seed: 1
model: {{source: {_quoted(draft.model)}{lora}
generation:
  max_prompt_tokens: {draft.max_prompt_tokens}     # longer prompts are left out and counted
  max_response_tokens: {draft.max_response_tokens}   # responses are cut off there, in the data and in sampling
  temperature: 1.0
"""


def _data(draft: Draft) -> list[str]:
    lines = ["data:   # .json, .jsonl, .csv or .parquet; relative paths start at this file's folder"]
    for name, data in draft.data.items():
        lines += [f"  {name}:", f"    source: {_quoted(data.source)}"]
        if data.columns:
            mapped = ", ".join(f"{ours}: {_quoted(theirs)}" for ours, theirs in data.columns.items())
            lines.append(f"    columns: {{{mapped}}}   # ours: theirs, or a template of theirs")
        if data.labels:
            lines.append(f"    labels: {json.dumps(data.labels)}   # which labels prefer which response")
        held_out = f"{data.held_out:g}"
        lines.append(
            f"    split: {{validation: {held_out}, test: {held_out}}}   # by prompt, the same in every dataset"
        )
        lines.append("    max_dropped: 0.05   # largest share of rows that cannot be used")
    return [*lines, ""]


def _verifier(draft: Draft) -> list[str]:
    lines = ["verifiers:", f"  {OWN}: {{source: {_quoted(draft.verifier)}}}"]
    if draft.verifier == EXACT_MATCH:
        lines += [
            "  # The whole response has to be the row's answer. With `extract`, the group's last match is compared:",
            f"  # {OWN}: {{source: \"{EXACT_MATCH}\", extract: '{BOXED}'}}",
        ]
    else:
        lines.append("  # the file's function verify(prompt, response, answer) -> bool")
    return [*lines, ""]


def _verifier_name(draft: Draft) -> str:
    """Return the name; a task's built-in verifier needs no entry in the recipe, other verifiers get one."""
    return draft.verifier if draft.verifier in BUILTIN_VERIFIERS else OWN


def _reward(draft: Draft) -> list[str]:
    term = "model: reward" if draft.reward == "model" else f"verifier: {_verifier_name(draft)}"
    return [
        "rewards:",
        f"  main: {{terms: [{{{term}}}], missing_eos: {{subtract: {0.5 if draft.reward == 'verifier' else 1.0}}}}}"
        "   # a response that is cut off loses this",
        "",
    ]


def _training(draft: Draft, *more: str) -> list[str]:
    """Return the fields of every training stage; its learning rate is set from the model's width, and `plan` shows
    it."""
    lines = list(more)
    if draft.gpus:
        lines += ["microbatch_size: 8      # lower it if memory runs out; the result stays the same"]
    return lines + _on_gpus(draft, is_sharded=draft.is_sharded and draft.gpus > 1)


def _on_gpus(draft: Draft, *, is_sharded: bool = False) -> list[str]:
    """Return the fields of every stage on GPUs; empty without GPUs."""
    if not draft.gpus:
        return []
    sharding = ", distributed: {strategy: fsdp2}" if is_sharded else ""
    return ["precision: auto         # bfloat16", f"resources: {{gpus: {draft.gpus}{sharding}}}"]


def _stage(name: str, lines: Sequence[str]) -> str:
    return "\n".join([f"  {name}:", *(f"    {line}" for line in lines), ""])


def _sft(draft: Draft) -> str:
    return _stage(
        "sft",
        _training(
            draft,
            "kind: sft",
            "data: demonstrations",
            "epochs: 2",
            f"batch_size: {64 if draft.gpus else 16}",
            "warmup_steps: 10",
            "schedule: cosine",
        ),
    )


def _with_reward_model(draft: Draft) -> list[str]:
    centre = (
        ["centre_on: demonstrations   # scores have mean 0 there"] if "demonstrations" in draft.data else []
    )
    reward = _training(
        draft,
        "kind: reward_model",
        f"init: {draft.start}",
        "data: preferences",
        f"batch_size: {64 if draft.gpus else 16}",
        "warmup_steps: 10",
        "schedule: cosine",
        *centre,
        "gate: {metric: pair_accuracy, at_least: 0.6}   # on held-out pairs; a closed gate stops what reads the stage",
    )
    value = _training(
        draft,
        "kind: value_pretraining   # the critic, before the policy moves",
        f"policy: {draft.start}",
        "init: reward",
        "reward: main",
        f"prompts: {draft.prompts}",
        *_sizes(draft, iterations=40),
        "gate: {metric: explained_variance, at_least: 0.0, confidence: 0.95}",
    )
    policy = _training(
        draft,
        "kind: policy_optimization",
        "algorithm: {preset: vapo, length_adaptive_alpha: 0.2, samples_per_prompt: 4}   # or ppo, grpo, rloo, dapo …",
        f"init: {draft.start}",
        f"reference: {draft.start}",
        "critic: value",
        "reward: main",
        f"prompts: {draft.prompts}",
        *_sizes(draft, iterations=20),
    )
    return [_stage("reward", reward), _stage("value", value), _stage("policy", policy)]


def _with_verifier(draft: Draft) -> list[str]:
    policy = _training(
        draft,
        "kind: policy_optimization",
        "algorithm: {preset: grpo, samples_per_prompt: 8}   # no critic: a response is compared with the prompt's others",
        f"init: {draft.start}",
        f"reference: {draft.start}",
        "reward: main",
        f"prompts: {draft.prompts}",
        *_sizes(draft, iterations=50),
    )
    return [_stage("policy", policy)]


def _sizes(draft: Draft, *, iterations: int) -> list[str]:
    batch, minibatch, validation = (256, 128, 256) if draft.gpus else (64, 32, 64)
    return [
        f"iterations: {iterations}",
        f"batch_size: {batch}         # responses of one iteration",
        f"minibatch_size: {minibatch}     # responses of one optimiser step",
        "validate_every: 5       # iterations; the best policy is kept",
        f"validation_samples: {validation}",
    ]


def _dpo(draft: Draft) -> str:
    return _stage(
        "dpo",
        _training(
            draft,
            "kind: dpo",
            f"init: {draft.start}",
            "data: preferences",
            "beta: 0.1",
            f"batch_size: {64 if draft.gpus else 16}",
            "warmup_steps: 10",
            "schedule: linear",
            "gate: {metric: pair_accuracy, at_least: 0.5}   # on held-out pairs",
        ),
    )


def _evaluation(draft: Draft) -> str:
    if draft.reward == "model":
        judge, metric = (
            "{reward: main}",
            "{metric: win_rate, at_least: 0.5, confidence: 0.95, on_fail: continue}",
        )
    else:
        judge = f"{{verifier: {_verifier_name(draft)}}}"
        metric = "{metric: accuracy_gain, at_least: 0.0, confidence: 0.95, on_fail: continue}"
    return _stage(
        "evaluation",
        [
            "kind: evaluation",
            "candidate: policy",
            f"baseline: {draft.start}",
            f"judge: {judge}",
            f"prompts: {draft.prompts}",
            *_on_gpus(draft),
            f"gate: {metric}   # the interval's lower bound",
        ],
    )


def _publish(draft: Draft) -> str:
    after = ", after: evaluation" if draft.reward != "none" else ""
    return (
        "publish:   # in MLflow; the alias moves only if the gates have passed\n"
        f"  - {{stage: {draft.last}, registered_model: {draft.name}, alias: champion{after}}}"
    )
