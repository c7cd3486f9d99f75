"""A built-in verifier is imported and tried: every row's answer, the machine, and the versions of its libraries."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from vantage.schemas.recipe.builtin_verifiers import AnyVerifier
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.work import ImportVerifier
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.rows import write_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.import_verifier import run
from vantage.tasks.rewards import sandbox
from vantage.tasks.rewards.configuration import LIBRARIES, read_configuration
from vantage.tasks.rewards.libraries import LibrariesDiffer
from vantage.tasks.rewards.verifier_file import BrokenVerifier
from vantage.tasks.rewards.verifiers import MissingAnswers, in_process


def job_of(folder: Path, answers: list[str | None], **fields: Any) -> StageJob:
    """Return the job that imports a verifier, whose prompts for training have these answers."""
    (folder / "output").mkdir()
    (folder / "prompts").mkdir()
    for split in SPLITS:
        rows = [{"prompt": f"p{n}", "answer": answer} for n, answer in enumerate(answers)]
        write_rows(folder / "prompts", split, rows if split == "train" else rows[:1])
    return StageJob(
        run_id="r",
        name="verifiers.mine",
        attempt=1,
        stage_key="0" * 64,
        seed=0,
        work=ImportVerifier(verifier=TypeAdapter(AnyVerifier).validate_python(fields)),
        generation=Generation(),
        inputs={"prompts.0": folder / "prompts"},
        scratch=folder,
        output=folder / "output",
    )


def test_its_fields_and_versions_are_its_artifact(tmp_path: Path) -> None:
    """The artifact of a built-in verifier holds its fields and the versions of its libraries."""
    job = job_of(tmp_path, [None], source="builtin:length", at_most=3)
    run(job)
    assert [path.name for path in job.output.iterdir()] == ["verifier.json"], "no library decides"


def test_the_revision_of_its_rules_is_in_its_artifact(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["1"], source="builtin:number", relative=0.5)
    run(job)
    assert json.loads((job.output / LIBRARIES).read_text()) == {"rules of vantage": "2"}
    assert read_configuration(job.output) == job.work.verifier
    process = in_process(job.output, name="mine")
    assert process.verdicts([("p", "1.5", "1"), ("p", "1.6", "1"), ("p", "one", "1")]) == [True, False, False]
    process.close()


def test_one_answer_that_cannot_be_compared_with_is_refused_wherever_it_is(tmp_path: Path) -> None:
    job = job_of(tmp_path, [*map(str, range(40)), "forty"], source="builtin:number")
    with pytest.raises(BrokenVerifier) as refused:
        run(job)
    assert str(refused.value) == (
        "verifiers.mine: prompt 'p40': the answer 'forty' is no number; correct the row's answer, or leave the row out"
    )


@pytest.mark.parametrize("source", ["number", "math_verify", "code", "reasoning_gym"])
def test_missing_answers_are_refused_with_their_number(tmp_path: Path, source: str) -> None:
    job = job_of(tmp_path, ["1", None, None], source=f"builtin:{source}")
    with pytest.raises(
        MissingAnswers, match="verifiers.mine compares with answers, and 2 of the 3 train prompts"
    ):
        run(job)


def test_verifiers_that_read_no_answer_need_none(tmp_path: Path) -> None:
    run(job_of(tmp_path, [None], source="builtin:length", at_most=3))


def test_a_machine_with_another_version_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, [None], source="builtin:regex", pattern="a+")
    run(job)
    versions = json.loads((job.output / LIBRARIES).read_text())
    assert set(versions) == {"google-re2"}
    in_process(job.output, name="mine").close()
    (job.output / LIBRARIES).write_text(json.dumps({"google-re2": "0.1"}))
    with pytest.raises(LibrariesDiffer) as refused:
        in_process(job.output, name="mine")
    assert str(refused.value) == (
        f"verifiers.mine: google-re2 is {versions['google-re2']} here, and the run's verifier was imported with 0.1, which is in "
        "the keys of its stages; install that version, or run the recipe anew"
    )


def test_a_verifier_that_was_imported_under_former_rules_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["1"], source="builtin:number")
    run(job)
    (job.output / LIBRARIES).unlink()  # as the first revision of the rules leaves it
    with pytest.raises(LibrariesDiffer) as refused:
        in_process(job.output, name="mine")
    assert str(refused.value) == (
        "verifiers.mine: rules of vantage is 2 here, and the run's verifier was imported with 1, which is in the keys of its "
        "stages; install that version, or run the recipe anew"
    )


def test_a_machine_that_does_not_isolate_is_refused_before_any_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "a test forbids it")
    job = job_of(tmp_path, ['{"inputs": [""], "outputs": [""]}'], source="builtin:code")
    with pytest.raises(
        sandbox.NotIsolated, match=r"verifiers.mine runs programs, .* \(a test forbids it\); use a machine"
    ):
        run(job)
