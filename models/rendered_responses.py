"""Render responses as the chat template writes them after their prompts: a model must learn the text of later serving.

The template renders the prompt up to the beginning of the response, and the whole conversation. The rest of the second text
after the first is the response. It contains reasoning and calls of tools in the template's own form, without the text that
the prompt has opened already. So the ids of prompt and response are those of the whole conversation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jinja2
from transformers import PreTrainedTokenizerBase

from vantage.models.chat_template import around_words, render_turns, uses_chat
from vantage.models.response_parts import altered
from vantage.models.tokenising import mixed_continuations, tokenise
from vantage.models.turn_end import end_token_id
from vantage.schemas.conversations import AS_SAMPLED, Message, Prompt, extras_of

_END_OF_THINKING = re.compile(r"</[\w:]+>|\[/\w+\]|<\|END_\w+\|>")
"""Tags that close a thought: `</think>`, `</seed:think>`, `[/THINK]`, `<|END_THINKING|>`."""
_BEGIN_OF_THINKING = re.compile(r"(?<!\s)\s*(<[\w:]+>|\[\w+\]|<\|START_\w+\|>)\s*")
_SHOWN = 300


class UnrenderedRow(ValueError):
    """A row that the chat template refuses, or renders differently from the text in generation."""


@dataclass(frozen=True)
class Words:
    """Text that the model has to write after a prompt."""

    text: str
    is_markup: bool
    """Whether special tokens in the text are encoded as tokens: the template wrote a part of it, or reads such a token
    in it."""
    is_closed: bool = False
    """Whether the text contains the token that closes the turn."""
    is_sampled: bool = False
    """True for decoded text of a model, without special tokens and with the white space before them."""


class ResponseRenderer:
    """Renders responses with one tokenizer's chat template; without a template it leaves their text unchanged."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool | None) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._is_chat = uses_chat(tokenizer, chat)

    def encode(
        self, prompts: Sequence[Prompt], responses: Sequence[Message]
    ) -> list[list[int] | UnrenderedRow]:
        """Return the ids of each response after its prompt, with its closing token; for a row that cannot be
        rendered, the problem."""
        found = [self._try(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        known = [each for each in found if isinstance(each, Words)]
        ids = iter(
            mixed_continuations(
                self._tokenizer, [each.text for each in known], [each.is_markup for each in known]
            )
        )
        return [each if isinstance(each, UnrenderedRow) else self._ended(next(ids), each) for each in found]

    def words(self, prompt: Prompt, response: Message) -> Words:
        """Return the text that the model has to write after ``prompt``.

        Raises:
            UnrenderedRow: the template refuses the conversation, omits a part of the response, or renders the prompt in
                it differently.
        """
        if not self._is_chat:
            if response["extra"] and set(extras_of(response)) & {"tool_calls", "reasoning_content"}:
                raise UnrenderedRow(
                    "a response with tool_calls or reasoning_content, and the model has no chat template that writes them"
                )
            return Words(response["content"], is_markup=False)
        if response["extra"] == AS_SAMPLED:
            return Words(self._around[0] + response["content"], is_markup=False, is_sampled=True)
        begin, whole = self._rendered(prompt, None), self._rendered(prompt, response)
        if whole.startswith(begin):
            unread = self._unread(prompt, response, whole) if response["extra"] else None
            if unread is not None:
                raise _differs(
                    f"the chat template leaves out {unread[:80]!r}", begin + response["content"], whole
                )
            return self._after(whole[len(begin) :], whole, begin, response)
        opened = self._opened(prompt, begin)
        content = response["content"]
        if opened and not response["extra"] and content.startswith(opened.strip()):
            rest = (
                content.removeprefix(opened) if content.startswith(opened) else content[len(opened.strip()) :]
            )
            return Words(rest, is_markup=self._has_tokens(rest))
        if opened and not response["extra"] and _goes_on(opened, content):
            return Words(content, is_markup=self._has_tokens(content))
        raise _differs("the chat template does not begin this response as its prompt ends", begin, whole)

    def writes_as_it_stands(self, prompt: Prompt, text: str) -> bool:
        """Return whether the template renders a response of this text as exactly this text."""
        found = self._try(prompt, Message(role="assistant", content=text, extra=None))
        if isinstance(found, UnrenderedRow):
            return False
        return found.text == (self._around[0] if self._is_chat else "") + text

    def _after(self, tail: str, whole: str, begin: str, response: Message) -> Words:
        """Return the response that the template wrote after ``begin``."""
        opening, closing = self._around
        content = response["content"]
        is_markup = self._has_tokens(content) or self._writes_tokens(tail.removesuffix(closing), content)
        if tail == opening + content + closing and not response["extra"] and not is_markup:
            return Words(opening + content, is_markup=False)
        is_closed = bool(closing) and tail.endswith(closing)
        words = tail.removesuffix(closing) if is_closed else tail
        answers = [content[tag.end() :] for tag in _END_OF_THINKING.finditer(content)]
        if not response["extra"] and any(_squeezed(words) == _squeezed(answer) for answer in answers):
            # the template writes this turn as it writes past turns
            return Words(opening + content, is_markup=self._has_tokens(content))
        missing = self._missing(response, begin, words)
        if missing is not None:
            raise _differs(f"the chat template leaves out {missing[:80]!r}", begin + content, whole)
        if not self._closes_turns:
            return Words(words, is_markup=is_markup)
        if is_markup or response["extra"] or not is_closed:
            return Words(tail, is_markup=True, is_closed=True)
        return Words(words, is_markup=False)

    def _missing(self, response: Message, begin: str, words: str) -> str | None:
        """Return the first part of a response that is not in the words after ``begin``, apart from white space.

        The parts are the text and the reasoning. If the whole text is missing, its parts are each thought without its
        tags, and the answer: the template may write a thought in its own form.
        """
        content = response["content"]
        whole = [] if _is_written(content, begin, words) else self._thoughts_and_answer(content)
        parts = [*whole, str(extras_of(response).get("reasoning_content") or "")]
        return next((part for part in parts if not _is_written(part, begin, words)), None)

    def _thoughts_and_answer(self, content: str) -> list[str]:
        """Return the pieces of a text around the tags of thoughts.

        Only tags that the template names are tags of thoughts. Others belong to the text, as in HTML.
        """
        template = str(self._tokenizer.chat_template or "")
        tags = [tag for tag in dict.fromkeys(_END_OF_THINKING.findall(content)) if tag in template]
        if not tags:
            return [content]
        pieces = re.split("|".join(map(re.escape, tags)), content)
        return [_BEGIN_OF_THINKING.sub("", piece, count=1) for piece in pieces]

    def _unread(self, prompt: Prompt, response: Message, whole: str) -> str | None:
        """Return the first part of a response that the template does not write."""
        for part, other in altered(response):
            try:
                text = render_turns(self._tokenizer, prompt, other)
            except jinja2.TemplateError:
                continue  # the template refuses the altered value, so it reads the part
            if text == whole:
                return part
        return None

    def _ended(self, ids: list[int], words: Words) -> list[int] | UnrenderedRow:
        """Return the ids with the token that closes the turn as their last."""
        end = end_token_id(self._tokenizer, chat=self._chat)
        if not words.is_closed:
            decoded = {end} | self._special_ids  # decoding has left these out of a sampled text
            return [*ids, *(i for i in self._closing_ids if not words.is_sampled or i in decoded)]
        for ends in ({end}, self._special_ids):
            last = next((place for place in reversed(range(len(ids))) if ids[place] in ends), None)
            if last is not None and not str(self._tokenizer.decode(ids[last + 1 :])).strip():
                return ids[: last + 1]
        return UnrenderedRow(f"the chat template does not close the turn {words.text[-80:]!r}")

    def _has_tokens(self, text: str) -> bool:
        return any(token in text for token in self._in_words)

    def _writes_tokens(self, rendered: str, content: str) -> bool:
        """Return whether the template adds a special token to a response of this text."""
        return any(rendered.count(token) > content.count(token) for token in self._written)

    def _try(self, prompt: Prompt, response: Message) -> Words | UnrenderedRow:
        try:
            return self.words(prompt, response)
        except UnrenderedRow as error:
            return error

    def _rendered(self, prompt: Prompt, response: Message | None) -> str:
        try:
            return render_turns(self._tokenizer, prompt, response)
        except jinja2.TemplateError as error:
            raise UnrenderedRow(f"the model's chat template refuses it: {error}") from error

    def _opened(self, prompt: Prompt, begin: str) -> str:
        """Return the beginning of the response that the prompt has opened, such as ``<think>``, without the common
        beginning of turns."""
        words = Message(role="assistant", content="words", extra=None)
        before, found, _ = self._rendered(prompt, words).rpartition("words")
        return begin.removeprefix(before) if found and begin.startswith(before) else ""

    @cached_property
    def _around(self) -> tuple[str, str]:
        return around_words(self._tokenizer)

    @cached_property
    def _in_words(self) -> tuple[str, ...]:
        return tokens_in_words(self._tokenizer)

    @cached_property
    def _written(self) -> tuple[str, ...]:
        return tokens_that_are_written(self._tokenizer)

    @cached_property
    def _closes_turns(self) -> bool:
        """Whether the template closes the assistant's turns with a token; else EOS is appended."""
        ids = tokenise(self._tokenizer, [self._around[1]], add_special_tokens=False)[0]
        return end_token_id(self._tokenizer, chat=self._chat) in ids

    @cached_property
    def _closing_ids(self) -> list[int]:
        """The ids after the assistant's words, up to the token that closes the turn; some templates write other tokens
        before it."""
        end = end_token_id(self._tokenizer, chat=self._chat)
        if not self._is_chat or not self._closes_turns:
            return [end]
        ids = tokenise(self._tokenizer, [self._around[1]], add_special_tokens=False)[0]
        return ids[: ids.index(end) + 1]

    @cached_property
    def _special_ids(self) -> set[int]:
        return {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}


def control_tokens(tokenizer: PreTrainedTokenizerBase, *, chat: bool | None) -> tuple[str, ...]:
    """Return the special tokens that mark the ends of texts and turns; a text with one of them was rendered before.

    These are BOS, EOS, and with a chat template the special tokens that it writes around turns. Other special tokens
    (such as those for code) may belong to a text, and stay text.
    """
    named = [tokenizer.bos_token, tokenizer.eos_token]
    if uses_chat(tokenizer, chat):
        turn = render_turns(tokenizer, "?", "words") + render_turns(tokenizer, "?")
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        named += [token for token in special if token in turn]
    return tuple(dict.fromkeys(token for token in named if token and len(token.strip()) > 2))


def tokens_in_words(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the special tokens that are encoded as tokens in the assistant's words: the chat template names them, but
    does not write them around turns. Examples are `[THINK]` and `[/THINK]`."""
    template = str(tokenizer.chat_template or "")
    around = set(control_tokens(tokenizer, chat=True)) if template else set()
    return tuple(token for token in special_tokens(tokenizer) if token in template and token not in around)


def tokens_that_are_written(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the special tokens that the chat template can write: in its own text, or in a variable that it names.

    A tokenizer may have a thousand special tokens, which would all be searched in every row.
    """
    template = str(tokenizer.chat_template or "")
    values = [value for name, value in tokenizer.special_tokens_map.items() if name in template]
    variables = {str(each) for value in values for each in (value if isinstance(value, list) else [value])}
    return tuple(token for token in special_tokens(tokenizer) if token in template or token in variables)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return all special tokens of three characters or more; a shorter one may occur in any text."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(token for token in special if len(token.strip()) > 2)


def spelled(tokens: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return every occurrence of the tokens in the texts, in order."""
    if not tokens:
        return []
    pattern = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))
    return [found for text in texts for found in pattern.findall(text)]


def _is_written(part: str, begin: str, words: str) -> bool:
    """Return whether a part is in the words, apart from white space; its first characters may be the last of ``begin``."""
    text, before, after = _squeezed(part), _squeezed(begin[-_SHOWN:]), _squeezed(words)
    overlaps = range(min(len(text), len(before)) + 1)
    return any(before.endswith(text[:n]) and text[n:] in after for n in overlaps)


def _goes_on(opened: str, content: str) -> bool:
    """Return whether a response continues the tag that its prompt has opened: it closes the tag without opening it."""
    tag = _BEGIN_OF_THINKING.fullmatch(opened)
    if tag is None:
        return False
    opening = opened.strip()
    closing = opening.replace("START_", "END_") if opening.startswith("<|") else f"{opening[0]}/{opening[1:]}"
    before, found, _ = content.partition(closing)
    return bool(found) and opening not in before


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _differs(reason: str, read: str, whole: str) -> UnrenderedRow:
    """Return the problem, with the texts of generation and of the template from their first difference on."""
    at = next((i for i, (one, other) in enumerate(zip(read, whole, strict=False)) if one != other), 0)
    start = max(0, at - 40)
    return UnrenderedRow(
        f"{reason}: the prompt and the response are {read[start : start + _SHOWN]!r}, and the template writes "
        f"{whole[start : start + _SHOWN]!r}"
    )
