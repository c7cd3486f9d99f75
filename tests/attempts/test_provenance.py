"""Every kind of stage has a provenance, and a difference between two names what was and what is."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.every import every
from vantage.attempts import provenance as subject
from vantage.attempts.provenance import drift, provenance
from vantage.schemas.kinds import KINDS


@every("kind", KINDS)
def test_every_kind_of_work_has_a_provenance(kind: str) -> None:
    made_with = provenance(kind, threads=2, world_size=1)
    assert (made_with["threads"], made_with["world_size"]) == ("2", "1")
    libraries = {"torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy"}
    assert set(made_with) == {"code", "python", "device", "threads", "world_size", *libraries}
    assert made_with["torch"].startswith("2.")
    assert len(made_with["code"]) == 64


def test_drift_says_what_was_and_what_is() -> None:
    assert drift({"torch": "2.11.0", "threads": "2"}, {"torch": "2.13.0", "threads": "2"}) == [
        "torch: 2.11.0 → 2.13.0"
    ]
    assert drift({"code": "a" * 64}, {"code": "b" * 64}) == ["code: aaaaaaaaaaaa → bbbbbbbbbbbb"]
    assert drift({}, {"device": "cpu"}) == ["device: unknown → cpu"]
    assert drift({"resumed_across": "…", "device": "cpu"}, {"device": "cpu"}) == []


def test_the_gpu_is_the_one_that_the_driver_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path / "gpus" / "0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   7\n")
    (tmp_path / "gpus" / "0000:02:00.0").mkdir()
    (tmp_path / "gpus" / "0000:02:00.0" / "information").write_text("Model: another\n")
    monkeypatch.setattr(subject, "NVIDIA", tmp_path)
    assert provenance("sft", threads=1, world_size=1)["device"] == "NVIDIA H200"
    monkeypatch.setenv("VANTAGE_CUDA_GRAPHS", "0")
    assert provenance("sft", threads=1, world_size=1)["device"] == "NVIDIA H200 without CUDA graphs"
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert provenance("sft", threads=1, world_size=1)["device"] == "cpu"


def test_nothing_that_it_describes_is_loaded() -> None:
    code = (
        "import sys; from vantage.attempts.provenance import provenance; provenance('policy_optimization', threads=1, world_size=1); "
        "print({'torch', 'transformers', 'datasets', 'pyarrow', 'vantage.tasks.policy_optimization'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
