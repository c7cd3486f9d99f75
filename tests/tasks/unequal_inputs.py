"""Make inputs of stages that differ in everything, and are small enough for whole runs in float64 beside them.

Policy, reference, critic and reward model are networks of their own; the temperature is 0.7; every split has prompts of
its own. What a stage confuses with something else then shows in its numbers.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)

from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.rewards import MissingEos, Reward
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.schemas.recipe.verifiers import Verifier
from vantage.schemas.recipe.work import Work
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.rows import write_rows
from vantage.tasks.stages import run_stage

M = TypeVar("M", bound=PreTrainedModel)

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHARACTERS = "01234+?a"
PAD, BOS, EOS = 0, 1, 2
GENERATION = Generation(max_prompt_tokens=16, max_response_tokens=7, temperature=0.7)
EXTRACT = "([0-4])"
"""A digit. A response is right when its last digit is the row's answer."""
REWARDS = {
    "main": Reward(
        terms=(
            ModelTerm(model="reward", weight=0.7),
            VerifierTerm(verifier="last_digit", weight=1.5, wrong=-0.5),
        ),
        missing_eos=MissingEos(subtract=0.4),
    )
}
SCORE_SHIFT = 0.25
MOMENTS = {"count": 12, "mean": 0.6, "m2": 9.0}
"""Moments that the critic's folder hands over."""


def write_inputs(root: Path) -> dict[str, Path]:
    """Write every model, dataset and verifier that the tests' jobs read, each in a folder of its own."""
    folders = {
        name: root / name
        for name in ("init", "reference", "fresh", "critic", "reward", "prompts", "demonstrations", "pairs")
    } | {name: root / name for name in ("rankings", "labelled", "last_digit")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    for number, name in enumerate(("init", "reference", "fresh")):
        _save(_model(LlamaForCausalLM, seed=number), folders[name])
    _save(_model(LlamaForSequenceClassification, seed=10), folders["reward"])
    _write_json(folders["reward"] / "scalar.json", {"role": "reward", "score_shift": SCORE_SHIFT})
    _save_critic(folders["critic"])
    _write_data(folders)
    verifier = Verifier(source="builtin:exact_match", extract=EXTRACT)
    (folders["last_digit"] / "verifier.json").write_text(verifier.model_dump_json())
    return folders


def job_of(
    work: Work,
    folder: Path,
    inputs: Mapping[str, Path],
    *,
    seed: int,
    rewards: Mapping[str, Reward] = REWARDS,
) -> StageJob:
    """Return the job of one attempt at a stage in ``folder``."""
    for name in ("scratch", "output"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return StageJob(
        run_id="0001-test",
        name=work.kind,
        attempt=1,
        stage_key="0" * 64,
        seed=seed,
        work=work,
        inputs=dict(inputs),
        scratch=folder / "scratch",
        output=folder / "output",
        generation=GENERATION,
        rewards=dict(rewards),
    )


def collect(folder: Path, folders: Mapping[str, Path], *, policy: str) -> Path:
    """Collect three responses of a policy to each training prompt and four to each other prompt, scored by ``main``.
    Returns the artifact's folder.
    """
    work = RolloutCollection(
        kind="rollout_collection",
        policy=policy,
        prompts="prompts",
        reward="main",
        samples_per_prompt=3,
        held_out_samples_per_prompt=4,
        batch_size=12,
        microbatch_size=5,
    )
    inputs = {
        "policy": folders[policy],
        "prompts": folders["prompts"],
        "reward.main.0": folders["reward"],
        "reward.main.1": folders["last_digit"],
    }
    job = job_of(work, folder, inputs, seed=4)
    run_stage(job)
    return job.output


def _config() -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    config.num_labels = 1
    return config


def _model(kind: Callable[[LlamaConfig], M], *, seed: int) -> M:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(_config())


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    _write_tokenizer(folder)


def _save_critic(folder: Path) -> None:
    _save(_model(LlamaModel, seed=20), folder)
    draw = torch.Generator().manual_seed(21)
    weight, bias = 0.1 * torch.randn(1, 16, generator=draw), torch.tensor([0.3])
    save_file({"weight": weight, "bias": bias}, folder / "head.safetensors")
    _write_json(folder / "scalar.json", {"role": "value", "score_shift": 0.0})
    _write_json(folder / "reward_moments.json", MOMENTS)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content) + "\n")


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token a character, and ``<s>`` before every text."""
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _write_data(folders: Mapping[str, Path]) -> None:
    """Write questions such as ``3+1?``, sums modulo 5; no two splits have one in common."""
    pairs = [(a, b) for a in range(5) for b in range(5)]
    questions = [(f"{a}+{b}?", str((a + b) % 5)) for a, b in pairs]
    questions += [(f"{a}+{b}+a?", str((2 * a + b) % 5)) for a, b in pairs[:11]]
    sides = {"train": questions[:20], "validation": questions[20:27], "test": questions[27:]}
    for side, rows in sides.items():
        write_rows(folders["prompts"], side, [{"prompt": p, "answer": a} for p, a in rows])
        demonstrations = [{"prompt": p, "response": "a" * (i % 4) + a} for i, (p, a) in enumerate(rows)]
        write_rows(folders["demonstrations"], side, demonstrations)
        write_rows(folders["pairs"], side, [_pair(i, p, a) for i, (p, a) in enumerate(rows)])
        write_rows(folders["labelled"], side, [_labelled(i, *rows[i // 2]) for i in range(2 * len(rows))])
        write_rows(folders["rankings"], side, [_ranking(i, p, a) for i, (p, a) in enumerate(rows)])


def _labelled(number: int, prompt: str, answer: str) -> dict[str, Any]:
    """Return two responses to each prompt: the right one is desirable, and of every other prompt both are."""
    is_right = number % 2 == 0
    return {
        "prompt": prompt,
        "response": "a" * (number % 3) + (answer if is_right else f"{answer}+"),
        "label": is_right or number % 4 == 1,
    }


def _pair(number: int, prompt: str, answer: str) -> dict[str, Any]:
    wrong = str((int(answer) + 1 + number % 3) % 5)
    return {
        "prompt": prompt,
        "chosen": "a" * (number % 3) + answer,
        "rejected": wrong + "+a" * (number % 2),
        "margin": 0.25 * (number % 3),
    }


def _ranking(number: int, prompt: str, answer: str) -> dict[str, Any]:
    responses = [answer, "a" + answer, str((int(answer) + 1) % 5), "?"][: 3 + number % 2]
    return {"prompt": prompt, "responses": responses, "ranks": [0.0, 0.0, 1.5, 3.0][: len(responses)]}
