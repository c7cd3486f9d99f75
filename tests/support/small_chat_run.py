"""Run real stages on a chat model of a few thousand parameters, which learns to say one word and to stop."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.flows.publishing.publishing import publish
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import RUN_STAGE

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORD = "ship"
"""What the trained policy answers."""
MAX_TOKENS = 12
TEMPERATURE = 0.8

RECIPE = f"""\
recipe: chat
seed: 3
model: {{source: MODEL}}
generation: {{max_prompt_tokens: 64, max_response_tokens: {MAX_TOKENS}, temperature: {TEMPERATURE}}}
data:
  demonstrations: {{source: demonstrations.jsonl, split: {{validation: 0.1, test: 0.1}}}}
  preferences: {{source: preferences.jsonl, split: {{validation: 0.1, test: 0.1}}}}
stages:
  sft: {{kind: sft, data: demonstrations, epochs: 2, batch_size: 8, learning_rate: 2e-2}}
  reward: {{kind: reward_model, init: sft, data: preferences, epochs: 1, batch_size: 8, learning_rate: 1e-3}}
publish:
  - {{stage: sft, registered_model: small-chat, alias: champion}}
  - {{stage: reward, registered_model: small-reward}}
"""

LORA = (
    "model.lora.rank=4",
    "model.lora.alpha=8",
    "publish=[{stage: sft, registered_model: small-chat, alias: champion}, {stage: reward, registered_model: small-reward}, "
    "{stage: sft, registered_model: small-adapters, merge: false}]",
)
"""Overrides with which the stages train adapters, which are published merged into their base and as they are."""


def make_small_chat_run(
    folder: Path, workspace: Workspace | None = None, *overrides: str, until: str | None = None
) -> Workspace:
    """Run the recipe in the folder, publish both models, and return the workspace.

    Args:
        workspace: where to run; None: in a workspace in the folder.
        overrides: overrides of the recipe.
        until: the first step that is not run; then nothing is published.
    """
    save_chat_model(folder / "base")
    prompts = [f"say it {number}" for number in range(60)]
    _write_rows(folder / "demonstrations.jsonl", [{"prompt": each, "response": WORD} for each in prompts])
    pairs = [{"prompt": each, "chosen": WORD, "rejected": "lamp"} for each in prompts]
    _write_rows(folder / "preferences.jsonl", pairs)
    recipe = folder / "chat.yaml"
    recipe.write_text(RECIPE.replace("MODEL", str(folder / "base")))
    workspace = workspace or Workspace(folder / "workspace")
    with orchestrated(
        workspace, recipe, *overrides, in_process=True, stage_function=RUN_STAGE
    ) as orchestrator:
        ended = attempt_all(orchestrator, until=until)
        if until is None:
            assert {stage.status for stage in ended.values()} <= {"completed", "reused"}, ended
        for publication in orchestrator.recipe.publish if until is None else ():
            publish(publication, orchestrator)
        orchestrator.end()
        orchestrator.ledger.close()  # nothing changes the workspace after this
    return workspace


def save_chat_model(folder: Path) -> None:
    """Save a Llama of two layers with random weights, and a byte-level tokenizer with ChatML's template.

    A turn ends with ``<|im_end|>``, which is not the tokenizer's end-of-sequence token.
    """
    tokenizer = chat_tokenizer()
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of byte-level tokens without merges, and ChatML's special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>", chat_template=CHATML
    )


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
