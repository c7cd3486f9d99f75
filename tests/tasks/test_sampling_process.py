"""Conversations as ids, in the process that holds a model."""

from pathlib import Path

import pytest

from tests.support.small_chat_run import chat_tokenizer
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_tokenizer
from vantage.models.prompts import encode_prompts
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.records.sampling import OpenModel, Turn
from vantage.tasks.data.examples import Codec
from vantage.tasks.sampling_process import OpenedModel, encode_conversations


def turns(*said: tuple[str, str]) -> tuple[Turn, ...]:
    return tuple(Turn.model_validate({"role": role, "content": content}) for role, content in said)


def test_a_single_prompt_has_the_ids_that_it_has_in_training() -> None:
    codec = Codec(chat_tokenizer(), Generation(), None)
    expected = encode_prompts(codec.tokenizer, ["say it"], chat=None)
    assert encode_conversations(codec, [turns(("user", "say it"))]) == expected


def test_several_turns_are_what_the_template_makes_of_them() -> None:
    codec = Codec(chat_tokenizer(), Generation(), None)
    said = turns(("system", "be short"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    [ids] = encode_conversations(codec, [said])
    assert codec.tokenizer.decode(ids) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_template_a_prompt_is_plain_text_and_turns_have_their_roles(tmp_path: Path) -> None:
    build_builtin("tiny", tmp_path, seed=1)
    codec = Codec(load_tokenizer(tmp_path), Generation(), None)
    single, several = encode_conversations(
        codec, [turns(("user", "1+1?")), turns(("system", "be short"), ("user", "1+1?"))]
    )
    assert codec.tokenizer.decode(single) == "<s>1+1?"
    assert codec.tokenizer.decode(several).startswith("<s>System")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no tokenizer that transformers reads"):
        OpenedModel(OpenModel(folder=tmp_path), tmp_path)
