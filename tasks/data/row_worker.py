"""The process that reads Arrow and Parquet files: a damaged file may crash it, and nothing else.

``python -m vantage.tasks.data.row_worker`` is started by ``vantage.tasks.data.isolated_rows`` alone. It sends the rows through a
socket, and asks there for the bytes of a file that its parent has open.
"""

import io
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from vantage.tasks.data.arrow_rows import WRITE_AGAIN, arrow_rows, parquet_rows
from vantage.tasks.data.library_rows import library_rows
from vantage.tasks.data.row_faults import Message, SourceRow, UnreadableFile

SAVED = "saved"
"""Name of the kind for files that the library ``datasets`` reads."""

_SENT_ROWS = 100


def main() -> None:
    """Take the socket's descriptor from the command line, send the requested rows, and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    connection = Connection(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent closes the socket when it wants no more
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):
        kind, path, size, num_bytes = connection.recv()
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
        _serve(connection, _rows(connection, kind, path, size))
    os._exit(0)  # a thread of a library that still waits would hold the process


def _serve(connection: Connection, rows: Iterator[SourceRow]) -> None:
    try:
        while batch := list(islice(rows, _SENT_ROWS)):
            connection.send((Message.ROWS, batch))
        connection.send((Message.ROWS, []))
    except (BrokenPipeError, ConnectionResetError, EOFError):
        raise
    except UnreadableFile as error:
        connection.send((Message.UNREADABLE, str(error)))
    except MemoryError:
        connection.send((Message.UNREADABLE, f"it takes more memory than there is for it; {WRITE_AGAIN}"))
    except OSError as error:
        connection.send((Message.DISK_FAULT, error.errno, error.strerror))
    except Exception as error:  # a library may raise anything for damaged bytes
        first_line = (str(error).splitlines() or [""])[0]
        connection.send((Message.UNREADABLE, f"{type(error).__name__}: {first_line}; {WRITE_AGAIN}"))


def _rows(connection: Connection, kind: str, path: str | None, size: int | None) -> Iterator[SourceRow]:
    if path is None:
        opened: Any = _ParentsFile(connection, size or 0)
    else:
        opened = Path(path)
    match kind, opened:
        case ".parquet", _:
            return parquet_rows(opened)
        case ".arrow", Path():
            return arrow_rows(lambda: pa.memory_map(path))
        case ".arrow", _:
            return arrow_rows(lambda: pa.PythonFile(opened, mode="r"))
        case _:
            return library_rows(opened)


class _ParentsFile(io.RawIOBase):
    """A file that the parent has open."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection, self._size, self._place = connection, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._size - self._place))
        if not wanted:
            return 0
        self._connection.send((Message.READ, self._place, wanted))
        content = self._connection.recv_bytes()
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


if __name__ == "__main__":
    main()
