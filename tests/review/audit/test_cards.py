"""An audit derives the cards of models again, and names the first sentence that differs."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.review.audit.tampering import Case, edit_json, found
from tests.review.audit.test_decisions import Place
from vantage.cli.export import _entry_of, _maker_of
from vantage.ledger import model_card
from vantage.ledger.outbox import BEFORE
from vantage.review.audit import card_texts
from vantage.review.exports.exporting import export
from vantage.runs.approving import answer
from vantage.runs.meanings import MADE, Command
from vantage.runs.named_models import model_of, open_named_model
from vantage.runs.record import RunRecord
from vantage.schemas.records.audit import AuditReport, Check
from vantage.schemas.records.sampling import ModelOpened


def cards(report: AuditReport) -> list[Check]:
    return [check for _, check in report.every_check() if "card of" in check.subject]


def exported(case: Case, step: str, folder: Path, *, run: RunRecord | None = None) -> Path:
    """Export a model as ``vantage export`` does, without loading it."""
    record = run or case.record
    model = model_of(case.workspace, record, step, ("policy", "reward_model"))
    opened = ModelOpened(uses_chat=True, stop_token_ids=(2,), stop_tokens=("<end>",), writes_date=True)
    assert model.origin is not None
    entry, made_by = _entry_of(case.workspace, model.origin), _maker_of(case.workspace, model.origin)
    export(model, opened if model.kind == "policy" else None, folder, entry=entry, made_by=made_by)
    return folder


def note_of(case: Case, step: str) -> str:
    with closing(sqlite3.connect(case.workspace.root / "mlflow.db")) as database:
        rows = database.execute(
            "SELECT a.tag_value FROM logged_model_tags a JOIN logged_model_tags b ON a.model_id = b.model_id "
            "WHERE a.tag_key = 'mlflow.note.content' AND b.tag_key = 'vantage.stage' AND b.tag_value = ?",
            (step,),
        ).fetchall()
    return str(rows[0][0])


def edit(case: Case, old: str, new: str) -> None:
    """Change the cards of all models and versions."""
    case.sql(
        "UPDATE logged_model_tags SET tag_value = replace(tag_value, ?, ?) WHERE tag_key = 'mlflow.note.content'",
        old,
        new,
    )
    case.sql("UPDATE model_versions SET description = replace(description, ?, ?)", old, new)


@pytest.mark.slow
def test_cards_are_derived_again_and_agree(case: Case) -> None:
    for target in (None, "fake@champion", "fake-reward/1"):
        checks = cards(case.audit(target))
        assert checks
        assert [(each.outcome, each.detail) for each in checks if each.outcome != "ok"] == []
    assert "Card 1 of Vantage" in note_of(case, "policy")
    assert len(note_of(case, "policy")) > 1000


@pytest.mark.parametrize(
    "old, new, said",
    [
        (
            "RUN",
            "0007-other-run-abcdef",
            "made by stage policy (policy optimization) of run 0007-other-run-abcdef",
        ),
        (
            "nothing is known of other prompts",
            "it is good on all prompts",
            "it has “it is good on all prompts or languages",
        ),
        (
            "| evaluation | accuracy_gain |",
            "| evaluation | accuracy gain |",
            "| evaluation | accuracy gain |",
        ),
    ],
)
def test_a_sentence_a_number_and_another_run_are_found(case: Case, old: str, new: str, said: str) -> None:
    old = case.record.run_id if old == "RUN" else old
    assert old in note_of(case, "policy")
    edit(case, old, new)
    report = case.audit("fake@champion")
    wrong = [each for each in cards(report) if each.outcome == "wrong"]
    assert report.exit_code == 1
    assert {each.subject for each in wrong} >= {"card of its model in MLflow", "card of version fake/1"}
    assert any(said in each.detail and "derived from the records it is" in each.detail for each in wrong), (
        wrong
    )


def test_of_several_publications_the_last_one_wrote_the_card(
    case: Case, again: Callable[[Case], RunRecord]
) -> None:
    def description() -> str:
        with closing(sqlite3.connect(case.workspace.root / "mlflow.db")) as database:
            [(text,)] = database.execute(
                "SELECT description FROM model_versions WHERE name = 'fake'"
            ).fetchall()
        return str(text)

    before = description()
    second = again(case)
    for target in ("fake@champion", second.run_id, case.record.run_id):
        report = case.audit(target)
        assert (found(report), found(report, "unchecked")) == ([], []), target
    assert second.run_id in description()
    case.sql("UPDATE model_versions SET description = ? WHERE name = 'fake'", before)
    report = case.audit("fake@champion")
    assert report.exit_code == 0
    said = f"it is as run {case.record.run_id} published it; run {second.run_id} has published it since"
    assert any(said in each for each in found(report, "note"))
    edit(case, second.run_id, "0007-other-run-abcdef")
    edit(case, case.record.run_id, "0007-other-run-abcdef")
    assert any("card of version fake/1" in each for each in found(case.audit("fake@champion")))


@pytest.mark.slow
def test_every_number_of_a_card_is_compared(case: Case) -> None:
    [row] = [
        line
        for line in note_of(case, "policy").splitlines()
        if "| accuracy_gain |" in line and "evaluation" in line
    ][:1]
    value = row.split("|")[3].strip()
    edit(case, f"| {value} |", "| 0.9876 |")
    assert any("0.9876" in each and value in each for each in found(case.audit("fake@champion")))


@pytest.mark.slow
def test_a_line_that_was_taken_out_is_found(case: Case) -> None:
    line = next(
        each for each in note_of(case, "policy").splitlines() if each.startswith("- strict: accuracy")
    )
    edit(case, f"{line}\n", "")
    assert any("card of version fake/1" in each for each in found(case.audit("fake@champion")))


def test_what_people_add_below_a_card_is_a_note(case: Case) -> None:
    case.sql("UPDATE model_versions SET description = description || '\n\nAsk Ada about it.'")
    report = case.audit("fake@champion")
    assert report.exit_code == 0
    assert any(
        "1 lines were added below it, from “Ask Ada about it.”" in each for each in found(report, "note")
    )


def test_a_card_that_is_gone_could_not_be_compared(case: Case) -> None:
    case.sql("UPDATE model_versions SET description = 'A fine model.'")
    report = case.audit("fake@champion")
    assert report.exit_code == 2
    assert any("there is no card of Vantage" in each for each in found(report, "unchecked"))


@pytest.mark.slow
@pytest.mark.parametrize("stamp", ["", "Card 0 of Vantage 0.0.9."])
def test_a_card_of_another_version_could_not_be_compared(case: Case, stamp: str) -> None:
    """The same sentences agree, whatever wrote them; others are not held to this version's words."""
    edit(case, model_card.written_by(), stamp)
    assert case.audit("fake@champion").exit_code == 0
    edit(case, "nothing is known of other prompts", "other prompts are unknown")
    report = case.audit("fake@champion")
    assert (found(report), report.exit_code) == ([], 2)
    said = "Vantage 0.0.9 (card 0; this version writes card 1)" if stamp else "an earlier version"
    assert any(
        f"could not be compared: it was written by {said}" in each for each in found(report, "unchecked")
    )


def test_a_cut_card_is_compared_as_far_as_it_goes() -> None:
    lines = [f"- sentence {number}: {'x' * 80}." for number in range(100)]
    whole, limit = "\n".join(lines), 5000
    cut = "\n".join(lines[:50]) + "\n…"
    assert card_texts.compare_cards(cut, whole, limit=limit).outcome == "ok"
    assert (
        card_texts.compare_cards(cut.replace("sentence 49", "sentence 7"), whole, limit=limit).outcome != "ok"
    )
    short = "\n".join(lines[:5]) + "\n…"
    assert card_texts.compare_cards(short, whole, limit=limit).outcome != "ok", "nothing was too long there"


def test_links_may_lead_elsewhere() -> None:
    for machine in ("http://127.0.0.1:5000/#/x", "http://[::1]:5000/#/x"):
        assert card_texts.compare_cards(f"by [a]({machine})", "by a").outcome == "ok"
    one, other = "made by [a](#/x/1) and [b\\]](#/y)", "made by [a](#/z) and b\\]"
    assert card_texts.compare_cards(one, other).outcome == "ok"
    assert card_texts.compare_cards(one, other.replace("b", "c")).outcome != "ok"


class TestExported:
    """``README.md`` of an exported folder."""

    @pytest.mark.parametrize("step", ["policy", "reward", "sft", "model"])
    def test_it_agrees_also_where_the_folder_was_moved(self, case: Case, tmp_path: Path, step: str) -> None:
        exported(case, step, tmp_path / "a folder")
        shutil.move(tmp_path / "a folder", tmp_path / "elsewhere")
        report = case.audit(str(tmp_path / "elsewhere"))
        [card] = [check for check in report.checks if check.subject == "README.md"]
        assert (card.outcome, card.detail) == ("ok", "")
        assert (found(report), found(report, "unchecked")) == ([], [])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "old, new, said",
        [
            (
                "Made by the stage `policy` of run `RUN`",
                "Made by the stage `policy` of run `0009-other`",
                "0009-other",
            ),
            ("temperature 1 over", "temperature 0.7 over", "temperature 0.7 over"),
            ("responses of at most", "responses of as many as", "responses of as many as"),
            ("## Limits", "## Strengths", "## Strengths"),
            ("RUN/policy`, or", "0009-other/policy`, or", "0009-other/policy"),
        ],
    )
    def test_a_changed_sentence_is_named(
        self, case: Case, tmp_path: Path, old: str, new: str, said: str
    ) -> None:
        card = exported(case, "policy", tmp_path / "exported") / "README.md"
        old = old.replace("RUN", case.record.run_id)
        text = card.read_text()
        assert old in text
        card.write_text(text.replace(old, new))
        report = case.audit(str(card.parent))
        assert report.exit_code == 1
        [each] = [check for check in report.checks if check.subject == "README.md"]
        assert each.outcome == "wrong"
        assert said in each.detail.partition("derived from")[0]

    def test_every_number_of_its_table_is_compared(self, case: Case, tmp_path: Path) -> None:
        card = exported(case, "policy", tmp_path / "exported") / "README.md"
        text = card.read_text()
        rows = [line for line in text.splitlines() if line.startswith("| evaluation |")]
        assert rows
        for row in rows:
            value = row.split("|")[3].strip()
            card.write_text(text.replace(row, row.replace(value, "0.9876")))
            assert any(
                "README.md: it has “| evaluation" in each for each in found(case.audit(str(card.parent)))
            )

    def test_a_registered_model_is_exported_with_what_its_run_recorded(
        self, case: Case, tmp_path: Path
    ) -> None:
        """The folder comes from MLflow's copy; its gates, metrics and provenance are those of the run."""
        target, kinds = tmp_path / "exported", ("reward_model",)
        with open_named_model(case.workspace, "fake-reward/1", Command("export", MADE), kinds=kinds) as model:
            assert model.origin is not None
            export(model, None, target, entry=_entry_of(case.workspace, model.origin))
        told = json.loads((target / "vantage.json").read_text())
        stage = case.record.stages["reward"]
        assert told["gates"] == [str(verdict) for verdict in stage.verdicts] != []
        assert (told["metrics"], told["provenance"]) == (stage.metrics, stage.provenance)
        report = case.audit(str(target))
        assert (found(report), found(report, "unchecked")) == ([], [])

    def test_what_another_run_made_is_said_to_be_made_by_it(
        self, case: Case, tmp_path: Path, again: Callable[[Case], RunRecord]
    ) -> None:
        second = again(case)
        card = exported(case, "policy", tmp_path / "exported", run=second) / "README.md"
        text = card.read_text()
        made = f"Made by the stage `policy` of run `{case.record.run_id}`"
        assert f"{made}, and found in the store by `policy` of run `{second.run_id}`" in text
        assert case.audit(str(card.parent)).exit_code == 0
        card.write_text(text.replace(made, f"Made by the stage `policy` of run `{second.run_id}`"))
        assert any(
            "README.md" in each and second.run_id in each for each in found(case.audit(str(card.parent)))
        )

    def test_a_run_that_did_not_make_it_is_wrong(self, case: Case, tmp_path: Path) -> None:
        folder = exported(case, "policy", tmp_path / "exported")
        edit_json(folder / "vantage.json", lambda told: told.update(stage="sft"))
        assert any(
            f"README.md: sft of run {case.record.run_id} has not made or found this artifact" in each
            for each in found(case.audit(str(folder)))
        )

    def test_of_an_earlier_state_of_the_run_it_is_a_note(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        place = Place(tmp_path)
        record = place.run()
        case = Case(place.workspace, record, tmp_path)
        folder = exported(case, "sft", tmp_path / "exported")
        assert case.audit(str(folder)).exit_code == 0
        answer(place.workspace, record.run_id, "sft", approved=True, by="ada", reason="a small slice")
        place.run()
        report = case.audit(str(folder))
        assert (found(report), report.exit_code) == ([], 0)
        assert any(
            "README.md: it is of an earlier state of the run" in each for each in found(report, "note")
        )

    def test_a_card_that_cannot_be_read_is_wrong(self, case: Case, tmp_path: Path) -> None:
        card = exported(case, "policy", tmp_path / "exported") / "README.md"
        card.write_bytes(b"\xff\xfe")
        assert any("README.md: it cannot be read" in each for each in found(case.audit(str(card.parent))))
        card.unlink()
        assert case.audit(str(card.parent)).exit_code == 0, "what is gone claims nothing"


def test_an_interval_before_a_link_is_no_part_of_it() -> None:
    """The brackets of an interval are escaped; otherwise a link would begin there and end at the next one, some lines
    below.
    """
    interval = "Accuracy 0.5 \\[0.4, 0.6\\]."
    found = f"{interval}\n\n| [model](#/experiments/1/runs/ab) | builtin:nano |"
    derived = f"{interval}\n\n| model | builtin:nano |"
    assert card_texts.compare_cards(found, derived).outcome == "ok"
    assert card_texts.compare_cards(found.replace("0.6", "0.7"), derived).outcome != "ok"


def test_no_card_is_missed_where_an_earlier_version_of_vantage_wrote_none(case: Case) -> None:
    """Its outbox has no sums of the lines before a line."""
    outbox = case.workspace.folder(case.record.run_id) / "ledger" / "outbox.jsonl"
    lines = [json.loads(line) for line in outbox.read_bytes().splitlines()]
    for line in lines:
        del line[BEFORE]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    outbox.write_bytes(data)
    sent = outbox.with_name("sent.json")
    sent.write_text(json.dumps(dict.fromkeys(json.loads(sent.read_bytes()), len(data))))
    case.sql("UPDATE model_versions SET description = NULL WHERE name = 'fake'")
    report = case.audit("fake@champion")
    assert (found(report), found(report, "unchecked")) == ([], [])
    subjects = {check.subject for check in cards(report)}
    assert "card of version fake/1" not in subjects
    assert "card of version fake-reward/1" in subjects, "what is there is compared"
