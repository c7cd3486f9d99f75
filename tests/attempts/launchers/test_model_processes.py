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


ANSWERS = """
import os, sys
from vantage.schemas.records.sampling import ModelOpened, Refused
names = ("TMPDIR", "PYTHONSAFEPATH", "MLFLOW_TRACKING_PASSWORD", "OPENLINEAGE_API_KEY", "HF_TOKEN")
told = " ".join(f"{name}={os.environ.get(name)}" for name in names)
print("a line of the library", file=sys.stderr, flush=True)
for line in sys.stdin:
    print(Refused(refused=told, is_ours=IS_OURS).model_dump_json(), flush=True)
"""


@pytest.mark.parametrize(("is_ours", "error"), [(False, ValueError), (True, sampling_process.SamplingFailed)])
def test_a_refusal_is_the_users_and_an_internal_error_shows_what_the_process_wrote(
    is_ours: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process also has its own folder of temporary files, and no login that only servers of records need."""

    class Process(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", ANSWERS.replace("IS_OURS", str(is_ours))], **options)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sampling_process.subprocess, "Popen", Process)
    for login in ("MLFLOW_TRACKING_PASSWORD", "OPENLINEAGE_API_KEY"):
        monkeypatch.setenv(login, "word-of-a-server")
    monkeypatch.setenv("HF_TOKEN", "t")
    opening = OpenModel(source="builtin:tiny")
    with sampling_process.open_model(opening) as opened, pytest.raises(error) as refused:
        opened.opened()
    told = str(refused.value)
    assert told.startswith(f"TMPDIR={tmp_path}/vantage-model-process-")
    assert "PYTHONSAFEPATH=1 MLFLOW_TRACKING_PASSWORD=None OPENLINEAGE_API_KEY=None HF_TOKEN=t" in told
    assert ("a line of the library" in told) == is_ours
