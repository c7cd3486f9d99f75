"""The process that holds a model turns conversations into ids, and samples by the loop, by vLLM or by servers."""

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
from tests.support.fake_vllm_server import FakeServer, serving
from tests.support.small_chat_run import chat_tokenizer
from vantage.models.adapters import Adaptation, add_adapters, write_adapters
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy, load_tokenizer, save_tokenizer
from vantage.models.prompts import encode_prompts
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.records.sampling import OpenModel, SampleRequest, Turn
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout import remote_engine
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_vllm_answers_as_the_loop_and_starts_again_only_for_longer_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are greedy, of a whole model and of adapters on it, whose matrices B are not 0."""
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
        by_vllm = OpenedModel(opening.model_copy(update={"rollout": Sampling(engine="vllm")}), tmp_path)
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
    opening = OpenModel(
        folder=tmp_path, rollout=Sampling(engine="vllm"), generation=Generation(max_response_tokens=12)
    )
    with monkeypatch.context() as patch:
        patch.setattr("vantage.tasks.sampling_process.find_spec", lambda name: None)
        with pytest.raises(ValueError, match="--engine=vllm needs the package vllm.*or leave --engine out"):
            OpenedModel(opening, tmp_path)
    faults = fake_vllm.install(monkeypatch)
    faults.failing_starts = {1}
    with pytest.raises(ValueError, match=r"could not start: start 1 is broken; use --engine loop"):
        asked(OpenedModel(opening, tmp_path), "1+1?")


def served(folder: Path, servers: list[FakeServer], **given: Any) -> OpenModel:
    """Return the first line that names a model, and servers that sample from it."""
    rollout = Sampling(engine="vllm", url=tuple(each.url for each in servers), **given)
    generation = Generation(max_prompt_tokens=8, max_response_tokens=12)
    return OpenModel(folder=folder, rollout=rollout, generation=generation)


def test_servers_answer_as_the_loop_from_weights_that_they_get_once(tmp_path: Path) -> None:
    """Greedy answers are equal, also to a prompt that is longer than the recipe's. Servers had other weights before."""
    build_builtin("tiny", tmp_path / "model", seed=1)
    with serving(tmp_path / "model", replicas=2) as servers:
        opening = served(tmp_path / "model", servers)
        loop = OpenedModel(opening.model_copy(update={"rollout": Sampling()}), tmp_path)
        by_servers = OpenedModel(opening, tmp_path)
        assert by_servers.describe() == loop.describe()
        given = [list(server.seen.versions) for server in servers]
        assert all(given), "before anything is asked"
        for texts in (("1+1?", "2-1?"), ("1+2?",)):
            expected, found = (
                asked(each, *texts, count=2, greedy=True, temperature=1.0, max_tokens=12)
                for each in (loop, by_servers)
            )
            assert [text for text, _ in found] == [text for text, _ in expected]
            assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-3)
        assert [server.seen.versions for server in servers] == given
        assert sum(len(server.seen.seeds) for server in servers) == 6
        long = "1+" * 9 + "1?"
        assert [text for text, _ in asked(by_servers, long, greedy=True)] == [
            text for text, _ in asked(loop, long, greedy=True)
        ]


def test_a_server_of_another_model_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    for size in ("tiny", "nano"):
        build_builtin(size, tmp_path / size, seed=1)
    with serving(tmp_path / "nano") as servers:
        model = OpenedModel(served(tmp_path / "tiny", servers), tmp_path)
        with pytest.raises(ValueError, match=r"^--url: http://.* which is another model than the policy"):
            model.describe()
        assert not servers[0].seen.versions
        assert not servers[0].seen.seeds


def test_a_server_with_another_tokenizer_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    build_builtin("tiny", tmp_path / "model", seed=1)
    with serving(tmp_path / "model") as servers:
        servers[0].tokenizer = chat_tokenizer()
        with pytest.raises(ValueError, match=r"^--url: http://.* with another tokenizer than the policy's"):
            OpenedModel(served(tmp_path / "model", servers), tmp_path).describe()
        assert not servers[0].seen.versions


def test_servers_are_asked_with_the_key_and_read_the_weights_of_the_given_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_builtin("tiny", tmp_path / "model", seed=1)
    (tmp_path / "weights").mkdir()
    with serving(tmp_path / "model", key="secret") as servers:
        opening = served(
            tmp_path / "model",
            servers,
            api_key_variable="SAMPLER_KEY",
            weights_folder=str(tmp_path / "weights"),
        )
        with pytest.raises(
            ValueError, match=r"^--api-key-variable=SAMPLER_KEY names a variable that is not set"
        ):
            OpenedModel(opening, tmp_path).describe()
        monkeypatch.setenv("SAMPLER_KEY", "secret")
        model = OpenedModel(opening, tmp_path)
        model.describe()
        assert len(asked(model, "1+1?", count=3)) == 3
        [folder] = servers[0].seen.folders
    assert Path(folder).is_relative_to(tmp_path / "weights")
    assert not list((tmp_path / "weights").rglob("*.safetensors")), (
        "they are removed when the servers have them"
    )


def test_a_server_that_does_not_answer_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(remote_engine, "PATIENCE_SECONDS", 0.2)
    build_builtin("tiny", tmp_path / "model", seed=1)
    with serving(tmp_path / "model") as servers:
        opening = served(tmp_path / "model", servers)
    model = OpenedModel(opening, tmp_path)
    model.describe()
    with pytest.raises(
        ValueError, match=r"no server of --url could sample .*; start one, or leave --url out"
    ):
        asked(model, "1+1?")
