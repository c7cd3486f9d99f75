"""With ``graded: true``, ``builtin:reasoning_gym`` gives the score that the library's own dataset gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from pydantic import TypeAdapter, ValidationError

from tests.tasks.rewards.builtin.test_builtin_verifiers import loaded
from tests.tasks.rewards.test_builtin_dry_run import job_of
from vantage.schemas.recipe.builtin_verifiers import AnyVerifier, ReasoningGymVerifier
from vantage.schemas.records.verdict_form import RIGHT_OR_WRONG, VerdictForm
from vantage.tasks.import_verifier import run
from vantage.tasks.rewards.builtin.judge import MAX_CHARACTERS
from vantage.tasks.rewards.verifier_file import BrokenVerifier
from vantage.tasks.rewards.verifier_process import VerifierProcess
from vantage.tasks.rewards.verifiers import in_process

READ = TypeAdapter(AnyVerifier)
TASKS = (
    "basic_arithmetic",
    "chain_sum",
    "countdown",
    "family_relationships",
    "knights_knaves",
    "letter_counting",
    "mini_sudoku",
    "number_sorting",
    "sentence_reordering",
    "spell_backward",
    "syllogism",
    "word_sorting",
)


@pytest.mark.parametrize("task", TASKS)
def test_the_verdict_is_the_librarys_own_score(task: str) -> None:
    """The score is that of the entry itself, and not of the text that it is written to for the verifier."""
    dataset = reasoning_gym.create_dataset(task, size=6, seed=11)
    verify = loaded("reasoning_gym", graded=True)
    entries = list(dataset)
    responses = [str(entry["answer"]) for entry in entries]
    responses += [f"it is {responses[0]}", responses[0][:-1], "", "7", "no"]
    for entry in entries:
        for response in responses:
            own = dataset.score_answer(answer=response.strip(), entry=entry)
            assert verify("prompt", response, json.dumps(entry)) == pytest.approx(own, abs=1e-12), response
            assert type(verify("prompt", response, json.dumps(entry))) is float


def test_scores_between_wrong_and_right_are_kept() -> None:
    found = set()
    for task in TASKS:
        entries = list(reasoning_gym.create_dataset(task, size=6, seed=11))
        verify = loaded("reasoning_gym", graded=True)
        found |= {verify("p", str(entries[0]["answer"]) + " or so", json.dumps(entry)) for entry in entries}
    assert any(0 < score < 1 for score in found if isinstance(score, float)), found


def test_what_cannot_be_scored_is_0_and_an_unusable_entry_is_refused() -> None:
    entry = json.dumps(reasoning_gym.create_dataset("game_of_life", size=1, seed=3)[0])
    verify = loaded("reasoning_gym", graded=True)
    for response in ("{}", "a" * (MAX_CHARACTERS + 1)):
        assert verify("p", response, entry) == 0.0
        assert type(verify("p", response, entry)) is float
    extracted = loaded("reasoning_gym", graded=True, extract="<answer>(.*)</answer>")
    word = json.dumps(reasoning_gym.create_dataset("spell_backward", size=1, seed=3)[0])
    right = json.loads(word)["answer"]
    assert [extracted("p", each, word) for each in (f"<answer>{right}</answer>", right)] == [1.0, 0.0]
    grid = json.dumps({"answer": "1 2", "metadata": {"source_dataset": "arc_agi", "output": [[1, 2]]}})
    with pytest.raises(
        BrokenVerifier, match=r"scores the entry's own answer 0\.05, which is below at_least=1"
    ):
        verify("p", "1 2", grid)


def test_the_key_of_a_verifier_that_is_right_or_wrong_stays() -> None:
    plain = READ.validate_python({"source": "builtin:reasoning_gym"})
    assert plain.model_dump(mode="json") == {
        "source": "builtin:reasoning_gym",
        "function": "verify",
        "extract": None,
        "at_least": 1.0,
    }
    graded = READ.validate_python(
        {"source": "builtin:reasoning_gym", "graded": True, "right": {"at_least": 0.5}}
    )
    assert isinstance(graded, ReasoningGymVerifier)
    assert graded.model_dump(mode="json")["graded"] is True
    with pytest.raises(ValidationError, match="returns right or wrong, and right is for scores; remove it"):
        READ.validate_python({"source": "builtin:reasoning_gym", "right": {"at_least": 0.5}})


@pytest.mark.slow
def test_the_dry_run_finds_scores_and_a_stage_gets_them(tmp_path: Path) -> None:
    [entry] = reasoning_gym.create_dataset("word_sorting", size=1, seed=3)
    job = job_of(
        tmp_path, [json.dumps(entry)], source="builtin:reasoning_gym", graded=True, right={"at_least": 0.9}
    )
    run(job)
    process = in_process(job.output, name="mine")
    assert process.form == VerdictForm(kind="score")
    assert process.right is not None and process.right.at_least == 0.9
    try:
        found = process.verdicts([("p", entry["answer"], json.dumps(entry)), ("p", "", json.dumps(entry))])
    finally:
        process.close()
    assert found[0] == 1.0 and isinstance(found[0], float)
    assert isinstance(found[1], float) and found[1] < 1


@pytest.mark.parametrize(
    "form, wrong", [(VerdictForm(kind="score"), 0.0), (RIGHT_OR_WRONG, False), (None, False)]
)
def test_a_crash_of_the_library_is_the_score_0(
    form: VerdictForm | None, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crashed:
        takes_batch = False

        def ask(self, cases: Any) -> None: ...

        def look(self, seconds: float) -> None: ...

    process = VerifierProcess({"builtin": {}}, name="mine", function="builtin:reasoning_gym", form=form)
    monkeypatch.setattr(process, "_started", Crashed)
    monkeypatch.setattr(process, "_restarted", lambda cases: Crashed())
    monkeypatch.setattr(process, "_verdict", lambda running, case, seconds: None)
    [found] = process.verdicts([("p", "r", "a")])
    assert (found, type(found)) == (wrong, type(wrong))
