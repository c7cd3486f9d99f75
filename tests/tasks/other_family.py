"""Make a reward model of another family than the small pipeline's policy, and compute its scores by transformers alone."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support.small_chat_run import save_chat_model
from vantage.schemas.conversations import Prompt
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage

CLOSED = "<|im_end|>"


def train_other_reward(pipeline: Any, folder: Path, *, template: str | None = None) -> Path:
    """Train the small pipeline's reward model from a byte-level chat model; return the artifact's folder."""
    save_chat_model(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    job: StageJob = pipeline.job("reward")
    job = job.model_copy(update={"inputs": {**job.inputs, "init": folder}})
    run_stage(job)
    return job.output


def rendered(prompt: Prompt) -> str:
    """Return ChatML written by hand: the turns, and the opening of the response."""
    turns = [("user", prompt)] if isinstance(prompt, str) else [(t["role"], t["content"]) for t in prompt]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{text}<|im_start|>assistant\n"


class ByTransformers:
    """The reward model as transformers alone loads it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        self.shift = float(json.loads((folder / "scalar.json").read_text())["score_shift"])

    def ids(self, prompt: Prompt, words: str, *, ended: bool) -> list[int]:
        """Return the template's text in tokens, then the words as plain text, then the closing token where the response ended."""
        before = self.tokenizer(rendered(prompt), add_special_tokens=False)["input_ids"]
        said = self.tokenizer(words, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        closing = [self.tokenizer.convert_tokens_to_ids(CLOSED)] if ended or not words else []
        return [*before, *said, *closing]

    @torch.no_grad()
    def score(self, prompt: Prompt, words: str, *, ended: bool) -> float:
        """Return the score of one response, alone in its batch."""
        ids = torch.tensor([self.ids(prompt, words, ended=ended)])
        return float(self.model(input_ids=ids).logits[0, 0]) - self.shift
