"""Stop strings: texts that end a sampled response.

A response ends with the first token after which its text contains a stop string: these may span tokens, begin or end
inside a token, and be completed by the last byte of a character.
"""

from collections.abc import Collection, Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

from vantage.models.tokenising import response_decoder

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Finds the token that completes a stop string.

    A response's text is that of all its ids. Decoding all of them after each token would take time that grows with the
    square of the length. So a token is first searched alone, then with as many tokens before it as the longest stop
    string may span; a string that is found there is then searched in the whole text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Collection[str]) -> None:
        """Prepare to look for ``strings``, each at least one character."""
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings))
        # some tokenizers write a space after a token only when the next token follows
        self._ends = None if any(s[-1].isspace() for s in self._strings) else {s[-1] for s in self._strings}
        self._decode = response_decoder(tokenizer)
        self._whole_text = cache(self._whole_text_of)

    def complete(self, ids: Sequence[int]) -> bool:
        """Return whether the text of these ids has a stop string, given that the ids before the last had none."""
        alone = self._whole_text(ids[-1])
        if alone is not None and self._ends is not None and self._ends.isdisjoint(alone):
            return False
        return self._is_in(self._last(ids)) and self._is_in(ids)

    def _is_in(self, ids: Sequence[int]) -> bool:
        text = self._decode(ids)
        return any(string in text for string in self._strings)

    def _last(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the last ids, from a token of whole characters on, which together have more characters than the
        longest stop string."""
        missing = self._longest
        for begin in range(len(ids) - 1, 0, -1):
            if self._whole_text(ids[begin]) is not None:
                if not missing:
                    return ids[begin:]
                missing -= 1
        return ids

    def _whole_text_of(self, token: int) -> str | None:
        """Return the text of a token; None for a token without text, or with a part of a character."""
        text = self._decode([token])
        return None if not text or _NO_CHARACTER in text else text


def before_stop(text: str, strings: Collection[str]) -> str:
    """Return the text up to the begin of its first stop string."""
    found = [place for place in map(text.find, strings) if place >= 0]
    return text[: min(found)] if found else text


def special_stops(tokenizer: PreTrainedTokenizerBase, strings: Collection[str]) -> list[int]:
    """Return the ids of the special tokens among the stop strings; decoded text does not show them.

    Raises:
        ValueError: a stop string has a special token and other text.
    """
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for string in strings:
        inside = next((token for token in special if token in string and token != string), None)
        if inside is not None:
            raise ValueError(
                f"generation.stop has {string!r}, and {inside!r} is a special token of this tokenizer, which is not in a "
                f"response's text; give {inside!r} alone"
            )
    return [special[string] for string in strings if string in special]
