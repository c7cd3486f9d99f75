"""Process rewards: the scores of a response's beginnings, each at the token that ends a step."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from vantage.models.heads import ScalarModel, values_and_final
from vantage.schemas.recipe.score_rules import ScoreRule
from vantage.schemas.recipe.step_ends import StepEnds
from vantage.tasks.data.examples import Codec, codec_of
from vantage.tasks.rewards.term_scores import Responses, Source, counted_scores
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.offloading import on_device
from vantage.tasks.training.passes import passes_of

Ask = Callable[[Sequence[str], Sequence[str], Sequence[str | None]], Tensor]
"""(prompts, beginnings of responses, answers) → scores (N,K), K for each beginning."""


_UNDECODABLE = "\ufffd"
"""Replaces bytes that are no whole character in a decoded text."""

log = logging.getLogger(__name__)


class UnknownMarker(ValueError):
    """The tokenizer does not have the token that ends a step."""


@dataclass(frozen=True)
class StepFinder:
    """Finds the tokens that end a step."""

    codec: Codec
    ends: StepEnds

    def positions(self, response: Sequence[int]) -> list[int]:
        """Return the positions of these tokens in a response of one token or more; the last one is the response's last
        token.

        A marker before the end-of-sequence token does not end a step of its own.
        """
        last = len(response) - 1
        found = self._streamed(response[:last])
        if found is None:
            found = self.decoded(response[:last])
        if found and found[-1] == last - 1 and response[last] in self.codec.stop_token_ids:
            found.pop()
        return [*found, last]

    def decoded(self, ids: Sequence[int]) -> list[int]:
        """Return where markers end, by decoding each beginning that may end with one.

        If many do, the time grows with the square of the length. This is the simple version of ``_streamed``.
        """
        return [place for place in range(len(ids)) if self._ends_at(ids, place)]

    def _streamed(self, ids: Sequence[int]) -> list[int] | None:
        """Return where markers end, decoding each token once; None: this is not possible, use ``decoded``."""
        backend, marker = getattr(self.codec.tokenizer, "backend_tokenizer", None), self.ends.text
        if marker is None or not isinstance(backend, Tokenizer):
            return None
        stream, text, unread, found = DecodeStream(skip_special_tokens=True), "", 0, []
        for place, token in enumerate(ids):
            try:
                more = stream.step(backend, token)
            except Exception:  # the library raises plain Exception where a text changes as it continues
                return None
            text += more or ""
            is_complete = False
            while (start := text.find(marker, unread)) >= 0:
                unread, is_complete = start + len(marker), True
            unread = max(unread, len(text) - len(marker) + 1)
            if is_complete:
                found.append(place)
        return found

    @cached_property
    def marker_id(self) -> int | None:
        """The id of the token that ends a step; None: a text ends a step."""
        if self.ends.token is None:
            return None
        return self.codec.tokenizer.get_vocab().get(self.ends.token)

    def _ends_at(self, response: Sequence[int], place: int) -> bool:
        """Return whether a marker is complete with the token at this place."""
        if self.ends.text is None:
            return response[place] == self.marker_id
        # For most tokens, the text of this token and the one before is enough: decoding strips white space only from
        # the start of a text. If a character has several tokens, a part of it alone is undecodable, and could belong to
        # the marker.
        near = self._text(response[max(place - 1, 0) : place + 1])
        if self.ends.text[-1] not in near and _UNDECODABLE not in near:
            return False
        before, after = self._text(response[:place]), self._text(response[: place + 1])
        return after.count(self.ends.text) > before.count(self.ends.text)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.codec.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True)
class StepScores:
    """The scores of a term that scores each step."""

    finder: StepFinder
    ask: Ask | None
    """A verifier's scores of beginnings; None: a model scores them."""
    model: ScalarModel | None = None
    names: tuple[str, ...] = ()
    """The names of a verifier's scores; empty: it has one score without a name."""
    path: str = ""
    """Path of the term in the recipe, for messages."""

    @property
    def is_graded(self) -> bool:
        """Whether a verifier scores the steps: the total of right and wrong steps is a number too."""
        return self.model is None

    def __call__(self, given: Responses) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return scores (B,T) after each token for each name, unclipped and unweighted, and which tokens end a step (B,T)."""
        rows = given.sequences.response_rows()
        positions = [self.finder.positions(row) for row in rows]
        is_end = torch.zeros(given.sequences.response_mask.shape, dtype=torch.bool, device=given.device)
        for row, places in enumerate(positions):
            is_end[row, places] = True
        if all(len(places) == 1 for places in positions) and ranks.rank() == 0:
            log.warning(
                "%s.step_ends: none of %d responses has %r before its end, so each is one step; correct the marker if the policy "
                "should write it by now",
                *(self.path, len(rows), self.finder.ends.token or self.finder.ends.text),
            )
        if self.model is not None:
            return (_by_model(self.model, given).to(given.device).masked_fill(~is_end, 0.0),), is_end
        assert self.ask is not None
        beginnings = [rows[row][: place + 1] for row, places in enumerate(positions) for place in places]
        owners = [row for row, places in enumerate(positions) for _ in places]
        found = self.ask(
            [given.prompts[row] for row in owners],
            self.finder.codec.response_texts(beginnings),
            [given.answers[row] for row in owners],
        )
        nothing = torch.zeros(is_end.shape, device=given.device)
        columns = found.float().to(given.device).unbind(dim=1)
        return tuple(nothing.masked_scatter(is_end, column) for column in columns), is_end


@dataclass(frozen=True)
class StepRewards:
    """One of a term's scores of the steps of B responses."""

    plain: Tensor
    """(B,): the total over each response's steps, unclipped and unweighted."""
    counted: Tensor
    """(B,T): each step's part of its response's score, clipped and moved by the score's rule, at the token that ends
    the step."""


def step_rewards(scores: StepScores, given: Responses, rules: Sequence[ScoreRule]) -> list[StepRewards]:
    """Score the steps of responses, by one rule for each score: their mean divides each step by the number of steps of its response."""
    found, is_end = scores(given)
    steps = is_end.sum(dim=1, keepdim=True) if scores.finder.ends.total == "mean" else 1
    return [
        StepRewards(
            plain=(each / steps).sum(dim=1),
            counted=counted_scores(each, rule).masked_fill(~is_end, 0.0) / steps,
        )
        for each, rule in zip(found, rules, strict=True)
    ]


def finder_of(ends: StepEnds, source: Source) -> StepFinder:
    """Return the finder of a term's step ends, in the ids of the policy whose responses are scored.

    Raises:
        UnknownMarker: the policy's tokenizer does not have the token.
    """
    finder = StepFinder(codec_of(source.job, source.tokenizers_of[0]), ends)
    if ends.token is not None and finder.marker_id is None:
        raise UnknownMarker(
            f"{source.path}.step_ends.token={ends.token!r} is no token of {source.tokenizers_of[0]}; name one of its tokens, or "
            "use step_ends.text"
        )
    return finder


def _by_model(model: ScalarModel, given: Responses) -> Tensor:
    """Return the model's score (B,T) of each beginning: the value that the next token's position reads, and at the last token the
    whole response's."""
    sequences = given.sequences
    with on_device(model), torch.no_grad():
        found = torch.zeros(sequences.response_mask.shape, device=model.device)
        final = torch.zeros(len(sequences), device=model.device)
        for part in passes_of(sequences, given.limits):
            progress.phase("scoring", part.done, len(sequences))
            of_tokens, of_whole = values_and_final(model, part.select(sequences))
            part.put(of_tokens, into=found)
            part.put(of_whole, into=final)
    found, final = ranks.total(found), ranks.total(final)
    after = torch.cat([found[:, 1:], torch.zeros_like(found[:, :1])], dim=1)
    last = sequences.lengths.to(after.device)[:, None] - 1
    after = after.scatter(1, last, final[:, None])
    # Equal responses get exactly equal scores
    return after[sequences.first_equal_rows()]
