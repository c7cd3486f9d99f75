"""The movements of aliases that MLflow has made, kept beside the outbox until they are announced.

A movement is written down before MLflow makes it, so a process that is killed in between loses none. Sending the operation again
writes the same movement again, with the same id; a reader counts it once.
"""

import json
from pathlib import Path
from uuid import UUID, uuid5

from vantage.ledger.outbox import append_line
from vantage.schemas.frozen import Frozen
from vantage.schemas.records.milliseconds import Milliseconds

_NAMESPACE = UUID("5b1d6c1e-6a0c-5d0f-9a37-0f1c5c6a9f10")
FILE = "alias_moves.jsonl"


class AliasMove(Frozen):
    """An alias of a registered model came to point to another version."""

    registered_model: str
    alias: str
    from_version: str
    """Version that the alias pointed to; empty: the alias did not exist."""
    to_version: str
    time: Milliseconds
    """Milliseconds since 1970 at which a run or a person moved it."""
    run_id: str
    """The Vantage run whose ledger contains the movement."""
    by: str
    """Name of the person who moved it; empty: the run moved it at its end."""

    @property
    def target(self) -> str:
        """Return ``NAME@ALIAS``."""
        return f"{self.registered_model}@{self.alias}"

    @property
    def id(self) -> UUID:
        """Return the movement's id, the same in every process that sends or announces it."""
        parts = (self.registered_model, self.alias, self.to_version, self.time, self.run_id)
        return uuid5(_NAMESPACE, json.dumps(parts))


class AliasMoves:
    """The movements of one run's outbox, and which of them are announced."""

    def __init__(self, folder: Path) -> None:
        """Open the movements of a run; ``folder`` is the folder of its outbox."""
        self._path = folder / FILE

    def note(self, move: AliasMove) -> None:
        """Write down a movement that MLflow is about to make; it is on disk when this returns."""
        self._append({"move": move.model_dump(mode="json")})

    def mark_announced(self, move: AliasMove) -> None:
        """Write down that the movement needs no announcement any longer."""
        self._append({"announced": str(move.id)})

    def waiting(self) -> list[AliasMove]:
        """Return the movements that are not announced, in their order; lines that cannot be parsed are skipped."""
        moves: dict[str, AliasMove] = {}
        announced: set[str] = set()
        if not self._path.exists():
            return []
        for line in self._path.read_bytes().splitlines():
            try:
                value = json.loads(line)
                if "announced" in value:
                    announced.add(str(value["announced"]))
                else:
                    move = AliasMove.model_validate(value["move"])
                    moves.setdefault(str(move.id), move)
            except (
                ValueError,
                KeyError,
                TypeError,
                RecursionError,
            ):  # half-written by a process that was killed
                continue
        return [move for identity, move in moves.items() if identity not in announced]

    def _append(self, value: dict[str, object]) -> None:
        # the first newline ends a line that a killed process has left incomplete
        append_line(self._path, b"\n" + json.dumps(value).encode() + b"\n")
