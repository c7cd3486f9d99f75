"""Show a storage of either kind to several machines, and start processes that can be killed while they use it."""

import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import obstore

from vantage.storage.bucket import open_bucket
from vantage.storage.object_storage import ObjectStorage
from vantage.storage.storage import Storage
from vantage.storage.store import Store

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Machine:
    """A machine that reaches a storage; plain values, so that another process can be it."""

    address: str
    cache: Path
    lease_seconds: float = 30.0
    environment: dict[str, str] = field(default_factory=dict)

    def open(self) -> Storage:
        if "://" not in self.address:
            return Store(Path(self.address))
        os.environ.update(self.environment)
        remote = _client(self.address, tuple(self.environment.items()), os.getpid())
        return ObjectStorage(remote, self.cache, lease_seconds=self.lease_seconds)


@cache
def _client(address: str, environment: tuple[tuple[str, str], ...], process: int) -> Any:
    """Return the client of a bucket, which is made once in each process: to make one takes as long as several requests."""
    return open_bucket(address)


class Place(Protocol):
    """A storage; ``path`` and ``prefix`` are names in the folder or in the bucket."""

    def machine(self, *, lease_seconds: float | None = None) -> Machine: ...
    def open(self) -> Storage: ...
    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes) -> None: ...
    def remove(self, path: str) -> None: ...
    def paths(self, prefix: str) -> set[str]: ...
    def ref_path(self, stage_key: str) -> str: ...


class FolderPlace:
    def __init__(self, root: Path) -> None:
        self.root = root

    def machine(self, *, lease_seconds: float | None = None) -> Machine:
        return Machine(str(self.root), self.root)

    def open(self) -> Store:
        return Store(self.root)

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        file = self.root / path
        if file.exists():
            file.chmod(0o644)
        file.write_bytes(data)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def paths(self, prefix: str) -> set[str]:
        files = (path for path in (self.root / prefix).rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix() for path in files}

    def ref_path(self, stage_key: str) -> str:
        return f"refs/{stage_key}.json"


class BucketPlace:
    """A bucket; every machine has a cache of its own."""

    def __init__(self, address: str, folder: Path, *, lease_seconds: float = 30.0) -> None:
        self.lease_seconds = lease_seconds
        self.address = address
        self.remote = open_bucket(address)
        self._folder = folder

    def machine(self, *, lease_seconds: float | None = None) -> Machine:
        names = (
            "AWS_ENDPOINT_URL",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_REGION",
            "AWS_ALLOW_HTTP",
        )
        environment = {name: os.environ[name] for name in names}
        cache = self._folder / secrets.token_hex(4)
        return Machine(self.address, cache, lease_seconds or self.lease_seconds, environment)

    def open(self) -> ObjectStorage:
        storage = self.machine().open()
        assert isinstance(storage, ObjectStorage)
        return storage

    def read(self, path: str) -> bytes:
        return bytes(obstore.get(self.remote, path).bytes())

    def write(self, path: str, data: bytes) -> None:
        obstore.put(self.remote, path, data)

    def remove(self, path: str) -> None:
        obstore.delete(self.remote, path)

    def paths(self, prefix: str) -> set[str]:
        return {str(each["path"]) for batch in obstore.list(self.remote, f"{prefix}/") for each in batch}

    def ref_path(self, stage_key: str) -> str:
        return f"keys/{stage_key}.json"


class Forked:
    """A process of a ``Forker``."""

    def __init__(self, forker: "Forker", pid: int, result: Path) -> None:
        self._forker, self.pid, self._result = forker, pid, result

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the process to end. Returns its exit status, or the negative number of the signal that ended it."""
        deadline = time.monotonic() + seconds
        while (status := self._forker.ask("wait", self.pid)) is None:
            assert time.monotonic() < deadline, "the process goes on"
            time.sleep(0.005)
        return int(status)

    def result(self) -> Any:
        """Return what its function returned."""
        assert self.wait() == 0, "the process failed"
        return pickle.loads(self._result.read_bytes())

    def wait_until_stopped(self, seconds: float = 60.0) -> None:
        """Wait until it has stopped itself by SIGSTOP."""
        deadline = time.monotonic() + seconds
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "the process does not stop"
            time.sleep(0.005)

    def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Forker:
    """Forks processes from one that has loaded the storage but never used it: obstore does not survive a fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = [
            sys.executable,
            "-c",
            "from tests.storage.places import fork_on_request; fork_on_request()",
        ]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    @contextmanager
    def process(self, function: Callable[..., Any], *arguments: Any) -> Iterator[Forked]:
        """Run ``function(*arguments)`` in a process of its own, which is killed at the end if it goes on."""
        result = self._folder / secrets.token_hex(8)
        forked = Forked(self, self.ask("fork", function, arguments, result), result)
        try:
            yield forked
        finally:
            forked.kill()
            forked.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def fork_on_request() -> None:
    """Answer the questions of a ``Forker`` as the forking process, until its input ends."""
    statuses: dict[int, int] = {}
    with suppress(EOFError):
        while True:
            action, *rest = pickle.load(sys.stdin.buffer)
            answer: int | None
            if action == "fork":
                answer = _fork(*rest)
            else:
                if rest[0] not in statuses and (ended := os.waitpid(rest[0], os.WNOHANG))[0]:
                    statuses[rest[0]] = os.waitstatus_to_exitcode(ended[1])
                answer = statuses.get(rest[0])
            pickle.dump(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def _fork(function: Callable[..., Any], arguments: tuple[Any, ...], result: Path) -> int:
    process = os.fork()
    if process:
        return process
    os.dup2(2, 1)
    status = 1
    try:
        result.write_bytes(pickle.dumps(function(*arguments)))
        status = 0
    except BaseException:  # the error is shown, and the exit status reports it
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)
