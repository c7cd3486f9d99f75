"""Text to token ids and back: prompts, responses, and where a response ends."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

ANCHORS = ("\n", ":", "0", "。")
"""Text put before a response while it is tokenised, for tokenizers that put a space before whatever comes first."""


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, chat: bool | None
) -> list[list[int]]:
    """Ids of prompts, up to where the response begins; without a limit: compare lengths afterwards.

    With a chat template a prompt is the user's turn and the template's opening of the assistant's turn follows.
    Without one it is plain text, with BOS where the tokenizer puts it by its own rule. BOS never stands twice.

    Args:
        chat: use the chat template; None: where the tokenizer has one.

    Raises:
        ValueError: `chat` is True and there is no template, or a prompt comes out without any token.
    """
    if not prompts:
        return []
    if uses_chat(tokenizer, chat):
        texts = [render_turns(tokenizer, prompt) for prompt in prompts]
        rows = _tokenise(tokenizer, texts, add_special_tokens=False)
    else:
        rows = _tokenise(tokenizer, list(prompts), add_special_tokens=True)
        rows = [_without_trailing_eos(tokenizer, row) for row in rows]
    rows = [_with_one_bos(tokenizer, row) for row in rows]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise ValueError(
                f"the prompt {prompt!r} has no tokens; drop it, or use a tokenizer with a BOS token"
            )
    return rows


def encode_responses(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[str], *, max_tokens: int, chat: bool | None
) -> list[tuple[list[int], bool]]:
    """Ids of responses as the model would generate them after their prompts, and whether each ended.

    It ends with the token that closes a response (`end_token_id`) unless it is cut off at `max_tokens`. Special
    tokens that are spelled out in the text stay text.
    """
    end = end_token_id(tokenizer, chat=chat)
    opening = _turn(tokenizer)[0] if uses_chat(tokenizer, chat) else ""
    rows = [[*row, end] for row in _continuations(tokenizer, [opening + response for response in responses])]
    return [(row, True) if len(row) <= max_tokens else (row[:max_tokens], False) for row in rows]


def decode_all(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """Texts of responses' ids without special tokens; the inverse of `encode_responses` without a chat template.

    A space that begins a response is kept, also by tokenizers that drop a text's first space.
    """
    if not _prefixes_space(tokenizer):
        return [_to_text(tokenizer, ids) for ids in rows]
    before = _tokenise(tokenizer, [ANCHORS[0]], add_special_tokens=False)[0]
    anchor = _to_text(tokenizer, before)
    return [_to_text(tokenizer, [*before, *ids]).removeprefix(anchor) for ids in rows]


def uses_chat(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Whether prompts go through the chat template; None asks the tokenizer.

    Raises:
        ValueError: `chat` is True and the tokenizer has no chat template.
    """
    if chat and not tokenizer.chat_template:
        raise ValueError("model.chat=true, but the tokenizer has no chat template; set model.chat: false")
    return bool(tokenizer.chat_template) if chat is None else chat


def end_token_id(tokenizer: PreTrainedTokenizerBase, *, chat: bool | None) -> int:
    """The token that closes a response.

    In a chat it is the special token that the template puts after the assistant's words (`<end_of_turn>` in Gemma,
    whose EOS is another token), otherwise EOS.
    """
    if not uses_chat(tokenizer, chat):
        return int(tokenizer.eos_token_id)
    closing = _tokenise(tokenizer, [_turn(tokenizer)[1]], add_special_tokens=False)[0]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((i for i in closing if i in special), int(tokenizer.eos_token_id))


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, *, chat: bool | None) -> tuple[int, ...]:
    """The tokens at which sampling stops: the one that closes a response, and EOS."""
    return tuple(dict.fromkeys((end_token_id(tokenizer, chat=chat), int(tokenizer.eos_token_id))))


def _turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template puts around the assistant's words: white space before them, and all that follows."""
    prompt, words = "?", "words"
    opening, _, closing = render_turns(tokenizer, prompt, words).rpartition(words)
    space = opening.removeprefix(render_turns(tokenizer, prompt))
    return space if space.isspace() else "", closing


def render_turns(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str | None = None) -> str:
    """The chat template's text of a user's turn, and of the assistant's where there is one, else up to its opening."""
    turns = [{"role": "user", "content": prompt}]
    if response is not None:
        turns.append({"role": "assistant", "content": response})
    text = tokenizer.apply_chat_template(
        turns,
        tokenize=False,
        add_generation_prompt=response is None,
        date_string="26 Jul 2024",  # some templates write today's date, and tomorrow's prompts would differ
    )
    return str(text)


def _with_one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    while len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return ids


def _without_trailing_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Some tokenizers close whatever they encode, but a prompt goes on."""
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and _appends_eos(tokenizer):
        return ids[:-1]
    return ids


def _appends_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(_tokenise(tokenizer, ["a"], add_special_tokens=True)[0][-1] == tokenizer.eos_token_id)


def _continuations(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts that follow other text, so without the space that some tokenizers put at the beginning."""
    if not texts:
        return []
    if not _prefixes_space(tokenizer):
        return _tokenise(tokenizer, list(texts), add_special_tokens=False, as_text=True)
    rows: dict[int, list[int]] = {}
    for anchor in ANCHORS:
        waiting = [i for i in range(len(texts)) if i not in rows]
        if not waiting:
            break
        before = _tokenise(tokenizer, [anchor], add_special_tokens=False)[0]
        joined = _tokenise(
            tokenizer, [anchor + texts[i] for i in waiting], add_special_tokens=False, as_text=True
        )
        # where the text begins with characters that melt into the anchor, the next anchor is tried
        rows |= {
            i: ids[len(before) :]
            for i, ids in zip(waiting, joined, strict=True)
            if ids[: len(before)] == before
        }
    alone = [i for i in range(len(texts)) if i not in rows]
    if alone:
        ids = _tokenise(tokenizer, [texts[i] for i in alone], add_special_tokens=False, as_text=True)
        rows |= dict(zip(alone, ids, strict=True))
    return [rows[i] for i in range(len(texts))]


def _prefixes_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a space before a text, so that ids of ":" and "a" together are those of ": a"."""
    colon, letter = _tokenise(tokenizer, [":", "a"], add_special_tokens=False)
    return _to_text(tokenizer, [*colon, *letter]) != _to_text(tokenizer, colon) + _to_text(tokenizer, letter)


def _tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool, as_text: bool = False
) -> list[list[int]]:
    encoded = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        split_special_tokens=as_text,
    )
    return list(encoded["input_ids"])


def _to_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
