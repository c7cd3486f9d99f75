"""Find from a tokenizer's files whether its padding token only fills the ends of rows.

transformers builds a model's embeddings with ``padding_idx=config.pad_token_id``, and torch gives that row no gradient.
That is right for a token that is only padding. If the padding token is EOS, closes a turn, or is a word, its row would
stay unchanged while all others learn.
"""

from pathlib import Path

from torch import nn

from vantage.models.folder_check import read_json_object
from vantage.models.tokenizer_digest import SPECIAL_ROLES, added_tokens, chat_template_of, content_of


def train_every_row(model: nn.Module, folder: Path) -> None:
    """Let the embeddings of a model from this folder learn every row except that of a token that is only padding; in
    place."""
    alone = token_of_padding_alone(folder)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx != alone:
            module.padding_idx = None


def token_of_padding_alone(folder: Path) -> int | None:
    """Return the id of the tokenizer's padding token if it never occurs in text; None: there is no such token.

    It is a special token, has no other role (EOS, unknown token …), and its text is not in the chat template.
    """
    if not all((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    settings = read_json_object(folder / "tokenizer_config.json")
    roles = {role: content_of(settings[role]) for role in SPECIAL_ROLES if settings.get(role) is not None}
    pad = roles.pop("pad_token", None)
    if pad is None or pad in roles.values() or pad in str(chat_template_of(folder, settings) or ""):
        return None
    token = added_tokens(read_json_object(folder / "tokenizer.json")).get(pad)
    return int(token["id"]) if token is not None and token.get("special") else None
