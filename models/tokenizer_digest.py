"""Compute one digest for a tokenizer, from its files alone: no tensor library is loaded."""

import hashlib
import json
from pathlib import Path
from typing import Any

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_digest(folder: Path) -> str:
    """Return the sha256 over the canonical vocabulary, merges, special tokens and chat template of a folder's tokenizer.

    The digest is equal for a tokenizer that was only loaded and saved again: order of keys, white space and the two
    ways to write a merge make no difference, nor do settings that change no token (padding side, maximum length).

    Raises:
        ValueError: the folder has no `tokenizer.json`.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; import the model, which writes one")
    tokenizer = _read_json(path)
    settings = _read_json(folder / "tokenizer_config.json")
    added = added_tokens(tokenizer)
    canonical = {
        "vocabulary": _vocabulary(tokenizer["model"]) | {content: added[content]["id"] for content in added},
        "scores": _scores(tokenizer["model"]),
        "merges": [_merge(merge) for merge in tokenizer["model"].get("merges", [])],
        "special": sorted(content for content, token in added.items() if token["special"]),
        "roles": {
            role: content_of(settings[role]) for role in SPECIAL_ROLES if settings.get(role) is not None
        },
        "chat_template": chat_template_of(folder, settings),
    }
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: i for i, (piece, _) in enumerate(vocabulary)}  # Unigram: [[piece, score], …]


def _scores(model: dict[str, Any]) -> list[float]:
    """Return Unigram's log-probabilities of pieces, which decide how text is split, like merges in BPE."""
    vocabulary = model["vocab"]
    return [] if isinstance(vocabulary, dict) else [score for _, score in vocabulary]


def _merge(merge: str | list[str]) -> list[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def added_tokens(tokenizer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return text → entry, for the tokens that ``tokenizer.json`` holds beside its vocabulary."""
    return {token["content"]: token for token in tokenizer.get("added_tokens") or ()}


def content_of(token: str | dict[str, Any]) -> str:
    """Return the text of a token named in ``tokenizer_config.json``."""
    return token if isinstance(token, str) else token["content"]


def chat_template_of(folder: Path, settings: dict[str, Any]) -> Any:
    """Return a folder's chat template: from its own file, else from ``tokenizer_config.json``; None: it has none."""
    path = folder / "chat_template.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
