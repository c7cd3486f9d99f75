"""Conversations as ids, in the process that holds a model."""

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fake_vllm
from tests.support.small_chat_run import chat_tokenizer
from vantage.models.adapters import Adaptation, add_adapters, write_adapters
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy, load_tokenizer, save_tokenizer
from vantage.models.prompts import encode_prompts
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.records.sampling import OpenModel, SampleRequest, Turn
from vantage.tasks.data.examples import Codec
from vantage.tasks.sampling_process import OpenedModel, bounded, encode_conversations


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


def run_bounded(work: Callable[[], object]) -> multiprocessing.Process:
    """Run the work within bounds of a second, in a process of its own, and wait for its end."""

    def run() -> None:
        try:
            with bounded(1):
                work()
        except ValueError as error:
            os._exit(65 if "chat template takes more than 2 GiB of memory" in str(error) else 1)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process


@pytest.mark.parametrize(
    ("work", "status"),
    [
        (lambda: None, 0),
        (lambda: time.sleep(1.5), 0),
        (lambda: 10 ** (10**9), -signal.SIGPROF),
        (lambda: "ab" * 2**32, 65),
    ],
)
def test_what_a_template_takes_is_bounded_by_the_kernel(work: Callable[[], object], status: int) -> None:
    """Processor time counts, so that a busy machine or a stopped process ends nothing."""
    assert run_bounded(work).exitcode == status


def test_after_the_block_nothing_is_bounded() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with bounded(60):
        assert resource.getrlimit(resource.RLIMIT_AS) != before
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no tokenizer that transformers reads"):
        OpenedModel(OpenModel(folder=tmp_path), tmp_path)


def asked(model: OpenedModel, *texts: str, **settings: Any) -> list[tuple[str, float]]:
    """Return the texts and log-probabilities of what a model answers."""
    request = SampleRequest(conversations=tuple(turns(("user", text)) for text in texts), **settings)
    return [(each.text, each.logprob) for one in model.sample(request).conversations for each in one.answers]


def test_vllm_answers_as_the_loop_and_starts_again_only_for_longer_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers, of a whole model and of adapters on it, whose matrices B are not 0."""
    faults = fake_vllm.install(monkeypatch)
    build_builtin("tiny", tmp_path / "whole", seed=1)
    adapted = load_policy(tmp_path / "whole")
    add_adapters(adapted, Adaptation(Lora(rank=4, alpha=8.0), seed=3))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".lora_B." in name:
                weight.fill_(0.01)
    write_adapters(adapted, tmp_path / "adapters", base=None)
    save_tokenizer(load_tokenizer(tmp_path / "whole"), tmp_path / "adapters")
    generation = Generation(max_prompt_tokens=8, max_response_tokens=12)
    answers = []
    for folder, base in (("whole", None), ("adapters", tmp_path / "whole")):
        opening = OpenModel(folder=tmp_path / folder, base=base, generation=generation)
        loop = OpenedModel(opening, tmp_path)
        by_vllm = OpenedModel(opening.model_copy(update={"engine": "vllm"}), tmp_path)
        starts = faults.starts
        for texts in (("1+1?", "2-1?"), ("1+1+1?",), ("1+" * 9 + "1?",)):
            expected = asked(loop, *texts, count=2, greedy=True)
            found = asked(by_vllm, *texts, count=2, greedy=True)
            assert [text for text, _ in found] == [text for text, _ in expected]
            assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-3)
            answers.append([text for text, _ in found])
        assert faults.starts - starts == 2, "once, and once for the long prompt"
    assert len(faults.adapters) > 0 and answers[:3] != answers[3:]


def test_vllm_that_is_missing_or_fails_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_builtin("tiny", tmp_path, seed=1)
    opening = OpenModel(folder=tmp_path, engine="vllm", generation=Generation(max_response_tokens=12))
    with monkeypatch.context() as patch:
        patch.setattr("vantage.tasks.sampling_process.find_spec", lambda name: None)
        with pytest.raises(ValueError, match="--engine=vllm needs the package vllm.*or leave --engine out"):
            OpenedModel(opening, tmp_path)
    faults = fake_vllm.install(monkeypatch)
    faults.failing_starts = {1}
    with pytest.raises(ValueError, match=r"could not start: start 1 is broken; use --engine loop"):
        asked(OpenedModel(opening, tmp_path), "1+1?")
