"""The answers of a stage's judges, reward servers and teacher in the storage: they are a separate object, under a key
that is derived from the stage's key."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vantage.schemas.checks.engines import sampling_of
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.work import Work
from vantage.schemas.records.attempt import AttemptRequest
from vantage.schemas.records.stored_answers import (
    ANSWERS_KIND,
    ANSWERS_PART,
    answers_key,
    answers_key_parts,
    is_scored_by_servers,
    is_taught_by_a_server,
    keeps_answers,
)
from vantage.storage.durable_files import replace_file
from vantage.storage.storage import Storage
from vantage.tasks.rewards.answer_file import write_sorted
from vantage.tasks.training.scratch import ANSWERS

NOT_BITWISE = "not_bitwise"
WHY = "servers gave scores; a rerun is bitwise equal with their stored answers"
WHY_VLLM = "vllm samples its responses; a rerun may sample others (rollout.engine: loop would not)"
WHY_TAUGHT = "a server gave the teacher's log-probabilities; a rerun is bitwise equal with its stored answers"


@contextmanager
def answers_kept(
    storage: Storage, request: AttemptRequest, scratch: Path, *, provenance: Mapping[str, Any]
) -> Iterator[dict[str, str]]:
    """Commit the answers that a stage received, then hold their key while the block commits the stage's artifact.

    The answers come first, so that an artifact that depends on them never lacks them after a kill. Yields the part of
    the artifact's provenance that names the answers; empty without answers.
    """
    if not keeps_answers(request.work, request.rewards) or not (scratch / ANSWERS).exists():
        yield {}
        return
    key = answers_key(request.stage_key)
    with storage.exclusive(key, holder=f"run {request.run_id}"):
        attempt = storage.next_attempt(key)
        folder = storage.staging_folder(key, attempt)
        counts = write_sorted(scratch / ANSWERS, folder / ANSWERS)
        kept = storage.commit(
            folder,
            stage_key=key,
            attempt=attempt,
            run_id=request.run_id,
            description={"kind": ANSWERS_KIND, "parents": {}, "metrics": counts},
            key_parts=answers_key_parts(request.stage_key),
            provenance=dict(provenance),
        )
        yield {ANSWERS_PART: kept.digest}


def restore_answers(storage: Storage, request: AttemptRequest, scratch: Path) -> None:
    """Put the stored answers of a stage that was computed before into its scratch folder, so that no question is asked
    again."""
    if not keeps_answers(request.work, request.rewards) or (scratch / ANSWERS).exists():
        return
    found = storage.lookup(answers_key(request.stage_key))
    if found.ref is not None:
        replace_file(scratch / ANSWERS, (storage.folder(found.ref.artifact) / ANSWERS).read_bytes())


def unequal_bits(
    work: Work, rewards: Mapping[str, Reward], parts: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return why a stage may have other bits when it is computed again, by its provenance, engine and servers; empty:
    it has the same bits."""
    found = [part[NOT_BITWISE] for part in parts if NOT_BITWISE in part]
    sampling = sampling_of(work)
    others = (
        (sampling is not None and sampling.engine == "vllm", WHY_VLLM),
        (is_scored_by_servers(rewards), WHY),
        (is_taught_by_a_server(work), WHY_TAUGHT),
    )
    causes = [*found, *(why for is_so, why in others if is_so)]
    if causes == found and len(found) < 2:
        return {}
    return {NOT_BITWISE: "; ".join(dict.fromkeys(causes))}
