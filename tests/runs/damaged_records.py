"""Damage records by a number: of runs and artifacts, beside outboxes and stages, of people, and of models in MLflow."""

import json
import random
from collections.abc import Callable
from functools import cache
from math import nan
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.models.damage import _value as change_value
from tests.support.fixtures import RECIPE
from tests.support.orchestrated import attempt_all, orchestrated
from tests.tasks.data.damaged_files import damaged
from vantage.ledger.alias_moves import AliasMove, AliasMoves
from vantage.ledger.journal import Journal
from vantage.ledger.journal import read as read_journal
from vantage.ledger.outbox import Outbox
from vantage.review.audit.mlflow_descriptions import description_problems
from vantage.runs.run import read_run
from vantage.runs.workspace import Workspace
from vantage.schemas.records.approvals import Approval, Question
from vantage.schemas.records.stored_answers import StoredAnswer, question_digest
from vantage.schemas.source_files import saved_files
from vantage.signing.policy import FILE, read_policy
from vantage.storage.sealed_folders import MANIFEST, find_problems, read_manifest
from vantage.storage.store import Store
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.training.progress import StageProgress, read_progress

POLICY = """models:
  'chat*':
    aliases:
      champion: {users: [nobody, somebody], loosened_gates: refuse}
      '*': {users: [somebody]}
"""
OTHERS, PLACE = "others", "sqlite:///mlflow.db"
"""Folder of the files that belong to no run here; a destination of the outbox."""

PIECES = (
    *(
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1e999",
        b"9" * 5000,
        b"-1",
        b"null",
        b"",
        b"\0",
        b"\xff",
        b'"\\ud800"',
    ),
    *(b"NaN", b"Infinity", b"&a [*a]", b"\n\n", b"{}"),
)
"""Texts that a tenth of the records have instead of their own, or within it."""


class Finished(NamedTuple):
    """A workspace with one run that has ended, whose files are put back after each trial."""

    workspace: Workspace
    run_id: str

    def files(self) -> dict[str, tuple[Path, Callable[[], object]]]:
        """Return kind of record → its file, and what reads it."""
        stage = next(stage for stage in read_run(self.workspace, self.run_id).stages.values() if stage.digest)
        store, folder = Store(self.workspace.store), self.workspace.root / "runs" / self.run_id
        key, sealed = str(stage.stage_key), self.workspace.store / "objects" / str(stage.digest)
        return {
            "run.json": (folder / "run.json", lambda: read_run(self.workspace, self.run_id)),
            "ref": (self.workspace.store / "refs" / f"{key}.json", lambda: store.lookup(key)),
            "manifest": (sealed / MANIFEST, lambda: (find_problems(sealed), read_manifest(sealed))),
            "outbox": (folder / "ledger" / "outbox.jsonl", lambda: list(Outbox(folder / "ledger").read())),
            "policy": (self.workspace.root / FILE, lambda: read_policy(self.workspace)),
            **self._beside(folder / "ledger"),
        }

    def _beside(self, ledger: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
        """Return the small files that ``_write_others`` has written."""
        others = self.workspace.root / OTHERS
        return {
            "sent.json": (
                ledger / "sent.json",
                lambda: (Outbox(ledger).sent(PLACE), Outbox(ledger).is_unsent()),
            ),
            "movements": (
                ledger / "alias_moves.jsonl",
                lambda: [each.id for each in AliasMoves(ledger).waiting()],
            ),
            "journal": (others / "journal.jsonl", lambda: list(read_journal(others / "journal.jsonl"))),
            "progress": (others / "progress.json", lambda: read_progress(others / "progress.json")),
            "approval": (
                others / "approval.json",
                lambda: str(Approval.model_validate_json((others / "approval.json").read_bytes())),
            ),
            "judges' answers": (others / "answers.jsonl", lambda: list(answers_in(others / "answers.jsonl"))),
            "saved dataset": (others / "state.json", lambda: saved_files(others)),
            "description": (
                others / "MLmodel",
                lambda: list(description_problems(others, others, {}, kinds=["policy"])),
            ),
        }


def _write_others(others: Path, ledger: Path) -> None:
    """Write what a run of fake stages does not write: each small, and as its writer writes it."""
    others.mkdir()
    Outbox(ledger).mark_sent(PLACE, Outbox(ledger)._path.stat().st_size)
    moved = AliasMove(
        registered_model="m", alias="a", from_version="", to_version="1", time=1, run_id="r", by=""
    )
    AliasMoves(ledger).note(moved)
    AliasMoves(ledger).mark_announced(moved.model_copy(update={"time": 2}))
    journal = Journal(others / "journal.jsonl")
    for step in range(3):
        journal.append(step, {"loss": step / 3, "nan": nan}, time=1.5 + step)
    journal.close()
    question = Question(subject="publish:m@a", stage="s", stage_key="0" * 64, digest="0" * 64, verdicts=())
    approval = Approval(question=question, run_id="r", approved=True, by="ada", reason="fine", time=1)
    (others / "approval.json").write_text(approval.model_dump_json())
    report = StageProgress(
        phase="training", step=1, total=2, metrics={"loss": 0.5}, firings=(), started=0.0, updated=1.0
    )
    (others / "progress.json").write_text(report.model_dump_json())
    asked = {"model": "judge", "messages": [{"role": "user", "content": "?"}]}
    answer = StoredAnswer(question=question_digest(asked), time=0, asked=asked, answer="score: 7")
    (others / "answers.jsonl").write_text(f"{answer.line()}\n" * 2)
    (others / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (others / "data-00000-of-00001.arrow").write_bytes(b"")
    (others / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    flavors = {
        "python_function": {"loader_module": "mlflow.transformers", "env": {"virtualenv": "python_env.yaml"}}
    }
    for name, value in (
        ("MLmodel", {"flavors": flavors, "model_size_bytes": 3, "utc_time_created": "2026-11-28"}),
        ("python_env.yaml", {}),
    ):
        (others / name).write_text(yaml.safe_dump(value))
    (others / "requirements.txt").write_text("")


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
    _write_others(workspace.root / OTHERS, workspace.root / "runs" / run_id / "ledger")
    return Finished(workspace, run_id)


@cache
def _files(finished: Finished) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Return the files of a run while they are whole: a hundred thousand trials read its record once."""
    return finished.files()


def trial(number: int, kind: str, finished: Finished) -> str:
    """Damage one record by the number and read it. Returns ``read``, or the name of the ValueError that refused it; any
    other error escapes.
    """
    path, read = _files(finished)[kind]
    content, mode = path.read_bytes(), path.stat().st_mode
    chance = random.Random(f"{kind}:{number}")
    path.chmod(0o600)
    try:
        if number % 10 == 9:
            place, piece = chance.randrange(len(content) + 1), PIECES[number // 10 % len(PIECES)]
            path.write_bytes(chance.choice((piece, content[:place] + piece + content[place:])))
        elif path.suffix == ".json" and chance.random() < 0.6:
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
