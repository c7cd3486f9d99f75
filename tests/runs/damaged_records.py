"""Records of a workspace that are damaged by a number: ``run.json``, refs, manifests, outboxes and a policy on publishing."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.models.damage import _value as change_value
from tests.support.fixtures import RECIPE
from tests.support.orchestrated import attempt_all, orchestrated
from tests.tasks.data.damaged_files import damaged
from vantage.ledger.outbox import Outbox
from vantage.runs.run import read_run
from vantage.runs.workspace import Workspace
from vantage.signing.policy import FILE, read_policy
from vantage.storage.sealed_folders import MANIFEST, find_problems, read_manifest
from vantage.storage.store import Store

POLICY = """models:
  'chat*':
    aliases:
      champion: {users: [nobody, somebody], loosened_gates: refuse}
      '*': {users: [somebody]}
"""


class Finished(NamedTuple):
    """A workspace with one run that has ended, whose files are put back after each trial."""

    workspace: Workspace
    run_id: str

    def files(self) -> dict[str, tuple[Path, Callable[[], object]]]:
        """Kind of record → its file, and what reads it."""
        stage = next(stage for stage in read_run(self.workspace, self.run_id).stages.values() if stage.digest)
        store, folder = Store(self.workspace.store), self.workspace.root / "runs" / self.run_id
        key, sealed = str(stage.stage_key), self.workspace.store / "objects" / str(stage.digest)
        return {
            "run.json": (folder / "run.json", lambda: read_run(self.workspace, self.run_id)),
            "ref": (self.workspace.store / "refs" / f"{key}.json", lambda: store.lookup(key)),
            "manifest": (sealed / MANIFEST, lambda: (find_problems(sealed), read_manifest(sealed))),
            "outbox": (folder / "ledger" / "outbox.jsonl", lambda: list(Outbox(folder / "ledger").read())),
            "policy": (self.workspace.root / FILE, lambda: read_policy(self.workspace)),
        }


def finished_run(workspace: Workspace, folder: Path) -> Finished:
    """Return a workspace with a finished run of fake stages, an outbox with some lines, and a policy.

    Args:
        folder: gets the recipe.
    """
    recipe = folder / "fake.yaml"
    recipe.write_text(RECIPE)
    with orchestrated(workspace, recipe, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status="completed")
    run_id = orchestrator.run.record.run_id
    outbox = Outbox(workspace.root / "runs" / run_id / "ledger")
    for number in range(3):
        outbox.append({"kind": "metric", "values": {"loss": number / 3}, "step": number})
    (workspace.root / FILE).write_text(POLICY)
    return Finished(workspace, run_id)


def trial(number: int, kind: str, finished: Finished) -> str:
    """Damage one record by the number and read it; return ``read``, or what refused it. Anything but a ValueError escapes."""
    path, read = finished.files()[kind]
    content, mode = path.read_bytes(), path.stat().st_mode
    chance = random.Random(f"{kind}:{number}")
    path.chmod(0o600)
    try:
        if path.suffix == ".json" and chance.random() < 0.6:
            change_value(path, chance)
        else:
            path.write_bytes(damaged(content, chance))
        read()
    except ValueError as error:
        return type(error).__name__
    finally:
        path.write_bytes(content)
        path.chmod(mode)
    return "read"
