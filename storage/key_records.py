"""Store one record per stage key in a bucket; only conditional writes replace it."""

import logging
from contextlib import suppress

import obstore
from obstore.store import ObjectStore as Remote
from pydantic import Field, ValidationError

from vantage.schemas.frozen import Frozen
from vantage.storage.attempt_counter import SKIPPED_ATTEMPTS
from vantage.storage.digests import checked_digest
from vantage.storage.records import Conflict, Version, read_record, replace_record
from vantage.storage.refs import DamagedRef, Ref
from vantage.storage.remote_objects import copy_aside, quarantine_of

_log = logging.getLogger(__name__)


class KeyRecord(Frozen):
    """The record of a stage key."""

    newest_attempt: int = Field(0, ge=0, strict=True)
    ref: Ref | None = None
    unneeded: bool = False
    """Whether the ref is about to be removed; a process that looks the ref up first removes this mark."""


class KeyRecords:
    """The records of one bucket."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def read(self, stage_key: str) -> tuple[KeyRecord, Version | None]:
        """Return the record; an empty one if there is none.

        Raises:
            DamagedRef: the record cannot be read.
        """
        data, version = read_record(self._remote, key_path(stage_key))
        if data is None:
            return KeyRecord(), None
        try:
            return KeyRecord.model_validate_json(data), version
        except ValidationError as error:
            raise DamagedRef(f"{key_path(stage_key)}: cannot be read as the record of a stage key") from error

    def read_for_use(self, stage_key: str) -> KeyRecord:
        """Return the record, with a ref that is not about to be removed; see ``read``."""
        while True:
            record, version = self.read(stage_key)
            if not record.unneeded:
                return record
            record = record.model_copy(update={"unneeded": False})
            with suppress(Conflict):
                self.write(stage_key, record, version)
                return record

    def write(self, stage_key: str, record: KeyRecord, version: Version | None) -> Version:
        """Replace the version that was read.

        Raises:
            Conflict: the record has another version by now.
        """
        return replace_record(self._remote, key_path(stage_key), record.model_dump_json().encode(), version)

    def quarantine_ref(self, stage_key: str) -> None:
        """Remove a wrong ref from the key's record; later attempts still get numbers above all earlier ones."""
        path = key_path(stage_key)
        data, version = read_record(self._remote, path)
        if data is None:
            return
        try:
            newest = KeyRecord.model_validate_json(data).newest_attempt
        except ValidationError:
            newest = SKIPPED_ATTEMPTS * (1 + len(self._copies_aside(path)))
        aside = copy_aside(self._remote, path)
        with suppress(Conflict):  # another machine was faster
            self.write(stage_key, KeyRecord(newest_attempt=newest), version)
            _log.warning("%s is damaged and not used (kept as %s)", path, aside)

    def _copies_aside(self, path: str) -> list[str]:
        listed = obstore.list(self._remote, f"{quarantine_of(path)}/")
        return [str(each["path"]) for batch in listed for each in batch]


def key_path(stage_key: str) -> str:
    """Return the path of a key's record."""
    return f"keys/{checked_digest(stage_key)}.json"
