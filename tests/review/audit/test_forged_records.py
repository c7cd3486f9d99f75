"""An audit finds careful forgeries in the ref, ``run.json`` and the outbox, and names what was changed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.review.audit.tampering import Case, Lines, assert_found, edit_json, edit_lines, found
from vantage.flows.garbage_collection import collect
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.record import RunRecord
from vantage.signing.keys import new_key
from vantage.signing.signing import sign_all


def edit_stage(case: Case, step: str, **changes: Any) -> None:
    edit_json(case.run_json, lambda run: run["stages"][step].update(changes))


def kind_in_the_ref(case: Case) -> None:
    edit_json(case.ref("reward"), lambda ref: ref["artifact"].update(kind="value_model"))


def evidence_of_a_verdict(case: Case) -> None:
    """Change the numbers beside the one that was compared; the verdict reads as before."""
    edit_json(
        case.run_json,
        lambda run: run["stages"]["evaluation"]["verdicts"][0]["evidence"].update(accuracy_gain=0.9),
    )


def digest_of_a_parent(case: Case) -> None:
    edit_stage(case, "value", digest=case.digest("sft"))


def closed_gate(case: Case) -> None:
    edit_stage(case, "value", status="gate_closed")


def closed_gate_of_a_completed_run(case: Case) -> None:
    closed_gate(case)


def status_of_one_that_waits(case: Case) -> None:
    edit_json(case.run_json, lambda run: run.update(status="waiting_approval"))


def copy_that_nobody_made(case: Case) -> None:
    edit_json(case.run_json, lambda run: run["copies"].update(other=run["copies"]["fake"]))


def opening_of(lines: Lines, stage: str) -> dict[str, Any]:
    return next(each for each in lines if each["operation"] == "open_stage" and each["stage"] == stage)


def told_params(case: Case) -> None:
    def change(lines: Lines) -> Lines:
        opening_of(lines, "policy")["params"]["invented"] = 1
        return lines

    edit_lines(case.outbox, change)


def told_input(case: Case) -> None:
    """Record another input of the policy's stage than the one that its maker recorded."""

    def change(lines: Lines) -> Lines:
        critic = opening_of(lines, "policy")["inputs"]["critic"]["artifact"]
        critic["metrics"]["explained_variance"] = 0.99
        return lines

    edit_lines(case.outbox, change)


def publication_taken_out(case: Case) -> None:
    edit_lines(
        case.outbox, lambda lines: [each for each in lines if each.get("registered_model") != "fake-reward"]
    )


def outbox_deleted(case: Case) -> None:
    """Delete the outbox, though no run was removed that could have taken it along."""
    case.outbox.unlink()


def point(case: Case, alias: str) -> None:
    """Move an alias by hand."""
    case.sql(
        "INSERT INTO registered_model_aliases (alias, version, name, workspace) VALUES (?, 1, 'fake', 'default')",
        alias,
    )


def publication_of(lines: Lines, name: str) -> dict[str, Any]:
    return next(each for each in lines if each.get("registered_model") == name)


def alias_that_the_recipe_does_not_name(case: Case) -> None:
    """Let a run move an alias that its recipe does not name. Only people may move such aliases, and they are named."""
    point(case, "production")

    def change(lines: Lines) -> Lines:
        publication_of(lines, "fake")["alias"] = "production"
        return lines

    edit_lines(case.outbox, change)


def alias_by_an_operation_that_was_never_sent(case: Case) -> None:
    """Add a movement to the end of the outbox that MLflow has not got, and move the alias to where it says."""
    point(case, "production")

    def change(lines: Lines) -> Lines:
        told = publication_of(lines, "fake")
        return [*lines, told | {"alias": "production", "by": "ada", "time": told["time"] + 1}]

    edit_lines(case.outbox, change)


CASES: dict[Callable[[Case], None], tuple[str, str]] = {
    kind_in_the_ref: (
        "reward: ref",
        "a reward_model step makes a reward_model, and the ref says value_model",
    ),
    evidence_of_a_verdict: ("evaluation: gate accuracy_gain", "(evidence differ)"),
    digest_of_a_parent: ("policy ← critic", "by run.json value made"),
    closed_gate: ("policy ← critic", "value is gate closed, so nothing could be made of it"),
    closed_gate_of_a_completed_run: ("run ", "its status is completed, and the gate of value is closed"),
    status_of_one_that_waits: (
        "run ",
        "the outbox has the status completed, run.json waiting approval",
    ),
    copy_that_nobody_made: ("run ", "was published as other, and the outbox does not"),
    told_params: ("policy: outbox", "the outbox has other params than the recipe: invented"),
    told_input: ("policy ← critic", "as policy read it, metrics.explained_variance was recorded as 0.99"),
    publication_taken_out: ("reward: version fake-reward/1", "no run published it"),
    outbox_deleted: ("policy: alias fake@champion", "no run moved it there"),
    alias_that_the_recipe_does_not_name: (
        "policy: alias fake@production",
        "its recipe publishes no policy as fake@production",
    ),
    alias_by_an_operation_that_was_never_sent: ("policy: alias fake@production", "no run moved it there"),
}
"""A change by hand → the check of the run's audit that finds it, and a part of the finding."""


@pytest.mark.parametrize("tamper", CASES, ids=lambda tamper: tamper.__name__)
def test_it_is_found(case: Case, tamper: Callable[[Case], None]) -> None:
    """An audit finds this forgery in the records, and names what was changed."""
    assert_found(case, tamper, *CASES[tamper])


def test_what_mlflow_has_not_got_is_not_checked_and_never_agrees(case: Case) -> None:
    """MLflow lacks the last operation, as if it had been away when that was recorded."""
    last = case.outbox.read_bytes().splitlines(keepends=True)[-1]
    edit_json(
        case.outbox.with_name("sent.json"),
        lambda ends: ends.update({place: end - len(last) for place, end in ends.items()}),
    )
    report = case.audit()
    assert (found(report), report.exit_code) == ([], 2)
    assert any("has not got the last 1 operations yet" in each for each in found(report, "unchecked"))


def test_what_mlflow_is_said_to_have_refused_is_not_checked_and_never_agrees(case: Case) -> None:
    """Whoever takes rows out of MLflow and writes that it refused them gets no audit that says: all agrees."""
    lines = [json.loads(line) for line in case.outbox.read_bytes().splitlines()]
    [destination] = json.loads(case.outbox.with_name("sent.json").read_bytes())
    told = next(each for each in lines if each["operation"] == "log_metrics" and each["stage"] == "policy")
    refused = case.outbox.with_name("refused.jsonl")
    refused.write_text(json.dumps({"destination": destination, "operation": told}) + "\n")
    report = case.audit()
    assert (found(report), report.exit_code) == ([], 2)
    assert any("MLflow refused 1 operations" in each for each in found(report, "unchecked"))


def test_of_a_removed_run_mlflow_still_has_to_say_what_is_sealed(
    case: Case, again: Callable[[Case], RunRecord]
) -> None:
    """The outbox of a removed run is gone, so only digest, parents and headline metrics can be compared."""
    second, entry = again(case), case.mlflow_run("evaluation")
    collect(case.workspace, keep_last=1)
    unchecked = found(case.audit(second.run_id), "unchecked")
    assert any(
        "evaluation: MLflow: its digest, parents and headline metrics agree" in each for each in unchecked
    )
    case.sql("UPDATE metrics SET value = 0.9 WHERE run_uuid = ? AND key = 'accuracy_gain'", entry)
    said = found(case.audit(second.run_id))
    assert any("metric accuracy_gain is not 0.1, which is sealed in the artifact" in each for each in said), (
        said
    )
    case.sql("UPDATE metrics SET value = 0.1 WHERE run_uuid = ? AND key = 'accuracy_gain'", entry)
    case.sql("UPDATE tags SET value = ? WHERE run_uuid = ? AND key = 'vantage.digest'", "0" * 64, entry)
    said = found(case.audit(second.run_id))
    assert any("evaluation: MLflow: tag vantage.digest is “0000" in each for each in said), said


def test_a_signature_holds_for_the_verdicts_that_were_signed(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A threshold that nobody would meet is lowered after signing; and an artifact without a ref has no signature."""
    key = new_key(tmp_path_factory.mktemp("keys") / "key.pem")
    sign_all(case.workspace, case.record, list(case.record.stages), key)

    def signatures() -> dict[str, str]:
        with Evidence(case.workspace, required_keys=[key.public]) as evidence:
            report = audit(evidence, case.record.run_id)
        return {
            where: f"{check.outcome}: {check.detail}"
            for where, check in report.every_check()
            if check.subject == "signature"
        }

    assert {each.partition(":")[0] for each in signatures().values()} == {"ok"}
    edit_json(case.run_json, lambda run: run["stages"]["strict"]["verdicts"][0].update(passed=True))
    case.ref("data.prompts").unlink()
    told = signatures()
    assert "wrong: " in told["strict"] and "the verdicts in the record of run" in told["strict"]
    assert told["data.prompts"] == (
        f"unchecked: key {key.public.short} is required, and there is no ref to compare"
    )
