"""Fine-tuning on conversations trains the tokens that transformers itself counts as the assistant's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.byte_tokenizer import build_byte_tokenizer
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.data.examples import Codec, read_completions, read_prompts
from vantage.tasks.data.rows import write_rows
from vantage.tasks.training.likelihood import accumulate_nll

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that says which of its text the assistant generates."""


def conversation(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, "extra": None} for role, content in turns]


ROWS: list[dict[str, Any]] = [
    {"prompt": "hello", "response": "hi there", "messages": None},
    {
        "prompt": "…",
        "response": "国会 it is",
        "messages": conversation(
            ("system", "Be brief."), ("user", "2+2?"), ("assistant", "4, hello."), ("user", "国会?"),
            ("assistant", "hello hello"), ("user", "and?"),
        ),
    },
    {"prompt": "…", "response": "c", "messages": conversation(("user", "a"), ("assistant", "b"), ("user", "d"))},
]  # fmt: skip


@pytest.fixture
def codec(tmp_path: Path) -> Codec:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = MARKED
    write_rows(tmp_path, "train", ROWS)
    return Codec(tokenizer, Generation(max_prompt_tokens=200, max_response_tokens=50), chat=None)


@pytest.fixture
def policy(codec: Codec) -> PolicyModel:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(codec.tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    return PolicyModel(LlamaForCausalLM(config).eval())


def labels_of(row: dict[str, Any], codec: Codec, *, last_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels (1, L) by transformers; −100 where nothing is learnt."""
    turns = [{"role": m["role"], "content": m["content"]} for m in row["messages"] or []]
    turns = turns or [{"role": "user", "content": row["prompt"]}]
    encoded: Any = codec.tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", "content": row["response"]}],
        return_assistant_tokens_mask=True, return_dict=True,
    )  # fmt: skip
    ids, mask = torch.tensor([encoded["input_ids"]]), torch.tensor([encoded["assistant_masks"]]).bool()
    if last_only:
        start = len(codec.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
        mask[:, :start] = False
    return ids, ids.masked_fill(~mask, -100)


@pytest.mark.parametrize("train_on", ["all_responses", "last_response"])
@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_loss_and_gradient_are_those_of_the_assistants_tokens(
    codec: Codec, policy: PolicyModel, tmp_path: Path, train_on: Any, microbatch_size: int | None
) -> None:
    examples = read_completions(tmp_path, "train", ["response"], codec, train_on=train_on)
    batch = examples.batch(range(len(examples)))
    nll = accumulate_nll(
        policy, batch, temperature=1.0, limits=PassLimits(microbatch_size), precision="float32"
    ).nll
    gradient = {name: each.grad.clone() for name, each in policy.named_parameters() if each.grad is not None}

    policy.zero_grad()
    total, count = torch.zeros(()), 0
    for row in ROWS:
        ids, labels = labels_of(row, codec, last_only=train_on == "last_response")
        logits = policy.causal_lm(ids).logits[:, :-1]
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        count += int((labels[:, 1:] != -100).sum())
    (total / count).backward()
    assert sum(examples.num_learnt()) == count
    assert nll == pytest.approx(total.item() / count, rel=1e-5)
    for name, each in policy.named_parameters():
        assert each.grad is not None
        torch.testing.assert_close(gradient[name], each.grad, rtol=1e-4, atol=1e-6)


def test_the_same_rows_are_left_out_whatever_is_learnt(codec: Codec, tmp_path: Path) -> None:
    short = Codec(codec.tokenizer, Generation(max_prompt_tokens=60, max_response_tokens=3), chat=None)
    last, everything = (
        read_completions(tmp_path, "train", ["response"], short, train_on=train_on)
        for train_on in ("last_response", "all_responses")
    )
    assert last.num_too_long == everything.num_too_long == 1
    whole = [
        [*p, *r] for p, r in zip(everything.prompt_ids, everything.response_ids["response"], strict=True)
    ]
    assert whole == [[*p, *r] for p, r in zip(last.prompt_ids, last.response_ids["response"], strict=True)]
    assert [len(r) for r in last.response_ids["response"]] == [3, 2]


def test_prompts_of_conversations_are_encoded_whole_and_keep_their_turns(
    codec: Codec, tmp_path: Path
) -> None:
    prompts = read_prompts(tmp_path, "train", codec)
    assert prompts.conversations is not None
    assert prompts.conversations[1] == ROWS[1]["messages"]
    turns = [{"role": m["role"], "content": m["content"]} for m in ROWS[1]["messages"]]
    expected = codec.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert prompts.ids[1] == list(expected)
