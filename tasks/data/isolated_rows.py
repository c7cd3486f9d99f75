"""Read rows of Arrow and Parquet files in a separate process, which may crash.

Arrow trusts the sizes and offsets that a file declares, and not all of them can be checked before. So a damaged file
may crash the process that reads it, or make it allocate without bound. Here that ends only a child process, and refuses
the file.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

from vantage.schemas.source_files import SizeLimit
from vantage.tasks.data import row_worker
from vantage.tasks.data.arrow_rows import WRITE_AGAIN
from vantage.tasks.data.row_faults import Message, SourceRow, UnreadableFile
from vantage.tasks.training.control_groups import memory_limit

READ_SECONDS = 600.0
"""Seconds that the process may take for its next rows; reads of a remote file do not count."""
LEAST_MEMORY = 1 << 30
"""Bytes that the process may always allocate."""
_MEMORY_SHARE = 0.5
"""Share of the machine's memory that the process may allocate."""


def isolated_rows(kind: str, source: Path | BinaryIO, limit: SizeLimit) -> Iterator[SourceRow]:
    """Yield the rows of a file, which is read as far as rows are taken.

    Args:
        kind: ``.arrow``, ``.parquet``, or ``vantage.tasks.data.row_worker.SAVED`` for a folder.
        source: a path, or an open file that can be sought in.
        limit: limit of the bytes that the process may allocate; half of the machine's memory is a second limit.

    Raises:
        UnreadableFile: the file cannot be read, or crashes the process that reads it.
        OSError: the disk or the network fails.
    """
    path, opened = (str(source.absolute()), None) if isinstance(source, Path) else (None, source)
    size = None if opened is None else opened.seek(0, os.SEEK_END)
    num_bytes = max(LEAST_MEMORY, min(limit.num_bytes, int(_MEMORY_SHARE * _machine_bytes())))
    process, connection = _start()
    try:
        connection.send((kind, path, size, num_bytes))
        while rows := _next_rows(process, connection, opened, limit):
            yield from rows
    finally:
        process.kill()
        process.wait()
        connection.close()


def _machine_bytes() -> int:
    """Return the bytes of the machine's memory, or of the container's if it has fewer."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, memory_limit() or physical)


def _start() -> tuple["subprocess.Popen[bytes]", Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", row_worker.__name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # after a crash, the signal is reported instead
            pass_fds=(theirs.fileno(),),
            # Other allocators reserve addresses beyond the limit
            env={**os.environ, "PYTHONSAFEPATH": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
    return process, Connection(ours.detach())


def _next_rows(
    process: "subprocess.Popen[bytes]", connection: Connection, opened: BinaryIO | None, limit: SizeLimit
) -> list[SourceRow]:
    """Return the next rows; an empty list after the last one."""
    while True:
        try:
            if not connection.poll(READ_SECONDS):
                raise UnreadableFile(f"no row of it was read within {READ_SECONDS:g} s; {WRITE_AGAIN}")
            name, *content = connection.recv()
        except (EOFError, ConnectionResetError):
            raise UnreadableFile(_why_ended(process.wait(), limit)) from None
        match name:
            case Message.ROWS:
                return list(content[0])
            case Message.UNREADABLE:
                raise UnreadableFile(content[0])
            case Message.DISK_FAULT:
                raise OSError(*content)
            case Message.READ if opened is not None:
                place, size = content
                opened.seek(place)
                connection.send_bytes(opened.read(size))
            case _:
                raise AssertionError(name)


def _why_ended(status: int, limit: SizeLimit) -> str:
    if status == -signal.SIGKILL:
        return (
            f"the process that read it was killed, as the kernel does where memory runs out; {limit.remedy}"
        )
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    return f"it is damaged: it ended the process that read it ({how}); {WRITE_AGAIN}"
