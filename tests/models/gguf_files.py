"""Write small GGUF files of a Llama with random weights, and damage their headers."""

import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import gguf
import numpy as np

from tests.models.byte_tokenizer import CHATML, build_byte_tokenizer

WIDTH, INNER, LAYERS, HEADS = 32, 64, 2, 4
NUMBERS: Mapping[str, int] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": HEADS,
    "llama.rope.dimension_count": WIDTH // HEADS,
}
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ hello", "Ċ Ċ", "Ġ Ġ")


@cache
def tokens() -> list[str]:
    """Return the vocabulary, in the order of its ids."""
    tokenizer = build_byte_tokenizer()
    return [str(tokenizer.convert_ids_to_tokens(number)) for number in range(len(tokenizer))]


def shapes() -> dict[str, tuple[int, ...]]:
    """Return name → shape, as numpy has it, of every tensor."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens()), WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        for name, shape in (
            *((f"attn_{part}", (WIDTH, WIDTH)) for part in ("q", "k", "v", "output")),
            *(("attn_norm", (WIDTH,)), ("ffn_norm", (WIDTH,))),
            *(("ffn_gate", (INNER, WIDTH)), ("ffn_up", (INNER, WIDTH)), ("ffn_down", (WIDTH, INNER))),
        ):
            found[f"blk.{layer}.{name}.weight"] = shape
    return found


def write_gguf(path: Path, *, without: str = "", in_its_place: str = "", **changed: int) -> Path:
    """Write a model that transformers reads, and return its path.

    Args:
        without: name of a tensor that is left out.
        in_its_place: another name that it gets; empty: it is not there at all.
        changed: other values of ``NUMBERS``, by the last part of their names.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, number in NUMBERS.items():
        writer.add_uint32(key, changed.get(key.rpartition(".")[2], number))
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens())
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens()) - 3))
    writer.add_token_merges(list(MERGES))
    for role, number in (("bos", 1), ("eos", 2), ("padding", 0), ("unknown", 0)):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_chat_template(CHATML)
    chance = np.random.default_rng(1)
    for name, shape in shapes().items():
        named = in_its_place if name == without else name
        if named:
            writer.add_tensor(named, chance.normal(0.0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: bytes, *, length: int | None = None) -> bytes:
    """Return a text as a GGUF file has it; ``length`` in place of its own."""
    return struct.pack("<Q", len(value) if length is None else length) + value


def listed(kind: int, count: int, content: bytes = b"") -> bytes:
    """Return a list as the value of an entry."""
    return struct.pack("<IIQ", 9, kind, count) + content


def tensor(name: bytes, shape: tuple[int, ...], *, kind: int = 0, begin: int = 0) -> bytes:
    """Return the description of a tensor, of type F32 by default."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, begin)


def header(
    *, entries: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: int = 0, version: int = 3,
    num_entries: int | None = None, num_tensors: int | None = None,
) -> bytes:  # fmt: skip
    """Return a file with these entries and tensors, and so many zeros after its padding."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    begun = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*entries, *tensors))
    return begun + b"\0" * (-len(begun) % 32) + b"\0" * data


DAMAGED: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "4 bytes would begin at byte 0 of 0"),
    "another file": (lambda: b"PK\x03\x04" * 9, "does not begin with GGUF"),
    "a version to come": (lambda: header(version=9), "its version is 9"),
    "a list without end": (lambda: header(entries=(text(b"a") + listed(0, 2**60),)), "1152921504606846976 numbers"),
    "texts without end": (lambda: header(entries=(text(b"a") + listed(8, 2**60),)), "1152921504606846976 texts of 'a'"),
    "a list of lists": (lambda: header(entries=(text(b"a") + listed(9, 2, b"\0" * 64),)), "list of type 9"),
    "a hundred thousand lists in each other": (
        lambda: header(entries=(text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000,)), "list of type 9"),
    "entries without end": (lambda: header(num_entries=2**62), "entries would begin"),
    "tensors without end": (lambda: header(num_tensors=2**62), "tensors would begin"),
    "a long name": (lambda: header(entries=(text(b"a", length=2**40),)), "a name at byte 32 would have"),
    "a name that is no text": (lambda: header(entries=(text(b"\xff") + struct.pack("<II", 4, 1),)), "can't decode byte 0xff"),
    "a text beyond the end": (lambda: header(entries=(text(b"a") + struct.pack("<I", 8) + text(b"", length=2**63),)), "bytes would begin"),
    "an entry of no known type": (lambda: header(entries=(text(b"a") + struct.pack("<IQ", 77, 1),)), "'a' is of type 77"),
    "an entry twice": (lambda: header(entries=(text(b"a") + struct.pack("<II", 4, 1),) * 2), "'a' is there twice"),
    "an odd alignment": (
        lambda: header(entries=(text(b"general.alignment") + struct.pack("<II", 4, 33),), tensors=(tensor(b"t", (8,)),), data=64),
        "general.alignment=33 is no power of 2"),
    "a tensor twice": (lambda: header(tensors=(tensor(b"t", (8,)), tensor(b"t", (8,), begin=32)), data=64), "'t' is there twice"),
    "tensors over each other": (lambda: header(tensors=(tensor(b"t", (16,)), tensor(b"u", (8,), begin=32)), data=96), "'u' lies over"),
    "a tensor beyond the end": (lambda: header(tensors=(tensor(b"t", (8,), begin=64),), data=64), "'t' ends at byte 96 of 64"),
    "a tensor beyond all memory": (lambda: header(tensors=(tensor(b"t", (2**40, 2**20)),), data=64), "'t' ends at byte"),
    "a tensor that begins anywhere": (lambda: header(tensors=(tensor(b"t", (2,), begin=5),), data=64), "no multiple of 32"),
    "a tensor without a size": (lambda: header(tensors=(tensor(b"t", (8, 0)),), data=64), "does not consist of blocks"),
    "half a block": (lambda: header(tensors=(tensor(b"t", (33,), kind=8),), data=64), "does not consist of blocks of 32"),
    "a type to come": (lambda: header(tensors=(tensor(b"t", (8,), kind=999),), data=64), "is of type 999"),
    "a hundred dimensions": (lambda: header(tensors=(tensor(b"t", (1,) * 100),), data=64), "has 100 dimensions"),
}  # fmt: skip
"""What it is → the file, and a part of what is said of it."""
