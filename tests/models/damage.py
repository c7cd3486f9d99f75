"""Damage a Hugging Face folder in listed ways, each with the message that it causes, or at random by a number."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]


def config(**changes: object) -> Damage:
    """Return a damage that changes fields of config.json."""
    return lambda folder: _edit(folder / "config.json", changes)


def text(file: str, content: str | bytes) -> Damage:
    """Return a damage that gives a file another content."""
    data = content if isinstance(content, bytes) else content.encode()

    def overwrite(folder: Path) -> None:
        (folder / file).write_bytes(data)

    return overwrite


def tokenizer(**changes: object) -> Damage:
    """Return a damage that changes parts of tokenizer.json."""
    return lambda folder: _edit(folder / "tokenizer.json", changes)


def index(weight_map: object) -> Damage:
    """Return a damage that makes the weights a shard, named by this index."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def header(change: Callable[[dict[str, Any]], None], *, length: int | None = None) -> Damage:
    """Return a damage that changes the header of the weights; ``length`` is written in place of the right length."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        [size] = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + size])
        change(entries)
        written = json.dumps(entries).encode()
        path.write_bytes(
            struct.pack("<Q", len(written) if length is None else length) + written + data[8 + size :]
        )

    return damage


def _edit(path: Path, changes: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _first(entries: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in entries.items() if name != "__metadata__")


EMBED = "model.embed_tokens.weight"
SHARD = "model-00001-of-00001.safetensors"

BY_HAND: dict[str, tuple[Damage, str]] = {
    "a hundred thousand layers": (config(num_hidden_layers=100_000), "config.json: num_hidden_layers=100000, but the weights have 4 layers"),
    "one layer more": (config(num_hidden_layers=5), "config.json: num_hidden_layers=5, but the weights have 4 layers"),
    "one layer less": (config(num_hidden_layers=3), "are in layers that config.json does not have, first ['model.layers.3."),
    "no layers": (config(num_hidden_layers=0), "config.json: num_hidden_layers=0 is no whole number from 1"),
    "layers in words": (config(num_hidden_layers="four"), 'config.json: num_hidden_layers="four" is no whole number'),
    "no heads": (config(num_attention_heads=0), "config.json: num_attention_heads=0 is no whole number from 1"),
    "fewer than no heads": (config(num_attention_heads=-4), "config.json: num_attention_heads=-4 is no whole number"),
    "heads that do not divide": (config(num_attention_heads=3, num_key_value_heads=3), "config.json"),
    "shared heads that do not divide": (config(num_key_value_heads=3), "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    "a truth for a number": (config(hidden_size=True), "config.json: hidden_size=true is no whole number"),
    "another width": (config(hidden_size=256), "config.json"),
    "a width beyond memory": (config(hidden_size=2**31 - 4), "config.json"),
    "a width beyond numbers": (config(hidden_size=10**30), "config.json: hidden_size=1000000000000000000000000000000 is no whole"),
    "a vocabulary beyond memory": (config(vocab_size=2**30), "config.json: vocab_size=1073741824, but model.embed_tokens.weight"),
    "a vocabulary without the last": (config(vocab_size=50), "tokenizer.json has ids up to"),
    "another activation": (config(hidden_act="none at all"), "config.json describes a model that cannot be built"),
    "another type of weights": (config(dtype="float7", torch_dtype="float7"), "config.json"),
    "a padding id beyond the rows": (config(pad_token_id=10**6), "config.json describes a model that cannot be built"),
    "an endless epsilon": (text("config.json", '{"model_type": "llama", "rms_norm_eps": Infinity}'), "Infinity is no number"),
    "a negative epsilon": (config(rms_norm_eps=-1e9), "logits that are no finite numbers"),
    "rotary nonsense": (config(rope_parameters={"rope_type": "nonsense", "rope_theta": "x"}), "config.json"),
    "a list": (text("config.json", "[]"), "config.json holds no JSON object"),
    "nothing": (text("config.json", ""), "config.json is no JSON"),
    "no text": (text("config.json", b"\xff\xfe\x00"), "config.json is no JSON"),
    "deep": (text("config.json", "[" * 200_000), "config.json is no JSON"),
    "a number of many digits": (text("config.json", '{"model_type": "llama", "a": ' + "9" * 5000 + "}"), "config.json is no JSON"),
    "a tokenizer of bytes": (text("tokenizer.json", b"\x00\xff garbage"), "tokenizer.json is no JSON"),
    "a tokenizer of nothing": (text("tokenizer.json", "{}"), "tokenizer.json has no vocabulary that could be read"),
    "a tokenizer of numbers": (text("tokenizer.json", "3"), "tokenizer.json holds no JSON object"),
    "a tokenizer of another kind": (tokenizer(model={"type": "None", "vocab": {"a": 1}}), "no tokenizer that transformers reads"),
    "a vocabulary of words": (tokenizer(model={"type": "BPE", "vocab": {"a": "b"}, "merges": []}), '"b" is no id'),
    "merges of nothing": (tokenizer(model={"type": "BPE", "vocab": {"a": 1}, "merges": [["x", "y"]]}), "no tokenizer that transformers reads"),
    "added tokens of numbers": (tokenizer(added_tokens=[1, 2]), "tokenizer.json has no vocabulary that could be read"),
    "an added token beyond the rows": (tokenizer(added_tokens=[{"id": 4000, "content": "x", "special": True, "single_word": False,
        "lstrip": False, "rstrip": False, "normalized": False}]), "tokenizer.json has ids up to 4000, config.json only vocab_size=100"),
    "a normaliser of nonsense": (tokenizer(normalizer={"type": "Nonsense"}), "no tokenizer that transformers reads"),
    "settings of nonsense": (text("tokenizer_config.json", '{"eos_token": 3, "tokenizer_class": 5}'), "tokenizer"),
    "an index of a list": (index([]), "lists no weights"),
    "an index of nothing": (index({}), "lists no weights"),
    "an index of numbers": (index({EMBED: 3}), "lists '3', which is no safetensors file beside it"),
    "an index that leads outside": (index({EMBED: "../model.safetensors"}), "which is no safetensors file beside it"),
    "an index to the root": (index({EMBED: "/etc/passwd"}), "which is no safetensors file beside it"),
    "an index with NUL": (index({EMBED: "a\0.safetensors"}), "which is no safetensors file beside it"),
    "an index with a long name": (index({EMBED: "a" * 300 + ".safetensors"}), "which is no safetensors file beside it"),
    "a missing shard": (index({EMBED: "model-00002-of-00002.safetensors"}), "which is no safetensors file beside it"),
    "a tensor of another name": (index({"nobody": SHARD}), "lacks 'nobody'"),
    "an index of one tensor": (index({EMBED: SHARD}), "config.json: num_hidden_layers=4, but the weights have 0 layers"),
    "weights of nothing": (text("model.safetensors", b""), "no valid safetensors file"),
    "weights of noise": (text("model.safetensors", bytes(range(256)) * 9), "no valid safetensors file"),
    "a header beyond the file": (header(lambda _: None, length=2**62), "its header would be"),
    "a header of a list": (text("model.safetensors", struct.pack("<Q", 2) + b"[]"), "no valid safetensors file"),
    "a shape that is negative": (header(lambda entries: _first(entries).update(shape=[-1])), "does not lie where its shape"),
    "a shape beyond the file": (header(lambda entries: _first(entries).update(shape=[2**40])), "does not lie where its shape"),
    "a shape of words": (header(lambda entries: _first(entries).update(shape=["a"])), "no whole number"),
    "a type of nobody": (header(lambda entries: _first(entries).update(dtype="F7")), "no valid safetensors file"),
    "metadata that is a list": (header(lambda entries: entries.update(__metadata__=[1])), "no valid safetensors file"),
    "metadata that is a text": (header(lambda entries: entries.update(__metadata__="pt")), "no valid safetensors file"),
    "metadata of numbers": (header(lambda entries: entries.update(__metadata__={"a": 1})), "no valid safetensors file"),
    "places that overlap": (header(lambda entries: _first(entries).update(data_offsets=[0, 4], shape=[1])), "no valid safetensors"),
}  # fmt: skip
"""What it is → how it is done, and a part of what is said of it."""

_VALUES: tuple[object, ...] = (
    None, True, 0, -1, 1, 2, 3, 7, 64, 99, 128, 10**5, 2**31, 2**63, 10**30, 0.0, 0.5, -1e30, 1e300, "", "x", "silu", [], [1], {},
    {"a": 1}, [[]], "<s>", "../x", "a\0b", "\ud800",
)  # fmt: skip


def at_random(folder: Path, number: int) -> str:
    """Damage a folder in one to three places, which depend on the number alone. Returns in words what was done."""
    chance = random.Random(number)
    return "; ".join(_once(folder, chance) for _ in range(chance.choice((1, 1, 1, 2, 3))))


def _once(folder: Path, chance: random.Random) -> str:
    path = chance.choice(sorted(folder.iterdir()))
    if path.suffix == ".json" and chance.random() < 0.7:
        return _value(path, chance)
    data = bytearray(path.read_bytes())
    # The header is where a change of one byte does more than change one weight.
    end = min(len(data), 4096) if path.suffix == ".safetensors" and chance.random() < 0.8 else len(data)
    how = chance.choice(("cut", "change", "insert", "nothing left", "removed"))
    place = chance.randrange(end) if end else 0
    if how == "removed":
        path.unlink()
        return f"{path.name}: removed"
    if how == "cut":
        del data[place:]
    elif how == "insert":
        data[place:place] = chance.randbytes(chance.choice((1, 8, 100)))
    elif how == "change" and data:
        data[place] = chance.randrange(256)
    elif how == "nothing left":
        data.clear()
    path.write_bytes(data)
    return f"{path.name}: {how} at {place}"


def _value(path: Path, chance: random.Random) -> str:
    """Return another value somewhere in a JSON file."""
    try:
        root = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except (ValueError, RecursionError):
        return f"{path.name}: was no JSON any more"
    node, trail = root, [path.name]
    while isinstance(node, dict | list) and node:
        key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
        trail.append(str(key))
        if not isinstance(node[key], dict | list) or not node[key] or chance.random() < 0.3:
            node[key] = chance.choice(_VALUES)
            break
        node = node[key]
    path.write_text(json.dumps(root))
    return ".".join(trail)
