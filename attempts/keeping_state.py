"""The training state of a stage in the storage: a separate object, under a key that is derived from the stage's key."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vantage.schemas.recipe.extending import PREVIOUS_STATE
from vantage.schemas.recipe.stage import Training
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import AttemptRequest
from vantage.schemas.records.extensions import STATE_KIND, state_key, state_key_parts
from vantage.storage.storage import Storage
from vantage.tasks.training.kept_state import write_kept_state


class DamagedState(ValueError):
    """The bytes of the training state from which a stage should go on do not match its digest."""


@contextmanager
def state_kept(
    storage: Storage, request: AttemptRequest, scratch: Path, *, provenance: Mapping[str, Any]
) -> Iterator[None]:
    """Commit the training state of a stage whose recipe keeps it, then hold its key while the block commits the artifact.

    The state comes first, so that an artifact whose state is kept never lacks it after a kill. While the key is held,
    no garbage collector takes the state's files for those of a dead attempt.
    """
    if not isinstance(request.work, Training) or not request.work.keep_state:
        yield
        return
    key = state_key(request.stage_key)
    with storage.exclusive(key, holder=f"run {request.run_id}"):
        attempt = storage.next_attempt(key)
        folder = storage.staging_folder(key, attempt)
        step = write_kept_state(scratch, folder)
        if step is not None:
            storage.commit(
                folder,
                stage_key=key,
                attempt=attempt,
                run_id=request.run_id,
                description={"kind": STATE_KIND, "parents": {}, "metrics": {"steps": float(step)}},
                key_parts=state_key_parts(request.stage_key),
                provenance=dict(provenance),
            )
        yield


def check_previous_state(storage: Storage, inputs: Mapping[str, Artifact]) -> None:
    """Hash every file of the training state from which an attempt goes on.

    Raises:
        DamagedState: the bytes of a file differ from the state's manifest.
    """
    state = inputs.get(PREVIOUS_STATE)
    problems = [] if state is None else storage.verify(state)
    if problems:
        raise DamagedState(
            f"{PREVIOUS_STATE} {state.digest[:12] if state else ''} is damaged: {'; '.join(problems)}; run the same command again, "
            "which trains the stage from nothing"
        )
