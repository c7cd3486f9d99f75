"""Stages whose layers are compiled give what the same stages give when their layers run as they are written."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.alike import assert_alike
from vantage.ledger.journal import read
from vantage.models import compiled_layers
from vantage.models.compiled_layers import CannotCompile, compile_layers
from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.metric_warnings import warnings_of
from vantage.tasks.stages import run_stage
from vantage.tasks.training import compiling
from vantage.tasks.training.scratch import JOURNAL, read_committed

ROOT = Path(__file__).parents[2]
PROGRAM = """
import shutil, sys
from pathlib import Path
import torch
from vantage.models import compiled_layers
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training.attempt import Attempt

kinds = compiled_layers._kinds_of_passes
compiled_layers._kinds_of_passes = lambda *given, **options: list(kinds(*given, **options))[:2]
job, result, copied_in, copy = StageJob.model_validate_json(Path(sys.argv[1]).read_text()), *sys.argv[2:]
torch.set_num_threads(1)
finish = Attempt.finish_step

def finish_step(self, *arguments, **options):
    if self.step == int(copied_in):  # what a kill leaves after a checkpoint was written beside training
        self._writing.finish()
        shutil.copytree(job.scratch, copy, dirs_exist_ok=True)
    finish(self, *arguments, **options)

Attempt.finish_step = finish_step
Path(result).write_text(run_stage(job).model_dump_json())
"""
"""A stage in a process of its own. Only passes of several rows are tried, since it has no others: to compile the C++ for all
kinds of passes takes a minute."""
Contents = Callable[[Path], dict[str, bytes]]


def steps_of(scratch: Path) -> list[dict[str, float]]:
    return [dict(entry.metrics) for entry in read(scratch / JOURNAL)]


@pytest.fixture
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run graphs operator by operator, so that no compiler is needed."""
    monkeypatch.setattr(compiling, "compile_layers", partial(compile_layers, backend="aot_eager"))


def try_several_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out passes of a single row, which a stage with larger batches does not need: graphs take seconds each."""
    kinds = compiled_layers._kinds_of_passes
    monkeypatch.setattr(
        compiled_layers,
        "_kinds_of_passes",
        lambda *given, **options: [each for each in kinds(*given, **options) if len(each["input_ids"]) > 1],
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sft", {}),
        ("sft", {"packing": True}),
        ("sft", {"gradient_checkpointing": True}),
        ("sft", {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}),
        ("sft", {"precision": "bfloat16"}),
        ("reward", {}),
        ("value", {}),
        ("policy", {}),
    ],
)
def test_a_stage_learns_the_same(
    name: str, changes: dict[str, Any], pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changes:
        try_several_rows_only(monkeypatch)  # its graphs are of no use to other tests
        plain = pipeline.job(name, folder=tmp_path / "plain", **changes)
        expected, scratch = run_stage(plain), plain.scratch
    else:
        expected, scratch = pipeline.result(name), pipeline.root / name / "scratch"
    job = pipeline.job(name, folder=tmp_path / "compiled", compile=True, **changes)
    found = run_stage(job)
    assert "uncompiled_share" not in expected.metrics
    assert_alike(found.metrics, {**expected.metrics, "uncompiled_share": 0.0}, rel=1e-2, abs=1e-3)
    steps = steps_of(job.scratch)
    assert [step["graphs_compiled"] for step in steps] == [0.0] * len(steps), "all are made before the first"
    assert not any("graphs_compiled" in step for step in steps_of(scratch))


def test_what_cannot_be_compiled_runs_as_it_is_written_and_says_so(
    pipeline: Any,
    contents: Contents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(network: object, *, packs: bool) -> int:
        raise CannotCompile("InvalidCxxCompiler: no working C++ compiler was found")

    monkeypatch.setattr(compiling, "compile_layers", refuse)
    job = pipeline.job("sft", folder=tmp_path, compile=True)
    found = run_stage(job)
    assert contents(job.output) == contents(pipeline.folder("sft"))
    assert found.metrics == {**pipeline.results["sft"].metrics, "uncompiled_share": 1.0}
    assert "compile: true does nothing for PolicyModel, which is slower: InvalidCxxCompiler" in caplog.text
    assert "100 % of the networks run as they are written" in "".join(warnings_of(found.metrics))
    assert all("graphs_compiled" not in step for step in steps_of(job.scratch))


def test_cut_weights_are_refused() -> None:
    with pytest.raises(
        ValueError, match="compile: true has not been tried with weights that .*fsdp2 cuts; use strategy: ddp"
    ):
        SupervisedFineTuning.model_validate(
            {
                "kind": "sft",
                "data": "d",
                "compile": True,
                "resources": {"distributed": {"ranks": 2, "strategy": "fsdp2"}},
            }
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.needs("g++")
def test_compiled_code_learns_the_same_and_goes_on_exactly_in_another_process(
    pipeline: Any, contents: Contents, tmp_path: Path
) -> None:
    def attempt(job: StageJob, *, copied_in: int = -1, copy: Path | None = None) -> StageResult:
        job_file, result = tmp_path / "job.json", tmp_path / "result.json"
        job_file.write_text(job.model_dump_json())
        result.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no processes that load torch to compile
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # vectors as the CPU's flags say; a trial compiles nine files
        }
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(job_file), str(result), str(copied_in), str(copy)],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        return StageResult.model_validate_json(result.read_text())

    whole = pipeline.job("sft", folder=tmp_path / "whole", compile=True)
    cut = pipeline.job("sft", folder=tmp_path / "cut", compile=True)
    expected = attempt(whole, copied_in=3, copy=cut.scratch)
    assert expected.metrics["uncompiled_share"] == 0
    assert list((tmp_path / "cache").rglob("*.cpp")), "C++ was written, and compiled"
    steps = steps_of(whole.scratch)
    assert [step["graphs_compiled"] for step in steps] == [0.0] * len(steps), "all are made before the first"
    plain = {**pipeline.metrics("sft"), "uncompiled_share": 0.0}
    assert_alike(expected.metrics, plain, rel=1e-2, abs=1e-3)
    assert contents(whole.output) != contents(pipeline.folder("sft")), "rounded otherwise"

    assert 0 < read_committed(cut.scratch)[0] <= 3, "it goes on from a checkpoint"
    assert attempt(cut) == expected
    assert contents(cut.output) == contents(whole.output)
