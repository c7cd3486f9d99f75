"""Encode responses again for a reward model with another tokenizer or chat template than the policy's.

The reward model reads text, as in its own training: the turns of the prompt in its own chat template, and the policy's words
in its own tokens. A response that ended gets the token that closes a response of the reward model; a truncated one gets
none. The score is read at the last token.
"""

import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jinja2

from vantage.models.prompts import encode_prompts
from vantage.models.rendered_responses import ResponseRenderer, UnrenderedRow, control_tokens, spelled
from vantage.models.sequences import Sequences, collate
from vantage.schemas.conversations import AS_SAMPLED, Message, Prompt
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.encoded_rows import encode_rows
from vantage.tasks.data.examples import Codec, codec_of
from vantage.tasks.data.openings import opening_of
from vantage.tasks.data.rows import row_batches
from vantage.tasks.data.splits import SPLITS, TEST
from vantage.tasks.rewards.term_scores import Responses, Source

log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1024


class UnreadablePrompt(ValueError):
    """A reward model cannot read a prompt that the policy reads."""


@dataclass(frozen=True)
class Reencoder:
    """Turns responses of policies into what one reward model reads."""

    codec: Codec
    """Codec of the reward model."""
    openings: tuple[str, ...]
    """White space that the chat templates of the policies put before a response. It is no part of the response's words."""
    window: int | None
    """Tokens that the reward model reads at most; None: it has no such limit."""
    name: str
    """The term's path and model, for messages."""

    def sequences(self, given: Responses) -> Sequences:
        """Return prompts and responses in the reward model's tokens, on the device of the policy's.

        If both together are longer than the window, the end of the response is left out, with the token that closes it.

        Raises:
            UnreadablePrompt: the reward model's chat template refuses a prompt, or there is no room for a response.
        """
        distinct = {_identity(turns): turns for turns in given.turns}
        encoded = dict(zip(distinct, self._prompts(list(distinct.values())), strict=True))
        prompts = [encoded[_identity(turns)] for turns in given.turns]
        responses = self._responses(given.turns, given.responses, given.ended.tolist())
        if self.window is not None:
            room = [self.window - len(prompt) for prompt in prompts]
            cut = sum(len(ids) > most for ids, most in zip(responses, room, strict=True))
            if cut:
                log.warning(
                    "%s: %s of %s responses are longer than the %s tokens that the reward model reads with their prompts; it "
                    "scores their beginnings",
                    *(self.name, cut, len(responses), self.window),
                )
            responses = [ids[:most] for ids, most in zip(responses, room, strict=True)]
        joined = collate(prompts, responses, pad_token_id=self.codec.pad_token_id)
        return joined.to(given.sequences.input_ids.device)

    def check_prompts(self, job: StageJob, policies: Sequence[str]) -> None:
        """Try the prompts that the policies will be given, so that none of them stops the stage later.

        Raises:
            UnreadablePrompt: see ``sequences``.
        """
        roles = ("prompts", "watch_prompts") if "prompts" in job.inputs else ("demonstrations",)
        splits = (TEST,) if isinstance(job.work, PolicyEvaluation) else SPLITS
        reading = [codec_of(job, policy) for policy in policies]
        for folder in (job.inputs[role] for role in roles if role in job.inputs):
            for split in splits:
                for rows in row_batches(folder, split, _ROWS_AT_ONCE):
                    for codec in reading:
                        found = encode_rows(encode_rows(rows, (), codec).rows, (), self.codec)
                        if found.refused:
                            raise self._refused(found.refused[0])
                        self._refuse_long(found.all_prompts)

    def _prompts(self, turns: Sequence[Prompt]) -> list[list[int]]:
        try:
            rows = encode_prompts(self.codec.tokenizer, turns, chat=self.codec.chat)
        except (ValueError, jinja2.TemplateError) as error:
            raise self._refused(str(error)) from error
        self._refuse_long(rows)
        return rows

    def _responses(
        self, turns: Sequence[Prompt], texts: Sequence[str], ended: Sequence[bool]
    ) -> list[list[int]]:
        words = [self._without_opening(text) for text in texts]
        found = self._renderer.encode(turns, [self._message(text) for text in words])
        rows = [
            self._as_sampled(prompt, text) if isinstance(ids, UnrenderedRow) else ids
            for prompt, text, ids in zip(turns, words, found, strict=True)
        ]
        # A response without any token has nothing to read a score at: then the closing token stays
        return [
            ids if has_ended or len(ids) == 1 else ids[:-1]
            for ids, has_ended in zip(rows, ended, strict=True)
        ]

    def _message(self, text: str) -> Message:
        """Return the response as a turn. Tokens of the reward model's turns that the policy spelled out stay text."""
        mark = AS_SAMPLED if spelled(self._control, [text]) else None
        return Message(role="assistant", content=text, extra=mark)

    def _as_sampled(self, prompt: Prompt, text: str) -> list[int]:
        """Return the ids of a response that the template would not write in this form: the ids of its text."""
        [ids] = self._renderer.encode([prompt], [Message(role="assistant", content=text, extra=AS_SAMPLED)])
        assert not isinstance(ids, UnrenderedRow), "no template is asked"
        return ids

    def _without_opening(self, text: str) -> str:
        opening = next((each for each in self.openings if text.startswith(each)), "")
        return text.removeprefix(opening)

    def _refuse_long(self, prompts: Iterable[Sequence[int]]) -> None:
        longest = max(map(len, prompts), default=0)
        if self.window is not None and longest >= self.window:
            raise UnreadablePrompt(
                f"{self.name} reads {self.window} tokens, and a prompt has {longest} of its tokens; lower "
                "generation.max_prompt_tokens, or name a reward model that reads more"
            )

    def _refused(self, reason: str) -> UnreadablePrompt:
        return UnreadablePrompt(
            f"{self.name} cannot read a prompt of the policy: {reason}; take such rows out of the prompts, or name another "
            "reward model"
        )

    @cached_property
    def _renderer(self) -> ResponseRenderer:
        return ResponseRenderer(self.codec.tokenizer, chat=self.codec.chat)

    @cached_property
    def _control(self) -> tuple[str, ...]:
        return control_tokens(self.codec.tokenizer, chat=self.codec.chat)


def _identity(prompt: Prompt) -> Hashable:
    """Return a value that two prompts have in common exactly if they are equal; conversations may be shown as the same text."""
    if isinstance(prompt, str):
        return prompt
    return tuple((each["role"], each["content"], each["extra"]) for each in prompt)


def reencoder_of(source: Source, *, model: str, window: int | None) -> Reencoder:
    """Return the encoder for the reward model in the source's role, which has tried the stage's prompts.

    Args:
        model: the model's name in the recipe.

    Raises:
        UnreadablePrompt: the reward model cannot read one of the prompts.
    """
    job = source.job
    never_samples = job.generation.model_copy(update={"stop": ()})
    openings = {opening_of(codec_of(job, policy)) for policy in source.tokenizers_of}
    encoder = Reencoder(
        codec=codec_of(job.model_copy(update={"generation": never_samples}), source.role),
        openings=tuple(sorted(openings - {""}, key=len, reverse=True)),
        window=window,
        name=f"{source.path}.model={model!r}",
    )
    encoder.check_prompts(job, source.tokenizers_of)
    return encoder
