"""Keep the tests' temporary files in memory where there is room: they live for seconds, and a slow disk would write each of them.

Databases of the tests wait for the disk at every commit, and files that replace others are written at once.
"""

import os
import shutil
import tempfile
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
LEAST_FREE = 6 * 2**30
"""Bytes that the folder must have free: a run of all tests keeps 1.5 GB there."""
LEAST_AVAILABLE = 12 * 2**30
"""Bytes of memory that must be available, for these files and for three processes of tests with their children."""


def use_folder_in_memory(folder: Path = FOLDER) -> bool:
    """Let temporary files of this process and of its children be in memory, and return whether they are.

    Does nothing where ``TMPDIR`` names a folder, where no program can be started from this one, or where it has no room.
    """
    if "TMPDIR" in os.environ or not _has_room(folder):
        return False
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # else what was found before stays
    return True


def _has_room(folder: Path) -> bool:
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return False
    starts_programs = not os.statvfs(folder).f_flag & os.ST_NOEXEC
    free, available = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    return starts_programs and free >= LEAST_FREE and available >= LEAST_AVAILABLE
