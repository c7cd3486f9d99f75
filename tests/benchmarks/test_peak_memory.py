"""`benchmarks.peak_memory` counts memory whose size is known."""

import subprocess
import sys
from pathlib import Path

CODE = """
from benchmarks.peak_memory import PeakMemory

held = bytearray(b"1" * (64 << 20))
memory = PeakMemory()
more = bytearray(b"1" * (128 << 20))
del more
print(memory.bytes)
"""


def test_the_peak_is_told_though_it_was_given_back() -> None:
    found = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    # the bytes are made twice: the literal, and its copy
    assert 128 <= int(found.stdout) / 2**20 <= 290
