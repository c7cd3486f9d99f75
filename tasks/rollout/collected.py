"""Write and read the responses that a ``rollout_collection`` stage sampled and scored: its files, batch by batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from vantage.models.sequences import collate
from vantage.schemas.records.rollouts import HEADER, RolloutsHeader
from vantage.tasks.data.examples import Codec
from vantage.tasks.data.splits import TRAIN
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.rewards.scoring import Scores
from vantage.tasks.rollout.rollouts import Sampled, Scored, padded

_COLUMNS = (
    ("prompt", pa.string()),
    ("answer", pa.string()),
    ("prompt_ids", pa.list_(pa.int32())),
    ("response", pa.string()),
    ("response_ids", pa.list_(pa.int32())),
    ("sampler_logprobs", pa.list_(pa.float32())),
    ("ended", pa.bool_()),
    ("score", pa.float32()),
    ("weighted_sum", pa.float32()),
)
"""Columns of a row, which is one response; ``score.TERM`` for each of the reward's terms follows. ``response_ids`` and
``sampler_logprobs`` (of each id when it was drawn, in nats) have the same length, including the end-of-sequence id;
``score`` is before any scaling."""
_SCORE = "score."


class PromptNotCollected(ValueError):
    """A prompt of the stage has no collected response."""


@dataclass(frozen=True)
class Collected:
    """One split: the responses (N rows) to its prompts; those to one prompt are adjacent."""

    table: pa.Table
    samples_per_prompt: int
    pad_token_id: int
    graded: tuple[str, ...] = ()
    """Names of the graded scores, as ``Scores`` has them."""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def num_prompts(self) -> int:
        """Number of prompts, each with ``samples_per_prompt`` responses."""
        return len(self) // self.samples_per_prompt

    @cached_property
    def scores(self) -> Tensor:
        """The scores (N,) in float32, before any scaling and KL."""
        return self._floats("score", range(len(self)))

    @cached_property
    def weighted_sums(self) -> Tensor:
        """The scores (N,) without the reward's rule for a missing EOS."""
        return self._floats("weighted_sum", range(len(self)))

    @cached_property
    def ended(self) -> Tensor:
        """Return which responses (N,) ended by themselves."""
        return torch.tensor(self.table["ended"].to_pylist())

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens (N,) of the responses, EOS included."""
        chunks = self.table["response_ids"].chunks
        return torch.tensor([length for chunk in chunks for length in chunk.value_lengths().to_pylist()])

    def cases(self) -> list[tuple[str, str | None]]:
        """Return prompt and answer of each prompt."""
        first = self.table.take(list(range(0, len(self), self.samples_per_prompt)))
        return list(zip(first["prompt"].to_pylist(), first["answer"].to_pylist(), strict=True))

    def ids(self, column: str, rows: Sequence[int]) -> list[list[int]]:
        """Return ``prompt_ids`` or ``response_ids`` at these rows."""
        found: list[list[int]] = self.table[column].take(list(rows)).to_pylist()
        return found

    def rows_of(self, prompts: Iterable[int], *, count: int) -> list[int]:
        """Return the rows of the first ``count`` responses to each of these prompts."""
        return [prompt * self.samples_per_prompt + sample for prompt in prompts for sample in range(count)]

    def select(self, rows: Sequence[int], device: torch.device) -> Scored:
        """Return the responses at ``rows``, in that order."""
        part = self.table.take(list(rows))
        sequences = collate(
            part["prompt_ids"].to_pylist(), part["response_ids"].to_pylist(), pad_token_id=self.pad_token_id
        )
        terms = [name for name in part.column_names if name.startswith(_SCORE)]
        scores = Scores(
            total=self._floats("score", rows).to(device),
            weighted_sum=self._floats("weighted_sum", rows).to(device),
            by_term={name.removeprefix(_SCORE): self._floats(name, rows).to(device) for name in terms},
            graded=self.graded,
        )
        sampled = Sampled(
            prompts=part["prompt"].to_pylist(),
            answers=part["answer"].to_pylist(),
            responses=part["response"].to_pylist(),
            sequences=sequences.to(device),
            ended=torch.tensor(part["ended"].to_pylist(), device=device),
            sampler_logprobs=padded(map(torch.tensor, part["sampler_logprobs"].to_pylist())).to(device),
        )
        return Scored(sampled=sampled, scores=scores)

    def _floats(self, column: str, rows: Sequence[int]) -> Tensor:
        return torch.tensor(self.table[column].take(list(rows)).to_pylist(), dtype=torch.float32)


def read_collected(folder: Path, split: str, codec: Codec, *, tokenizer: str) -> Collected:
    """Return one split of a stage's artifact. The file is memory-mapped; only rows that ``select`` asks for are in memory.

    Args:
        tokenizer: digest of the reading stage's tokenizer.

    Raises:
        TokenizersDiffer: the ids were made by another tokenizer.
    """
    header = RolloutsHeader.model_validate_json((folder / HEADER).read_bytes())
    if header.tokenizer_digest != tokenizer:
        raise TokenizersDiffer(
            "rollouts: their ids are of another tokenizer than this stage's; collect responses of a policy that was trained "
            "from the same model"
        )
    return Collected(
        table=pa.ipc.open_file(pa.memory_map(str(split_file(folder, split)))).read_all(),
        samples_per_prompt=header.samples_per_prompt
        if split == TRAIN
        else header.held_out_samples_per_prompt,
        pad_token_id=codec.pad_token_id,
        graded=header.graded,
    )


def split_file(folder: Path, split: str) -> Path:
    """Return the path of the responses of one split."""
    return folder / f"{split}.arrow"


def part_of(scored: Scored) -> bytes:
    """Return the responses as an Arrow file.

    Raises:
        FloatingPointError: a score is not finite.
    """
    sampled, scores = scored.sampled, scored.scores
    if not bool(torch.isfinite(scores.total).all()):
        row = int((~torch.isfinite(scores.total)).nonzero()[0])
        raise FloatingPointError(
            f"a response to {sampled.prompts[row]!r} scores {scores.total[row]:g}; look at the reward's models"
        )
    mask = sampled.sequences.response_mask
    columns: dict[str, list[Any]] = {
        "prompt": sampled.prompts,
        "answer": sampled.answers,
        "prompt_ids": sampled.sequences.prompt_rows(),
        "response": sampled.responses,
        "response_ids": sampled.sequences.response_rows(),
        "sampler_logprobs": [
            row[kept].tolist() for row, kept in zip(sampled.sampler_logprobs, mask, strict=True)
        ],
        "ended": sampled.ended.tolist(),
        "score": scores.total.tolist(),
        "weighted_sum": scores.weighted_sum.tolist(),
        **{f"{_SCORE}{name}": term.tolist() for name, term in scores.by_term.items()},
    }
    terms = [(f"{_SCORE}{name}", pa.float32()) for name in scores.by_term]
    batch = pa.RecordBatch.from_pydict(columns, schema=pa.schema([*_COLUMNS, *terms]))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def join_parts(parts: Sequence[Path], path: Path) -> None:
    """Write the rows of several Arrow files, in order, as one; memory holds one part at a time."""
    first = pa.ipc.open_file(pa.memory_map(str(parts[0])))
    with pa.ipc.new_file(path, first.schema) as writer:
        for part in parts:
            writer.write_table(pa.ipc.open_file(pa.memory_map(str(part))).read_all())


def prompt_numbers(collected: Collected, prompts: Sequence[str], answers: Sequence[str | None]) -> Tensor:
    """Return the number of the collected prompt that each response (B,) answers; of equal prompts, the first.

    Raises:
        PromptNotCollected: a prompt has no collected response.
    """
    number_of: dict[tuple[str, str | None], int] = {}
    for number, case in enumerate(collected.cases()):
        number_of.setdefault(case, number)
    try:
        return torch.tensor([number_of[case] for case in zip(prompts, answers, strict=True)])
    except KeyError as error:
        raise PromptNotCollected(
            f"rollouts: there is no collected response to the prompt {error.args[0][0]!r}; collect them anew from the same "
            "prompts"
        ) from None
