"""Every supported family of models goes through the whole pipeline, on tiny random weights and a tokenizer without padding token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.small_chat_run import chat_tokenizer
from tests.tasks.conftest import GENERATION, Pipeline
from vantage.ledger.journal import read
from vantage.models.builtin import VOCABULARY, write_tokenizer
from vantage.models.folders import load_policy
from vantage.models.sampling import sample
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.recipe.work import ImportModel
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.rows import read_rows
from vantage.tasks.training.scratch import JOURNAL

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": VOCABULARY.index("<s>"),
    "eos_token_id": VOCABULARY.index("</s>"),
}
GPT: dict[str, Any] = {
    **{name: SIZES[name] for name in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")},
    "n_layer": 2,
    "n_head": 2,
}
BYTES = chat_tokenizer()
"""Byte-level tokenizer for Qwen2: transformers gives its models such a tokenizer, whatever their folder contains."""
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(
        **{**SIZES, "vocab_size": len(BYTES), "bos_token_id": None, "eos_token_id": BYTES.eos_token_id},
        tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(**SIZES),
    "gemma": GemmaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=16),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=16),
    "mistral": MistralConfig(**SIZES, sliding_window=16),
    "phi": PhiConfig(**{**SIZES, "num_key_value_heads": 2}),
    "phi3": Phi3Config(**SIZES),
    "gpt2": GPT2Config(**GPT, n_embd=32, n_positions=128),
    "gpt_neox": GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 2}),
    "bloom": BloomConfig(**GPT, hidden_size=32),
}
PREPARED = ("demonstrations", "preferences", "prompts")
ONE_STEP: dict[str, dict[str, object]] = {
    "sft": {"epochs": 0.1},
    "reward": {"epochs": 0.05},
    "value": {"iterations": 1, "batch_size": 8, "minibatch_size": 8},
    "policy": {"iterations": 1, "batch_size": 8, "minibatch_size": 8, "epochs": 1, "validate_every": 1},
}


class Family(Pipeline):
    """The small pipeline on another model, one or two steps a stage, and on data that is there already."""

    def __init__(self, root: Path, source: Path, prepared: Pipeline) -> None:
        super().__init__(root)
        self._source, self._prepared = source, prepared

    def job(self, name: str, *, folder: Path | None = None, **changes: object) -> StageJob:
        job = super().job(name, folder=folder, **ONE_STEP.get(name, {}), **changes)
        if name != "model":
            return job
        return job.model_copy(update={"work": ImportModel(model=Model(source=str(self._source)))})

    def folder(self, name: str) -> Path:
        return self._prepared.folder(name) if name in PREPARED else super().folder(name)


def save_model(folder: Path, config: Any) -> None:
    """Save random weights, and a tokenizer without the names of its padding and unknown tokens."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if config.vocab_size == len(BYTES):
        BYTES.save_pretrained(folder)
        (folder / "chat_template.jinja").unlink()
    else:
        write_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: settings[name] for name in settings if name not in ("pad_token", "unk_token")})
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stage_runs_on_the_family(name: str, pipeline: Pipeline, tmp_path: Path) -> None:
    save_model(tmp_path / "source", FAMILIES[name])
    family = Family(tmp_path, tmp_path / "source", pipeline)
    evaluated = family.metrics("evaluation")
    assert evaluated["mean_response_length"] is not None
    model = AutoModelForCausalLM.from_pretrained(family.folder("sft"), attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(family.folder("sft"))
    assert tokenizer.pad_token_id is not None
    assert family.metrics("sft")["test_nll"] == pytest.approx(
        nll_by_transformers(model, tokenizer, pipeline.folder("demonstrations")), rel=1e-4
    )
    assert moved(family.folder("model"), family.folder("sft"))
    assert moved(family.folder("sft"), family.folder("policy")) or (
        family.metrics("policy")["best_iteration"] == 0.0
    )
    gaps = [entry.metrics["sampler_gap"] for entry in read(tmp_path / "policy" / "scratch" / JOURNAL)]
    assert max(gaps) < 1e-4
    check_sampling(family.folder("policy"), tokenizer)


@torch.no_grad()
def nll_by_transformers(model: Any, tokenizer: Any, data: Path) -> float:
    """Return NLL of the held-out responses and their ends, per token, one row after the other and without padding."""
    total, count = 0.0, 0
    for row in read_rows(data, "test"):
        prompt = tokenizer(row["prompt"])["input_ids"]
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        response = [*response, tokenizer.eos_token_id][: GENERATION.max_response_tokens]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        total -= float(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum())
        count += len(response)
    return total / count


def moved(before: Path, after: Path) -> bool:
    """Return whether any weight has changed."""
    old, new = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (before, after))
    return any(not torch.equal(old[name], weight) for name, weight in new.items())


@torch.no_grad()
def check_sampling(folder: Path, tokenizer: Any) -> None:
    """Check that prompts of unlike lengths, padded side by side, are answered as each is alone and without a cache."""
    prompts = [tokenizer(text)["input_ids"] for text in ("3 a+2 b-3?", "1 c+2?", "7 a+1 b+2 c+3 d-4?")]
    sampled = sample(
        load_policy(folder),
        prompts,
        max_new_tokens=20,
        temperature=1.0,
        eos_token_ids=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
        seed=1,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for prompt, response, logprobs in zip(prompts, sampled.responses, sampled.logprobs, strict=True):
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=1e-4)
