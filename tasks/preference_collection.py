"""Collect preferences: pairs sampled from a policy, as a dataset that a reward model or DPO reads unchanged.

Nothing is trained. The held-out splits come first, so that prompts that give no pair are noticed early.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from vantage.models.prompts import encode_responses
from vantage.models.rendered_responses import ResponseRenderer
from vantage.schemas.conversations import AS_SAMPLED
from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import ResolvedPreferenceCollection
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import (
    Codec,
    Prompts,
    codec_of,
    read_prompts,
)
from vantage.tasks.data.openings import without_opening
from vantage.tasks.data.rows import Row, read_rows, write_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.rollout.engine import RolloutEngine, load_engine
from vantage.tasks.rollout.fitting_engine import fit_to_memory
from vantage.tasks.rollout.judging import Judgement, judge_within, load_judge
from vantage.tasks.rollout.prompted_judge import PromptedJudge, judge_texts, load_prompted_judge
from vantage.tasks.rollout.rollouts import Sampled, sample_responses
from vantage.tasks.training.batch_files import BatchFiles
from vantage.tasks.training.found_limits import taken_by_reading
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.optimization import training_device
from vantage.tasks.training.seeds import derive_seed, stage_seed

SAME_SCORE = "all responses score the same"
SAME_TEXT = "chosen equals rejected"
NO_TEXT = "responses are empty"
"""Reasons why a prompt gives no pair."""


class NoPairs(ValueError):
    """A split has no pair."""


@dataclass(frozen=True)
class Source:
    """The prompts of one split and, if pairs are made with demonstrations, the demonstrated response to each prompt."""

    prompts: Prompts
    demonstrations: list[str] | None


@dataclass(frozen=True)
class Batch:
    """Prompts of one split that are sampled together."""

    split: str
    indices: range
    is_last: bool
    """Whether it is the last batch of its split."""


@dataclass(frozen=True)
class Response:
    """One response to a prompt."""

    text: str
    num_tokens: int
    """Number of tokens, EOS included."""

    @property
    def is_usable(self) -> bool:
        """Return whether the response may be in a dataset (``vantage.schemas.row_rules`` has the same rules)."""
        return bool(self.text.strip()) and "\0" not in self.text


class Pair(Frozen):
    """A row of the dataset, with the lengths (tokens) of its sides."""

    prompt: str
    chosen: str
    rejected: str
    chosen_tokens: int
    rejected_tokens: int


class Collected(Frozen):
    """Pairs from one batch of prompts."""

    split: str
    num_prompts: int
    pairs: tuple[Pair, ...]
    without_pair: dict[str, int]
    """Reason → number of prompts that gave no pair."""

    @property
    def tied_share(self) -> float:
        """Share of the prompts that gave no pair."""
        return sum(self.without_pair.values()) / self.num_prompts


def run(job: StageJob[ResolvedPreferenceCollection]) -> StageResult:
    """Write ``train.parquet``, ``validation.parquet``, ``test.parquet`` and ``report.json`` into the output."""
    work = job.work
    device = training_device()

    # 1. The policy, its judge, and every split's prompts in batches
    codec = codec_of(job, "policy")
    policy = fixed_policy(job, "policy", device)
    judge = None if work.judge is None else load_response_judge(job, work.judge, device)
    sources = {split: read_source(job, split, codec) for split in SPLITS}
    role = "prompts" if "prompts" in job.inputs else "demonstrations"
    encoding = encoding_metrics(job, role, [source.prompts for source in sources.values()])
    batches = list(cut_batches(sources, work))
    limits = work.rollout.limits(work.pass_limits).or_rows(work.batch_size)
    engine, job = fit_to_memory(
        load_engine(policy, codec, limits=limits, precision=work.arithmetic, rollout=work.rollout),
        job,
        taken_by_reading(policy, codec, [each.prompts for each in sources.values()], work),
        device=device,
    )
    if judge is not None:
        judge = judge_within(judge, limits_of_judge(job.work))

    # 2. Pairs, batch by batch, continuing an earlier attempt
    with BatchFiles(job.scratch, total=len(batches), phase="sampling") as files:
        for number in files.remaining():
            refuse_without_pairs(batches[:number], files.finished, stage=job.name)
            batch = batches[number]
            sampled = sample_batch(
                engine, codec, sources[batch.split], batch, job, number=number, device=device
            )
            collected = collect(sampled, codec, sources[batch.split], batch, work, judge)
            files.finish(
                collected.model_dump(mode="json"),
                metrics={"tied_share": collected.tied_share},
                num_tokens=int(sampled.sequences.attention_mask.sum()),
                headline="tied_share",
            )
        refuse_without_pairs(batches, files.finished, stage=job.name)
    everything = [Collected.model_validate(part) for part in files.finished]
    by_split = {split: [part for part in everything if part.split == split] for split in SPLITS}

    # 3. One file per split, in the format of data preparation
    for split in SPLITS:
        rows = [
            {column: getattr(pair, column) for column in ("prompt", "chosen", "rejected")}
            for part in by_split[split]
            for pair in part.pairs
        ]
        write_rows(job.output, split, as_sampled(with_turns(rows, sources[split].prompts), codec))
    counts = {f"{split}_rows": sum(len(part.pairs) for part in parts) for split, parts in by_split.items()}
    report = {**counts, "dropped": without_pair(everything)}
    (job.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    # these come first, since people read the first metrics
    first = {"train_rows": counts["train_rows"], **describe(everything)}
    return StageResult(metrics={**first, **counts, **encoding})


def load_response_judge(
    job: StageJob[ResolvedPreferenceCollection], judge: Judge, device: torch.device
) -> Judgement | PromptedJudge:
    """Return the judge of the responses: a verifier, a reward, or a model that compares the two responses to a prompt."""
    limits = limits_of_judge(job.work)
    if judge.kind == "model":
        return load_prompted_judge(job, judge, role="judge", device=device, limits=limits)
    return load_judge(job, judge, policies=["policy"], device=device, limits=limits)


def limits_of_judge(work: ResolvedPreferenceCollection) -> PassLimits:
    """Return the bounds of the judge's passes; a model that compares has another number of rows without ``microbatch_size``."""
    is_model = work.judge is not None and work.judge.kind == "model"
    return work.pass_limits if is_model else work.pass_limits.or_rows(work.batch_size)


def scores_of(judge: Judgement | PromptedJudge, sampled: Sampled) -> Tensor:
    """Return the scores (B,) of responses. A model that compares two gives 1 and 0, or ½ and ½ if it does not prefer
    the same response in both orders."""
    if not isinstance(judge, PromptedJudge):
        return judge(sampled)
    texts = sampled.responses
    wins = judge_texts(judge, sampled.prompts[::2], texts[::2], texts[1::2]).wins
    return torch.stack([wins, 1 - wins], dim=1).flatten()


def with_turns(rows: Sequence[Row], prompts: Prompts) -> list[Row]:
    """Return the rows, with the turns of prompts that are conversations."""
    if prompts.conversations is None:
        return list(rows)
    turns_of = dict(zip(prompts.texts, prompts.conversations, strict=True))
    return [{**row, "messages": turns_of[row["prompt"]]} for row in rows]


def as_sampled(rows: Sequence[Row], codec: Codec) -> list[Row]:
    """Return the rows, with a mark at each response that the chat template would render differently from the sampled text.

    For example, where a prompt opens ``<think>``, training reads the text after it. Other rows are not changed.
    """
    renderer = ResponseRenderer(codec.tokenizer, chat=codec.chat)
    marks = [
        {
            f"{side}_extra": None
            if renderer.writes_as_it_stands(row.get("messages") or row["prompt"], row[side])
            else AS_SAMPLED
            for side in ("chosen", "rejected")
        }
        for row in rows
    ]
    if not any(mark for each in marks for mark in each.values()):
        return list(rows)
    return [{**row, **each} for row, each in zip(rows, marks, strict=True)]


def read_source(job: StageJob, split: str, codec: Codec) -> Source:
    """Return the prompts of one split that fit the recipe's limit, with their demonstrations if there are any."""
    if "prompts" in job.inputs:
        return Source(read_prompts(job.inputs["prompts"], split, codec), demonstrations=None)
    folder = job.inputs["demonstrations"]
    prompts = read_prompts(folder, split, codec)
    fits = set(prompts.texts)  # of equal prompts, either all fit or none
    return Source(prompts, [row["response"] for row in read_rows(folder, split) if row["prompt"] in fits])


def cut_batches(sources: Mapping[str, Source], work: ResolvedPreferenceCollection) -> Iterator[Batch]:
    """Yield every prompt of every split once, ``batch_size`` responses at a time (at least one prompt's)."""
    size = max(1, work.batch_size // work.samples_per_prompt)
    for split in reversed(SPLITS):
        count = len(sources[split].prompts)
        for start in range(0, count, size):
            end = min(start + size, count)
            yield Batch(split=split, indices=range(start, end), is_last=end == count)


def sample_batch(
    engine: RolloutEngine,
    codec: Codec,
    source: Source,
    batch: Batch,
    job: StageJob[ResolvedPreferenceCollection],
    *,
    number: int,
    device: torch.device,
) -> Sampled:
    """Return the responses to a batch's prompts, those of each prompt together: a function of the seed and the batch's
    number."""
    work = job.work
    return sample_responses(
        engine,
        codec,
        source.prompts,
        batch.indices,
        device=device,
        count=work.samples_per_prompt,
        seed=derive_seed(stage_seed(job), "sampling", number),
    )


def collect(
    sampled: Sampled,
    codec: Codec,
    source: Source,
    batch: Batch,
    work: ResolvedPreferenceCollection,
    judge: Judgement | PromptedJudge | None,
) -> Collected:
    """Return the pairs that a batch's responses give."""
    group = work.samples_per_prompt
    texts = without_opening(sampled.responses, codec)
    lengths = sampled.sequences.lengths.tolist()
    responses = [Response(*each) for each in zip(texts, lengths, strict=True)]
    scores = scores_of(judge, sampled).tolist() if judge is not None else None
    demonstrated = (
        None if source.demonstrations is None else encode_demonstrations(source.demonstrations, batch, codec)
    )
    pairs: list[Pair] = []
    reasons: Counter[str] = Counter()
    for place, index in enumerate(batch.indices):
        rows = slice(place * group, (place + 1) * group)
        prompt = source.prompts.texts[index]
        if demonstrated is not None:
            outcome = demonstrated_pairs(prompt, demonstrated[place], responses[rows])
        else:
            assert scores is not None
            outcome = judged_pair(prompt, responses[rows], scores[rows])
        if isinstance(outcome, str):
            reasons[outcome] += 1
        else:
            pairs += outcome
    return Collected(
        split=batch.split, num_prompts=len(batch.indices), pairs=tuple(pairs), without_pair=dict(reasons)
    )


def encode_demonstrations(texts: Sequence[str], batch: Batch, codec: Codec) -> list[Response]:
    """Return a batch's demonstrations with their lengths as training reads them."""
    of_batch = [texts[index] for index in batch.indices]
    limit = codec.generation.max_response_tokens
    encoded = encode_responses(codec.tokenizer, of_batch, max_tokens=limit, chat=codec.chat)
    return [Response(text, len(ids)) for text, (ids, _) in zip(of_batch, encoded, strict=True)]


def judged_pair(prompt: str, responses: Sequence[Response], scores: Sequence[float]) -> list[Pair] | str:
    """Return the best response against the worst (the first of equal ones), or the reason why there is no such pair.

    Raises:
        FloatingPointError: a score is not finite.
    """
    if not all(map(isfinite, scores)):
        raise FloatingPointError(
            f"a response to {prompt!r} scores {scores}; look at the judge's reward models"
        )
    candidates = [row for row, response in enumerate(responses) if response.is_usable]
    if len(candidates) < 2:
        return NO_TEXT
    best, worst = max(candidates, key=scores.__getitem__), min(candidates, key=scores.__getitem__)
    if scores[best] == scores[worst]:
        return SAME_SCORE
    if responses[best].text == responses[worst].text:
        return SAME_TEXT
    return [pair_of(prompt, responses[best], responses[worst])]


def demonstrated_pairs(
    prompt: str, demonstration: Response, responses: Sequence[Response]
) -> list[Pair] | str:
    """Return the demonstration against each different response of the policy, or the reason why there is no such pair."""
    by_text = {response.text: response for response in responses if response.is_usable}
    if not by_text:
        return NO_TEXT
    others = [response for text, response in by_text.items() if text != demonstration.text]
    return [pair_of(prompt, demonstration, response) for response in others] or SAME_TEXT


def pair_of(prompt: str, chosen: Response, rejected: Response) -> Pair:
    """Return a row of the dataset."""
    return Pair(
        prompt=prompt,
        chosen=chosen.text,
        rejected=rejected.text,
        chosen_tokens=chosen.num_tokens,
        rejected_tokens=rejected.num_tokens,
    )


def refuse_without_pairs(done: Sequence[Batch], finished: Sequence[Mapping[str, Any]], *, stage: str) -> None:
    """Raise NoPairs if a split that was sampled completely gave no pair: it could not be used to train or to measure."""
    for split in (batch.split for batch in done if batch.is_last):
        parts = [part for part in finished if part["split"] == split]
        if any(part["pairs"] for part in parts):
            continue
        collected = [Collected.model_validate(part) for part in parts]
        reasons = ", ".join(f"{reason}: {count}" for reason, count in without_pair(collected).items())
        raise NoPairs(
            f"{stage}: none of the {sum(part.num_prompts for part in collected)} prompts of the {split} split gives a "
            f"pair ({reasons}); raise samples_per_prompt or generation.temperature, or give {split} more prompts"
        )


def without_pair(parts: Sequence[Collected]) -> dict[str, int]:
    """Return reason → number of prompts without a pair, over several batches."""
    reasons: Counter[str] = Counter()
    for part in parts:
        reasons.update(part.without_pair)
    return dict(sorted(reasons.items()))


def describe(parts: Sequence[Collected]) -> dict[str, float]:
    """Return the share of prompts without a pair, and mean lengths (tokens) of the sides, over all splits."""
    pairs = [pair for part in parts for pair in part.pairs]
    tied = sum(without_pair(parts).values())
    return {
        "tied_share": tied / sum(part.num_prompts for part in parts),
        "mean_chosen_length": sum(pair.chosen_tokens for pair in pairs) / len(pairs),
        "mean_rejected_length": sum(pair.rejected_tokens for pair in pairs) / len(pairs),
    }
