"""A verifier is asked about the prompts that it will judge before anything trains."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.recipe.verifiers import EXACT_MATCH, Right, Verifier
from vantage.schemas.recipe.work import ImportVerifier, VerifierUse
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.rows import write_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.import_verifier import run
from vantage.tasks.rewards.dry_run import ForeignPrompts
from vantage.tasks.rewards.verifier_file import BrokenVerifier
from vantage.tasks.rewards.verifier_scores import judged
from vantage.tasks.rewards.verifiers import MissingAnswers, UndecidedVerifier, in_process


def dataset(folder: Path, **rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for split in SPLITS:
        write_rows(folder, split, rows.get(split, [{"prompt": f"{split}?", "answer": "7"}]))
    return folder


def job_of(folder: Path, verifier: Verifier, *datasets: Path, name: str = "mine") -> StageJob:
    (folder / "output").mkdir()
    return StageJob(
        run_id="r",
        name=f"verifiers.{name}",
        attempt=1,
        stage_key="0" * 64,
        seed=0,
        work=ImportVerifier(verifier=verifier),
        generation=Generation(),
        inputs={f"prompts.{number}": data for number, data in enumerate(datasets)},
        scratch=folder,
        output=folder / "output",
    )


def own(folder: Path, body: str) -> Verifier:
    source = folder / "mine.py"
    source.write_text(f"import json, pathlib\ndef verify(response, answer, prompt):\n    {body}\n")
    return Verifier(source=str(source))


def test_it_is_asked_about_the_first_rows_of_every_side_of_every_dataset(tmp_path: Path) -> None:
    """The dry run asks the verifier about the first rows of every split of every dataset."""
    many = [{"prompt": f"p{n}", "answer": None if n in (40, 50) else str(n)} for n in range(60)]
    one, two = dataset(tmp_path / "one", train=many), dataset(tmp_path / "two")
    asked = tmp_path / "asked.jsonl"
    body = f"pathlib.Path({str(asked)!r}).open('a').write(json.dumps([prompt, response, answer]) + chr(10)); return True"
    run(job_of(tmp_path, own(tmp_path, body), one, two))
    cases = [tuple(json.loads(line)) for line in asked.read_text().splitlines()]
    assert ("p0", "0", "0") in cases and ("p0", "", "0") in cases and ("p0", "p0", "0") in cases
    assert ("p40", "", None) in cases, "the first row without an answer is among them"
    assert {prompt for prompt, _, _ in cases} == {
        "p0",
        "p1",
        "p2",
        "p3",
        "p40",
        "train?",
        "validation?",
        "test?",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return float('nan')", "verifiers.mine: verify returned nan (a float) for prompt 'train?'"),
        ("return response.split()[0] == answer", "verifiers.mine: verify raised IndexError"),
        ("return answer == 7 or None", "verifiers.mine: verify returned None (a NoneType)"),
        ("import os; os._exit(1)", "verifiers.mine: verify ended its process (exit code 1)"),
    ],
)
def test_what_would_fail_after_hours_of_training_fails_now(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises(BrokenVerifier) as broken:
        run(job_of(tmp_path, own(tmp_path, body), dataset(tmp_path / "data")))
    assert str(broken.value).startswith(told)


def test_a_comparison_with_answers_that_are_missing_is_refused_now(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", test=[{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": None}])
    with pytest.raises(MissingAnswers, match="1 of the 2 test prompts that it will judge have none"):
        run(job_of(tmp_path, Verifier(source=EXACT_MATCH), data))


def test_a_built_in_verifier_refuses_prompts_of_another_task(tmp_path: Path) -> None:
    known = dataset(tmp_path / "known", **{split: [{"prompt": "3 a+4?"}] for split in SPLITS})
    run(job_of(tmp_path, Verifier(source="builtin:arithmetic"), known, name="arithmetic"))
    rows = [{"prompt": "3 a+4?"}, {"prompt": "Who wrote Faust?"}]
    foreign = dataset(tmp_path / "foreign", **dict.fromkeys(SPLITS, rows))
    (tmp_path / "again").mkdir()
    with pytest.raises(
        ForeignPrompts,
        match=r"verifiers.arithmetic: prompt 2 of train: prompt='Who wrote Faust\?' is not a problem",
    ):
        run(job_of(tmp_path / "again", Verifier(source="builtin:arithmetic"), foreign, name="arithmetic"))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return len(response)", {"kind": "score", "names": []}),
        ("return 0.25 * (response == answer)", {"kind": "score", "names": []}),
        ("return response == answer or 0.5", {"kind": "score", "names": []}),
        (
            "return {'style': 1, 'facts': response == answer}",
            {"kind": "named_scores", "names": ["facts", "style"]},
        ),
    ],
)
def test_the_form_of_verdicts_is_found_and_kept(
    tmp_path: Path, body: str, found: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path, own(tmp_path, body), dataset(tmp_path / "data"))
    run(job)
    assert json.loads((job.output / "verdicts.json").read_text()) == found
    shown = f"scores named {', '.join(found['names'])}" if found["names"] else "one number"
    assert f"vantage: verifiers.mine returns {shown} for each of 9 responses\n" in capfd.readouterr().out


def test_the_artifact_of_a_verifier_of_right_and_wrong_has_no_new_file(tmp_path: Path) -> None:
    """The artifact's digest is in the keys of the stages that read it, so it must not change."""
    job = job_of(tmp_path, own(tmp_path, "return response == answer"), dataset(tmp_path / "data"))
    run(job)
    assert sorted(file.name for file in job.output.iterdir()) == ["verifier.json", "verifier.py"]
    written = json.loads((job.output / "verifier.json").read_text())
    assert written == {"source": "verifier.py", "function": "verify", "extract": None}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return {'a': 1.0, 'b': 2.0} if prompt != 'test?' else {'a': 1.0}",
            "for prompt 'test?', response '7', answer '7'; the dry run had scores named a, b, and this one lacks b; return the "
            "same names for every row",
        ),
        (
            "return {'a': 1.0} if prompt != 'test?' else 0.5",
            "the dry run had scores named a, and this is one number; return the same form for every row",
        ),
        (
            "return {'a': 1.0} if prompt != 'test?' else True",
            "the dry run had scores named a, and this is right or wrong; return the same form for every row",
        ),
    ],
)
def test_rows_with_verdicts_of_different_forms_are_refused(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(BrokenVerifier) as broken:
        run(job_of(tmp_path, own(tmp_path, body), dataset(tmp_path / "data")))
    assert str(broken.value).endswith(message)


@pytest.mark.parametrize(
    ("body", "right", "message"),
    [
        (
            "return response == answer",
            {"at_least": 1.0},
            "returns right or wrong, and right is for scores; remove right",
        ),
        ("return 0.5", {"at_least": 1.0, "score": "a"}, "right.score=a is a named score; remove right.score"),
        (
            "return {'a': 0.5}",
            {"at_least": 1.0, "score": "b"},
            "right.score=b is none of them; set right.score to one of them",
        ),
        (
            "return {'a': 0.5}",
            {"at_least": 1.0},
            "right.score=None is none of them; set right.score to one of them",
        ),
    ],
)
def test_a_right_that_does_not_fit_the_verdicts_is_refused(
    tmp_path: Path, body: str, right: dict[str, Any], message: str
) -> None:
    verifier = own(tmp_path, body).model_copy(update={"right": Right(**right)})
    with pytest.raises(UndecidedVerifier, match=re.escape(message)):
        run(job_of(tmp_path, verifier, dataset(tmp_path / "data")))


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("return [len(r) - sum(map(len, responses)) / len(responses) for r in responses]", True),
        ("return [number / 7 for number, _ in enumerate(responses)]", True),
        ("return [random.random() for _ in responses]", True),
        ("return [len(r) * (1 + 1e-6 * len(responses)) for r in responses]", False),
    ],
    ids=["mean of the batch", "place in the batch", "chance", "rounding"],
)
def test_a_verdict_that_depends_on_the_batch_is_refused(tmp_path: Path, body: str, changed: bool) -> None:
    source = tmp_path / "mine.py"
    source.write_text(f"import random\ndef verify_batch(prompts, responses, answers):\n    {body}\n")
    job = job_of(tmp_path, Verifier(source=str(source)), dataset(tmp_path / "data"))
    if not changed:
        run(job)
        return
    with pytest.raises(BrokenVerifier) as broken:
        run(job)
    assert str(broken.value).endswith(
        "let the verdict depend on the response alone, not on others in the batch or on chance"
    )


@pytest.mark.parametrize(
    ("body", "use", "message"),
    [
        (
            "return 0.5",
            VerifierUse(path="stages.evaluation.judge.verifier"),
            "verifiers.mine returns one number, and stages.evaluation.judge.verifier asks for right or wrong; define what is "
            "right, for example verifiers.mine.right: {at_least: 0.5}",
        ),
        (
            "return {'b': 0.5, 'a': 1.0}",
            VerifierUse(path="stages.policy.algorithm.positive_verifier"),
            "verifiers.mine returns scores named a, b, and stages.policy.algorithm.positive_verifier asks for right or wrong; "
            "define what is right, for example verifiers.mine.right: {score: a, at_least: 0.5}",
        ),
        (
            "return 0.5",
            VerifierUse(path="rewards.main.terms.0", term=VerifierTerm(verifier="mine", wrong=-1.0)),
            "rewards.main.terms.0: verifier 'mine' returns one number, and wrong=-1 is the score of a wrong response; remove "
            "wrong",
        ),
        (
            "return {'b': 0.5, 'a': 1.0}",
            VerifierUse(path="stages.policy.difficulty.term", score="mine"),
            "stages.policy.difficulty.term='mine' is no score of verifiers.mine, which returns scores named a, b; use one of: "
            "mine.a, mine.b",
        ),
        (
            "return 0.5",
            VerifierUse(path="stages.middling.term", score="mine.a"),
            "stages.middling.term='mine.a' is no score of verifiers.mine, which returns one number; use one of: mine",
        ),
    ],
)
def test_uses_that_do_not_fit_are_refused_before_anything_trains(
    tmp_path: Path, body: str, use: VerifierUse, message: str
) -> None:
    job = job_of(tmp_path, own(tmp_path, body), dataset(tmp_path / "data"))
    job = job.model_copy(update={"work": job.work.model_copy(update={"uses": (use,)})})
    with pytest.raises(ValueError) as refused:
        run(job)
    assert str(refused.value) == message
    assert not (job.output / "verdicts.json").exists()


@pytest.mark.parametrize(
    ("body", "score"), [("return {'b': 0.5, 'a': 1.0}", "mine.b"), ("return 0.5", "mine")]
)
def test_a_score_whose_passes_are_counted_is_found_among_the_verdicts(
    tmp_path: Path, body: str, score: str
) -> None:
    job = job_of(tmp_path, own(tmp_path, body), dataset(tmp_path / "data"))
    use = VerifierUse(path="stages.middling.term", score=score)
    run(job.model_copy(update={"work": job.work.model_copy(update={"uses": (use,)})}))


def test_a_threshold_makes_scores_right_or_wrong(tmp_path: Path) -> None:
    verifier = own(tmp_path, "return {'a': 0.5}").model_copy(update={"right": Right(at_least=0.5, score="a")})
    job = job_of(tmp_path, verifier, dataset(tmp_path / "data"))
    use = VerifierUse(path="stages.evaluation.judge.verifier")
    run(job.model_copy(update={"work": job.work.model_copy(update={"uses": (use,)})}))
    process = in_process(job.output, name="mine")
    try:
        assert judged(process, ["p", "q"], ["r", "s"], [None, None]).tolist() == [True, True]
    finally:
        process.close()
