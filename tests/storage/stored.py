"""Make and read an artifact in a storage, as a stage and its reader do."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.stage_key import stage_key
from vantage.storage.storage import Storage

PARTS = {"kind": "sft", "seed": 1}
KEY = stage_key(PARTS)
OTHER_PARTS = {"kind": "sft", "seed": 2}
OLD, NEW = b"old weights", b"new weights"


def stage(store: Storage, content: bytes, *, parts: dict[str, Any] = PARTS) -> tuple[Path, int]:
    """Begin an attempt and write its files."""
    key = stage_key(parts)
    attempt = store.next_attempt(key)
    folder = store.staging_folder(key, attempt)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
    (folder / "weights.bin").write_bytes(content)
    return folder, attempt


def commit(
    store: Storage, folder: Path, attempt: int, *, parts: dict[str, Any] = PARTS, **changed: Any
) -> Artifact:
    arguments: dict[str, Any] = {
        "stage_key": stage_key(parts),
        "attempt": attempt,
        "run_id": "run-1",
        "description": {
            "kind": "policy",
            "parents": {"init": "a" * 64},
            "metrics": {"loss": 0.1, "accuracy": None},
            "tokenizer_digest": "b" * 64,
        },
        "key_parts": parts,
        "provenance": {"torch": "2.13.0"},
    }
    return store.commit(folder, **{**arguments, **changed})


def produce(store: Storage, content: bytes, *, parts: dict[str, Any] = PARTS) -> Artifact:
    return commit(store, *stage(store, content, parts=parts), parts=parts)


def content_of(store: Storage, key: str = KEY) -> bytes | None:
    """Return what a reader finds under a stage key; fails on anything damaged."""
    found = store.lookup(key)
    assert found.damage == ()
    return None if found.ref is None else (store.folder(found.ref.artifact) / "weights.bin").read_bytes()


class child:
    """Run a function in a forked process: ``with child(work) as (pid, result)``; killed at the end if need be."""

    def __init__(self, work: Callable[[], str]) -> None:
        self._work = work

    def __enter__(self) -> tuple[int, Callable[[], str]]:
        self._receive, send = multiprocessing.Pipe(duplex=False)
        self._process = os.fork()
        if self._process == 0:
            try:
                send.send(self._work())
            finally:
                os._exit(0)
        send.close()
        return self._process, self._result

    def _result(self) -> str:
        assert self._receive.poll(60), "the child says nothing"
        return str(self._receive.recv())

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError, ChildProcessError):  # the process has ended and was waited for
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        self._receive.close()
