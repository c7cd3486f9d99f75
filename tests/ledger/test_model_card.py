"""The card of a model follows from entries that are written out by hand."""

from dataclasses import replace

import pytest

from tests.ledger.small_run import artifact, sha
from vantage.ledger import model_card
from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.model_card import ancestors, card_sections, licence_of, readers, stage_and_measurements
from vantage.ledger.notes import ModelPages, model_note
from vantage.ledger.operations import Input
from vantage.ledger.page_links import Link, artifact_key
from vantage.schemas.records.approvals import Approval, Question
from vantage.schemas.records.artifacts import Artifact, Dataset, Evaluation, PolicyCheckpoint
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.schemas.records.verdicts import Verdict

DATA = artifact(
    Dataset, "data", {}, content="demonstrations", metrics={"train_rows": 80.0, "test_rows": 20.0, "validation_rows": None}
)  # fmt: skip
MODEL = artifact(PolicyCheckpoint, "model", {})
SFT = artifact(PolicyCheckpoint, "sft", {}, metrics={"validation_nll": 0.5, "sft_speed": None})
POLICY = artifact(PolicyCheckpoint, "policy", {})
EVALUATION = artifact(
    Evaluation,
    "evaluation",
    {},
    metrics={"score": 0.5, "steps": 3.0},
    uncertainty={"score": Uncertainty(n=4, rows=4, standard_error=0.1)},
)
CLOSED = Verdict(
    passed=False, metric="accuracy", measured=0.5, relation=">=", threshold=0.9, on_fail="continue", evidence={"accuracy": 0.5}
)  # fmt: skip


def stage(name: str, kind: str, made: Artifact, inputs: dict[str, Input], **more: object) -> StageEntry:
    of = {"name": name, "kind": kind, "stage_key": made.stage_key, "inputs": inputs, "artifact": made}
    return StageEntry(**(of | more))  # type: ignore[arg-type]


def read(name: str, made: Artifact) -> Input:
    return Input(stage=name, artifact=made)


@pytest.fixture
def run() -> RunEntry:
    """Return a run of model, data → sft → policy → evaluation, which compares policy with sft."""
    stages = [
        stage("model", "import_model", MODEL, {}, source="builtin:tiny"),
        stage("data.d", "prepare_data", DATA, {}, source="d.jsonl", source_sha256=sha("d.jsonl")),
        stage("sft", "sft", SFT, {"init": read("model", MODEL), "data": read("data.d", DATA)}),
        stage("policy", "policy_optimization", POLICY, {"init": read("sft", SFT), "reference": read("sft", SFT)}),
        stage(
            "evaluation",
            "evaluation",
            EVALUATION,
            {"candidate": read("policy", POLICY), "baseline": read("sft", SFT)},
            verdicts=(CLOSED,),
        ),
    ]  # fmt: skip
    generation = {"max_prompt_tokens": 8, "max_response_tokens": 9, "temperature": 1.0}
    return RunEntry("0001-r-abcdef", "r", "r", stages={each.name: each for each in stages}, generation=generation)  # fmt: skip


def test_lineage_up_and_down(run: RunEntry) -> None:
    assert ancestors(run, "policy") == ["model", "data.d", "sft"]
    assert ancestors(run, "model") == []
    assert readers(run, "sft") == {"policy": ["init", "reference"], "evaluation": ["baseline"]}
    assert [each.name for each in stage_and_measurements(run, "policy")] == ["policy", "evaluation"]
    assert [each.name for each in stage_and_measurements(run, "sft")] == ["sft"], "it was only the baseline"


def test_measurements_have_intervals_by_students_t(run: RunEntry) -> None:
    """A mean of 0.5 over 4 prompts with a standard error of 0.1 is shown as 0.5 ± 0.1 · t(0.975, 3) = 0.5 ± 0.3182."""
    lines = card_sections(run, "policy", {})["Measured"]
    assert lines[2:] == ["| evaluation | score | 0.5 | 0.1818 to 0.8182 | 4 |"], "estimates alone"
    assert card_sections(run, "sft", {})["Measured"][2:] == ["| sft | validation_nll | 0.5 | – | – |"]


def test_measurements_beyond_the_most_are_counted(run: RunEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = card_sections(run, "policy", {})["Measured"]
    monkeypatch.setattr(model_card, "_MOST_ROWS", 1)
    assert card_sections(run, "policy", {})["Measured"] == whole, "there is no other"
    monkeypatch.setattr(model_card, "_MOST_ROWS", 0)
    assert card_sections(run, "policy", {})["Measured"] == [
        *whole[:2],
        "| … | 1 more: the pages of the stages' runs | | | |",
    ]


def test_data_with_source_rows_digest_and_licence(run: RunEntry) -> None:
    pages = {artifact_key(DATA): Link(run="#/d")}
    rows = card_sections(replace(run, licenses={"data.d": "CC-BY-4.0"}), "policy", pages)["Data"][2:]
    assert rows == [
        f"| model | builtin:tiny | – | `{MODEL.digest[:16]}` | Apache-2.0 (part of Vantage) |",
        f"| [data.d](#/d) | d.jsonl (sha256 `{sha('d.jsonl')[:16]}`) | 80 + 20 | `{DATA.digest[:16]}` | CC-BY-4.0 |",
    ]


def test_licences_that_nobody_named(run: RunEntry) -> None:
    assert licence_of(run, "data.d") == "not recorded"
    [said] = card_sections(run, "policy", {})["Licence"]
    assert said.endswith("Not recorded of: data.d.")
    named = replace(run, licenses={"policy": "own | <b>"})
    assert card_sections(named, "policy", {})["Licence"] == [r"own \| \<b\>, as the recipe says."]


def test_limits(run: RunEntry) -> None:
    """The limits of a model's card name lengths, temperature, closed gates and missing evaluations."""
    limits = card_sections(run, "policy", {})["Limits"]
    assert (
        limits[0]
        == "- Trained on prompts of at most 8 tokens and responses of at most 9, sampled at temperature 1.0."
    )
    assert "held-out prompts alone, by evaluation" in limits[1]
    assert any(line.startswith("- evaluation: the gate is closed: accuracy 0.500") for line in limits)
    assert any(
        "No evaluation of this run measured it" in line for line in card_sections(run, "sft", {})["Limits"]
    )


def test_what_was_closed_or_not_conclusive_before_is_a_limit_of_what_was_made_of_it(run: RunEntry) -> None:
    """The limits are those of the stage, of its measurements, and of every stage that it was made of, and no others."""
    unsure = CLOSED.model_copy(update={"passed": True, "warning": "the interval holds the threshold"})
    stages = run.stages | {
        "data.d": replace(run.stages["data.d"], verdicts=(CLOSED,)),
        "sft": replace(run.stages["sft"], verdicts=(unsure,)),
    }
    limits = card_sections(replace(run, stages=stages), "policy", {})["Limits"]
    assert any(line.startswith("- data.d: the gate is closed: accuracy 0.500") for line in limits)
    assert "- sft: accuracy: the interval holds the threshold" in limits
    limits = card_sections(replace(run, stages=stages), "data.d", {})["Limits"]
    assert not any(line.startswith(("- sft", "- evaluation")) for line in limits), limits


def test_answers_are_those_about_the_stage_and_its_measurements(run: RunEntry) -> None:
    def about(step: str, reason: str) -> Approval:
        made = run.stages[step]
        asked = {
            "subject": step,
            "stage": step,
            "stage_key": made.stage_key,
            "digest": sha(step),
            "verdicts": (CLOSED,),
        }
        return Approval(
            question=Question.model_validate(asked), approved=True, by="ada", reason=reason, time=0
        )

    told = replace(run, approvals=(about("evaluation", "a small slice"), about("sft", "good enough")))
    gates = card_sections(told, "policy", {})["Gates"]
    assert [("a small slice" in line, "good enough" in line) for line in gates] == [
        (False, False),
        (True, False),
    ]


def test_a_source_with_a_login_is_shown_without_it(run: RunEntry) -> None:
    secret = replace(run.stages["data.d"], source="https://ada:canary-secret@host/d.jsonl")
    told = card_sections(replace(run, stages=run.stages | {"data.d": secret}), "policy", {})["Data"]
    assert "canary-secret" not in "\n".join(told)


def test_the_page_of_a_version_and_of_a_logged_model(run: RunEntry) -> None:
    pages = ModelPages(run="#/policy", run_of_all="#/run", readers={"evaluation": "#/evaluation"})
    text = model_note(run, "policy", pages, {})
    head = text.splitlines()
    assert head[0].rstrip() == (
        "**r: policy** · policy made by stage [policy](#/policy) (policy optimization) of run [0001-r-abcdef](#/run)"
    )
    assert head[2].rstrip() == "**Read by:** [evaluation](#/evaluation) (candidate)"
    assert "vantage audit 0001-r-abcdef/policy" in text and "models:/" not in text
    titles = [line.removeprefix("### ") for line in head if line.startswith("### ")]
    assert titles == ["Gates", "Measured", "Limits", "Data", "Licence", "Use and check", "Parents"]
    version = model_note(
        replace(run, bills=frozenset({"policy"})), "policy", replace(pages, registered="r/3"), {}
    )
    assert 'load_model("models:/r/3")' in version and "vantage audit r/3" in version
    assert "bill_of_materials.cdx.json` under Artifacts of [policy](#/policy)" in version


def test_the_card_of_a_reused_model_names_the_run_that_made_it(run: RunEntry) -> None:
    """Run 0001 made the policy; run 0002 reuses it and publishes the version again."""
    second = replace(run, run_id="0002-r-abcdef")
    second = replace(second, stages=run.stages | {"policy": replace(run.stages["policy"], outcome="reused")})
    pages = ModelPages(run="#/policy2", run_of_all="#/run2")
    made = {artifact_key(POLICY): Link(run="#/policy1", run_name="policy of run 0001-r-abcdef")}
    head = model_note(second, "policy", pages, made).splitlines()[0].rstrip()
    assert head == (
        "**r: policy** · policy made by [policy of run 0001-r-abcdef](#/policy1) (policy optimization), "
        "and reused in run [0002-r-abcdef](#/run2)"
    )
    unknown = model_note(second, "policy", pages, {}).splitlines()[0]
    assert "made by a run that this server does not know" in unknown


@pytest.mark.parametrize(
    ("score", "accuracy", "told"),
    [(0.93, -0.029, True), (0.93, -0.001, False), (0.93, 0.029, False), (-0.93, -0.029, False), (0.001, -0.029, False)],
)  # fmt: skip
def test_a_score_that_rose_while_the_accuracy_fell_is_a_limit(
    run: RunEntry, score: float, accuracy: float, told: bool
) -> None:
    """Standard errors of 0.01 over 400 prompts give intervals of ± 0.02."""
    known = Uncertainty(n=400, rows=400, standard_error=0.01)
    gains = {"score_gain": score, "accuracy_gain": accuracy}
    uncertainty = {"score_gain": known, "accuracy_gain": known.model_copy(update={"differing": 0.04})}
    made = artifact(Evaluation, "evaluation", {}, metrics=gains, uncertainty=uncertainty)
    measured = replace(run.stages["evaluation"], artifact=made)
    lines = card_sections(replace(run, stages=run.stages | {"evaluation": measured}), "policy", {})["Limits"]
    assert any("the score rose by 0.930" in line for line in lines) == told
