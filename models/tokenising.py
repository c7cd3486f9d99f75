"""Tokenise pieces of text, without what a tokenizer adds at their ends."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

_SHOWN = 80


class UnencodableText(ValueError):
    """A tokenizer fails on a text: it is damaged, or has no token for unknown text."""

    def __init__(self, text: str, error: BaseException) -> None:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        super().__init__(
            f"the model's tokenizer fails on the text {text[:_SHOWN]!r} ({reason}); fetch its tokenizer.json again, use another model, "
            "or leave such rows out"
        )


ANCHORS = ("\n", ":", "0", "。")
"""Text put before a response while it is tokenised, for tokenizers that put a space before whatever comes first."""


def with_one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the ids, with at most one BOS at the beginning."""
    bos = tokenizer.bos_token_id
    while len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return ids


def without_trailing_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the ids without the EOS that some tokenizers put after every text, since a response follows a prompt."""
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and _appends_eos(tokenizer):
        return ids[:-1]
    return ids


def _appends_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenise(tokenizer, ["a"], add_special_tokens=True)[0][-1] == tokenizer.eos_token_id)


def continuations(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, as_text: bool = True
) -> list[list[int]]:
    """Return ids of texts that follow other text, so without the space that some tokenizers put at the beginning.

    Args:
        as_text: whether special tokens that are spelled out stay text.
    """
    if not texts:
        return []
    if not prefixes_space(tokenizer):
        return tokenise(tokenizer, list(texts), add_special_tokens=False, as_text=as_text)
    rows: dict[int, list[int]] = {}
    for anchor in ANCHORS:
        waiting = [i for i in range(len(texts)) if i not in rows]
        if not waiting:
            break
        before = tokenise(tokenizer, [anchor], add_special_tokens=False)[0]
        joined = tokenise(
            tokenizer, [anchor + texts[i] for i in waiting], add_special_tokens=False, as_text=as_text
        )
        # if the first characters of a text merge with the anchor, the next anchor is tried
        rows |= {
            i: ids[len(before) :]
            for i, ids in zip(waiting, joined, strict=True)
            if ids[: len(before)] == before
        }
    alone = [i for i in range(len(texts)) if i not in rows]
    if alone:
        ids = tokenise(tokenizer, [texts[i] for i in alone], add_special_tokens=False, as_text=as_text)
        rows |= dict(zip(alone, ids, strict=True))
    return [rows[i] for i in range(len(texts))]


def mixed_continuations(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], are_markup: Sequence[bool]
) -> list[list[int]]:
    """Return ids of texts that follow other text; special tokens are tokens in markup, and text elsewhere."""
    rows = {
        markup: iter(
            continuations(
                tokenizer,
                [text for text, is_markup in zip(texts, are_markup, strict=True) if is_markup == markup],
                as_text=not markup,
            )
        )
        for markup in (False, True)
    }
    return [next(rows[is_markup]) for is_markup in are_markup]


def prefixes_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer puts a space before a text, so that ids of ":" and "a" together are those of ": a"."""
    colon, letter = tokenise(tokenizer, [":", "a"], add_special_tokens=False)
    return to_text(tokenizer, [*colon, *letter]) != to_text(tokenizer, colon) + to_text(tokenizer, letter)


def tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool, as_text: bool = False
) -> list[list[int]]:
    """Return ids of texts, with or without the special tokens that the tokenizer adds to whole texts.

    Raises:
        UnencodableText: the tokenizer fails on a text.
    """

    def encode(some: list[str]) -> list[list[int]]:
        encoded = tokenizer(
            some,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            split_special_tokens=as_text,
        )
        return list(encoded["input_ids"])

    try:
        return encode(texts)
    except BaseException as error:
        if not _is_of_tokenizer(error):
            raise
        raise UnencodableText(_first_that_fails(encode, texts), error) from error


def _first_that_fails(encode: Callable[[list[str]], object], texts: list[str]) -> str:
    for text in texts:
        try:
            encode([text])
        except BaseException as error:
            if not _is_of_tokenizer(error):
                raise
            return text
    return ""


def _is_of_tokenizer(error: BaseException) -> bool:
    """Return whether an error is one that the library raises: a bare Exception, among others, or a panic of Rust."""
    is_panic = type(error).__name__ == "PanicException"
    return is_panic or (isinstance(error, Exception) and not isinstance(error, MemoryError | OSError))


def to_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of ids, without special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def response_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function from a response's ids to its text, whose first space is kept."""
    if not prefixes_space(tokenizer):
        return lambda ids: to_text(tokenizer, ids)
    before = tokenise(tokenizer, [ANCHORS[0]], add_special_tokens=False)[0]
    anchor = to_text(tokenizer, before)
    return lambda ids: to_text(tokenizer, [*before, *ids]).removeprefix(anchor)
