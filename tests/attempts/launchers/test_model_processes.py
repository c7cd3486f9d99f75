"""The process that holds a model is killed when it is no longer asked, and leaves nothing behind."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.launchers import sampling_process
from vantage.schemas.records.sampling import OpenModel

LEAVES_A_FILE = """
import sys, tempfile
from pathlib import Path
folder = Path(tempfile.mkdtemp())
(folder / "weights").write_bytes(bytes(1000))
print(folder, flush=True)
sys.stdin.read()
"""
"""A process that has a temporary folder when it is killed, as the real one, and that loads no tensor library."""


def test_a_process_whose_template_took_too_long_is_the_templates_fault() -> None:
    """The kernel ends it by the signal of its timer."""
    ends = "import os, signal; os.kill(os.getpid(), signal.SIGPROF)"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with process, pytest.raises(ValueError, match="chat template is not rendered in time; correct"):
            sampling_process.SamplingProcess(process, log).opened()


def test_a_killed_process_leaves_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", LEAVES_A_FILE], **options)
            assert self.stdout is not None
            made.append(Path(self.stdout.readline().decode().strip()))
            assert (made[0] / "weights").is_file()

    made: list[Path] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sampling_process.subprocess, "Popen", Process)
    with pytest.raises(KeyError, match="stop"), sampling_process.open_model(OpenModel(source="builtin:tiny")):
        raise KeyError("stop")
    assert made[0].is_relative_to(tmp_path)
    assert [*tmp_path.iterdir()] == []
