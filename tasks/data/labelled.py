"""Single responses, each labelled desirable or not: reading them, their balance, and mismatched pairs for an estimate of KL."""

import logging
from collections.abc import Sequence

from vantage.schemas.recipe.resolved import ResolvedKahnemanTverskyOptimization
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.label_weights import imbalance
from vantage.tasks.data.examples import Codec, Completions, NothingLeft, read_completions
from vantage.tasks.data.splits import TRAIN

log = logging.getLogger(__name__)


def read_labelled(
    job: StageJob[ResolvedKahnemanTverskyOptimization], split: str, codec: Codec
) -> Completions:
    """Return the labelled responses of one split as ids.

    A held-out split with labels of one sort is logged: the margin of the other sort has no value there.

    Raises:
        NothingLeft: the training split has only desirable or only undesirable responses.
    """
    rows = read_completions(job.inputs["data"], split, ["response"], codec)
    assert rows.labels is not None, "a column of the content"
    found = set(rows.labels)
    if len(found) == 1:
        there, lacking = ("desirable", "undesirable") if 1 in found else ("undesirable", "desirable")
        message = f"data={job.work.data}: all {len(rows)} usable rows of the {split} split are labelled {there}, and none {lacking}"
        if split == TRAIN:
            raise NothingLeft(
                f"{message}: a response is learnt against those of the other label; add such rows, or learn desirable ones with "
                "a stage of kind sft"
            )
        log.warning("%s, so %s_margin has no value there; hold out more rows", message, lacking)
    return rows


def label_weight_ratio(train: Completions, work: ResolvedKahnemanTverskyOptimization, *, stage: str) -> float:
    """Return (desirable_weight · desirable rows) / (undesirable_weight · undesirable rows); an imbalance is logged as a warning."""
    assert train.labels is not None
    num_desirable = sum(train.labels)
    num_undesirable = len(train) - num_desirable
    ratio = (work.desirable_weight * num_desirable) / (work.undesirable_weight * num_undesirable)
    if (why := imbalance(ratio)) is not None:
        log.warning(
            "stages.%s: %d rows are desirable and %d undesirable, with desirable_weight=%g and undesirable_weight=%g: %s",
            stage,
            num_desirable,
            num_undesirable,
            work.desirable_weight,
            work.undesirable_weight,
            why,
        )
    return ratio


def mismatched(rows: Completions, indices: Sequence[int]) -> Completions:
    """Return each prompt at ``indices`` with the response of the row before it there, the first with that of the last.

    A response to the same prompt is no mismatch, so the nearest earlier row of another prompt is taken. A prompt is left out
    if all rows at ``indices`` have it.
    """
    responses = rows.response_ids["response"]
    found_prompts: list[list[int]] = []
    found_responses: list[list[int]] = []
    partner: int | None = None
    # Two rounds over the rows: rows at the beginning may have their partner at the end, which the second round knows
    prompts = [rows.prompt_ids[index] for index in indices]
    count = len(prompts)
    for place in range(2 * count):
        here, before = place % count, (place - 1) % count
        if prompts[before] != prompts[here]:
            partner = before
        if place >= count and partner is not None:
            found_prompts.append(prompts[here])
            found_responses.append(responses[indices[partner]])
    return Completions(
        prompt_ids=found_prompts,
        response_ids={"response": found_responses},
        pad_token_id=rows.pad_token_id,
        num_too_long=0,
    )
