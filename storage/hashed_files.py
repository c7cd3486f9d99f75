"""Hash files in several threads, and measure the time that reading and hashing took."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK = 2**22
_MAX_THREADS = 8

Chunks = Iterator[bytes | memoryview]


@dataclass
class HashClock:
    """Number of hashed bytes, and the time for them; all threads share it."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Wall time of ``hash_all``; the two below are sums over threads."""
    read_seconds: float = 0.0
    hash_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, num_bytes: int, read_seconds: float, hash_seconds: float) -> None:
        """Count one more hashed file."""
        with self._lock:
            self.num_bytes += num_bytes
            self.read_seconds += read_seconds
            self.hash_seconds += hash_seconds


@dataclass(frozen=True)
class FileToHash:
    """A file of a known size."""

    name: str
    size: int
    open: Callable[[], Chunks]
    """Function that returns the file's bytes, in order."""


def hash_all(files: list[FileToHash], clock: HashClock) -> list[str | OSError]:
    """Return the sha256 of each file, or its error; the largest files begin first, on as many threads as there are CPUs."""
    began = time.perf_counter()
    order = sorted(range(len(files)), key=lambda number: -files[number].size)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        running = {number: threads.submit(_hash, files[number], clock) for number in order}
        found = [running[number].result() for number in range(len(files))]
    clock.seconds += time.perf_counter() - began
    return found


def chunks_of(path: Path) -> Chunks:
    """Yield the bytes of a local file. Raises OSError if it is a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(_CHUNK, max(os.fstat(descriptor).st_size, 1))))
        while count := file.readinto(buffer):
            yield buffer[:count]


def _hash(file: FileToHash, clock: HashClock) -> str | OSError:
    hashed, num_bytes, reading, hashing = hashlib.sha256(), 0, 0.0, 0.0
    try:
        chunks = file.open()
        while True:
            began = time.perf_counter()
            chunk = next(chunks, None)
            read = time.perf_counter()
            reading += read - began
            if chunk is None:
                break
            hashed.update(chunk)
            hashing += time.perf_counter() - read
            num_bytes += len(chunk)
    except OSError as error:
        return error
    clock.add(num_bytes=num_bytes, read_seconds=reading, hash_seconds=hashing)
    return hashed.hexdigest()
