"""A name in a recipe becomes a rule: built in, a copy of a user's file, or a comparison with the answer."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.recipe.verifiers import EXACT_MATCH, Verifier
from vantage.schemas.recipe.work import ImportVerifier
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.source_files import SourceChanged, SourceTooLarge
from vantage.tasks.data.rows import write_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.import_verifier import run
from vantage.tasks.rewards.configuration import read_configuration
from vantage.tasks.rewards.verifier_file import BrokenVerifier
from vantage.tasks.rewards.verifiers import (
    MissingAnswers,
    load_verifier,
    verdicts,
)

WORK = PolicyEvaluation(
    kind="evaluation", candidate="a", baseline="b", judge=Judge(verifier="mine"), prompts="tasks"
)
LONGER = (
    "def verify(prompt, response, answer):\n    return answer is not None and len(response) > len(answer)\n"
)


def job_in(folder: Path, work: Any, **inputs: Path) -> StageJob:
    (folder / "output").mkdir(parents=True)
    return StageJob(
        run_id="0001-test",
        name="verifiers.mine" if isinstance(work, ImportVerifier) else "evaluation",
        attempt=1,
        stage_key="0" * 64,
        seed=0,
        work=work,
        generation=Generation(),
        inputs=inputs,
        scratch=folder,
        output=folder / "output",
    )


def imported(folder: Path, verifier: Verifier) -> Path:
    """Return the artifact's folder."""
    job = job_in(folder / "import", ImportVerifier(verifier=verifier))
    assert run(job) == StageResult(metrics={})
    return job.output


def prompts(folder: Path, **answers: list[str | None]) -> Path:
    """Return a dataset of prompts with these answers, by split; one answer where none are given."""
    folder.mkdir()
    for split in SPLITS:
        rows = [{"prompt": f"p{n}", "answer": answer} for n, answer in enumerate(answers.get(split, ["1"]))]
        write_rows(folder, split, rows)
    return folder


def test_a_built_in_rule_needs_no_artifact_and_no_answer(tmp_path: Path) -> None:
    verifier = load_verifier(job_in(tmp_path, WORK), "arithmetic", role="judge")
    cases = (["3 a+4?", "3 a+4?"], ["a3+4=7 #7", "#8"], [None, "8"])
    assert verdicts(verifier, *cases) == [True, False]


def test_a_file_is_called_from_its_copy(tmp_path: Path) -> None:
    source = tmp_path / "schemas.py"  # called like one of our packages
    source.write_text(LONGER)
    folder = imported(tmp_path, Verifier(source=str(source)))
    source.unlink()
    assert sorted(path.name for path in folder.iterdir()) == ["verifier.json", "verifier.py"]
    assert (folder / "verifier.py").read_text() == LONGER
    verifier = load_verifier(job_in(tmp_path / "read", WORK, judge=folder), "mine", role="judge")
    assert verdicts(verifier, ["p"] * 3, ["ab", "ab", "ab"], ["a", "ab", None]) == [True, False, False]
    assert sorted(path.name for path in folder.iterdir()) == ["verifier.json", "verifier.py"]


def test_where_a_file_lay_leaves_no_trace_in_the_artifact(tmp_path: Path) -> None:
    contents = []
    for place in ("one", "two"):
        source = tmp_path / place / f"{place}.py"
        source.parent.mkdir()
        source.write_text(LONGER)
        folder = imported(tmp_path / place, Verifier(source=str(source)))
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    assert json.loads(contents[0]["verifier.json"]) == {
        "source": "verifier.py",
        "function": "verify",
        "extract": None,
    }


def test_a_broken_file_is_refused_when_it_is_imported(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def verify(prompt, response):\n    return True\n")
    job = job_in(tmp_path / "import", ImportVerifier(verifier=Verifier(source=str(source))))
    with pytest.raises(
        BrokenVerifier,
        match=r"verifiers.mine.function='verify' cannot be called with prompt, response and answer by these names",
    ):
        run(job)


def test_a_comparison_is_its_words_alone(tmp_path: Path) -> None:
    verifier = Verifier(source=EXACT_MATCH, extract="#(.*)")
    folder = imported(tmp_path, verifier)
    assert [path.name for path in folder.iterdir()] == ["verifier.json"]
    assert read_configuration(folder) == verifier
    job = job_in(tmp_path / "read", WORK, judge=folder, prompts=prompts(tmp_path / "prompts"))
    compare = load_verifier(job, "mine", role="judge")
    assert verdicts(compare, ["p"] * 3, ["# 1,000", "1000", "#1 #2"], ["1000.0", "1000", "1"]) == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"test": ["1", None, None]}, "2 of the 3 test prompts of data.tasks have none"),
        ({"train": [None]}, "1 of the 1 train prompts of data.tasks have none"),
    ],
)
def test_a_comparison_without_answers_is_refused_before_anything_is_sampled(
    tmp_path: Path, answers: dict[str, list[str | None]], told: str
) -> None:
    folder = imported(tmp_path, Verifier(source=EXACT_MATCH))
    job = job_in(tmp_path / "read", WORK, judge=folder, prompts=prompts(tmp_path / "prompts", **answers))
    with pytest.raises(MissingAnswers) as caught:
        load_verifier(job, "mine", role="judge")
    assert str(caught.value) == (
        f"evaluation: verifiers.mine compares with answers, and {told}; map them with "
        "data.tasks.columns.answer, or leave those rows out"
    )


def test_prompts_without_the_column_have_no_answers(tmp_path: Path, pipeline: Any) -> None:
    folder = imported(tmp_path, Verifier(source=EXACT_MATCH))
    job = job_in(tmp_path / "read", WORK, judge=folder, prompts=pipeline.folder("prompts"))
    with pytest.raises(MissingAnswers, match="64 of the 64 train prompts of data.tasks have none"):
        load_verifier(job, "mine", role="judge")


def test_a_verifier_that_was_edited_since_the_plan_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(LONGER)
    work = ImportVerifier(verifier=Verifier(source=str(source)))
    planned = hashlib.sha256(source.read_bytes()).hexdigest()
    run(job_in(tmp_path / "a", work).model_copy(update={"source_sha256": planned}))
    source.write_text(LONGER.replace(">", "<"))
    with pytest.raises(SourceChanged, match="has changed since the run was planned"):
        run(job_in(tmp_path / "b", work).model_copy(update={"source_sha256": planned}))


def test_a_verifier_is_a_small_file(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    with source.open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(SourceTooLarge, match="a verifier is one file of Python"):
        run(job_in(tmp_path / "a", ImportVerifier(verifier=Verifier(source=str(source)))))
