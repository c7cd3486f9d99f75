"""Make a model folder and rows of instructions in the shapes of real ones from the Hub."""

import json
import random
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NOUNS = ("cat", "dog", "bird", "fish", "boat", "tree", "house", "ball", "cake", "river", "horse", "lamp")
NAMES = ("Tom", "Lily", "Anna", "Ben", "Sue", "Max")
ADJECTIVES = ("big", "small", "red", "old", "happy", "green", "quiet", "new")
VERBS = ("sees", "likes", "finds", "has", "wants", "draws")


def story(rng: random.Random) -> str:
    """Return a few short English sentences."""
    name = rng.choice(NAMES)
    sentences = [f"Once upon a time there was a {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}."]
    sentences += [
        f"{name} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}."
        for _ in range(rng.randint(1, 3))
    ]
    return " ".join(sentences)


def story_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts a space before every text, and that spells unknown characters in bytes."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_of_unknown = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=256,
        special_tokens=special,
        initial_alphabet=[*string.ascii_letters, *string.digits, *string.punctuation],
        show_progress=False,
    )
    rng = random.Random(1)
    # words one by one: without a pre-tokenizer, whole sentences would become tokens
    words = sorted({word for _ in range(400) for word in story(rng).split()})
    tokenizer.train_from_iterator(words, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    tokens = special + bytes_of_unknown + [token for token in trained["vocab"] if token not in special]
    whole = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(tokens)},
            [(left, right) for left, right in trained["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    whole.normalizer = tokenizer.normalizer
    whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


def save_story_model(folder: Path, num_layers: int = 5) -> Path:
    """Save a Llama of random weights, with grouped heads and tied embeddings, and its tokenizer.

    Five layers have about 260,000 weights.
    """
    tokenizer = story_tokenizer()
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=172,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            initializer_range=0.1,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_instructions(path: Path, rows: int = 1100) -> Path:
    """Write ``instruction``, ``input`` and ``output``, a few rows twice."""
    path.write_text(json.dumps([_instruction(number) for number in range(rows)], indent=4))
    return path


def write_preferences(path: Path, rows: int = 1100) -> Path:
    """Write the same instructions with a polite and a rude answer."""
    rude = ("What a stupid question.", "Get it together.", "Figure it out yourself.")
    pairs = [
        {**row, "rejected": f"{rude[number % 3]} {row['output']}", "chosen": row["output"]}
        for number, row in enumerate(map(_instruction, range(rows)))
    ]
    path.write_text(json.dumps(pairs, indent=4))
    return path


def write_word_problems(path: Path, rows: int = 300) -> Path:
    """Write ``question`` and ``answer`` in GSM8K's form, as JSON Lines."""
    lines = []
    for number in range(rows):
        name, noun, first, second = NAMES[number % 6], NOUNS[number % 12], 2 + number % 47, 3 + number % 31
        total = first + second
        question = (
            f"{name} sold {first} {noun}s in April and {second} in May. How many {noun}s did {name} sell?"
        )
        answer = f"{name} sold {first}+{second} = <<{first}+{second}={total}>>{total} {noun}s.\n#### {total}"
        lines.append(json.dumps({"question": question, "answer": answer}) + "\n")
    path.write_text("".join(lines))
    return path


def write_chinese_preferences(path: Path, rows: int = 300) -> Path:
    """Write conversations whose chosen and rejected sides are messages, in Chinese; every third prompt is long."""
    places, things = "北京上海广州南京杭州成都", "山水花鸟鱼虫风雨"
    pairs = []
    for number in range(rows):
        place, thing = places[number % 6 * 2 :][:2], things[number % 8]
        asked = f"请用{number}个字介绍{place}的{thing}。" + "请写得详细一些。" * (
            30 if number % 3 == 0 else 0
        )
        pairs.append(
            {
                "conversations": [{"from": "human", "value": asked}],
                "chosen": {"from": "gpt", "value": f"{place}的{thing}很美，欢迎您来看。"},
                "rejected": {"from": "gpt", "value": f"不知道，{thing}没有意思。"},
            }
        )
    path.write_text(json.dumps(pairs, ensure_ascii=False, indent=2), encoding="utf-8")
    return path


def _instruction(number: int) -> dict[str, str]:
    line = number - 1 if number % 100 == 1 else number  # row 101 is row 100 again
    rng = random.Random(line)
    name, adjective, noun = rng.choice(NAMES), rng.choice(ADJECTIVES), rng.choice(NOUNS)
    first, second = rng.randint(1, 99), rng.randint(1, 99)
    match rng.randrange(4):
        case 0:
            return {
                "instruction": f"Turn the words of line {line} around.",
                "input": f"{adjective} {noun}",
                "output": f"The words are: {noun} {adjective}.",
            }
        case 1:
            return {
                "instruction": f"Write sentence {line} about a {noun} and {name}.",
                "input": "",
                "output": f"{name} {rng.choice(VERBS)} the {adjective} {noun}.",
            }
        case 2:
            return {
                "instruction": f"Line {line}: which of the two numbers is larger?",
                "input": f"{first} and {second}",
                "output": f"The larger number is {max(first, second)}.",
            }
        case _:
            return {
                "instruction": f"Tell story {line} with {name}.",
                "input": "",
                "output": story(rng),
            }
