"""Each way of tampering is found, and the finding names what was changed."""

import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import typer.main
import yaml
from mlflow.tracking import MlflowClient

from tests.review.audit.conftest import run_once
from tests.review.audit.tampering import (
    Case,
    Lines,
    assert_found,
    edit_json,
    edit_lines,
    flip_bit,
    found,
    sealed_again,
    write,
)
from vantage.cli.main import app
from vantage.runs.record import RunRecord


def finish_of(lines: Lines, stage: str) -> dict[str, Any]:
    return next(each for each in lines if each["operation"] == "finish_stage" and each["stage"] == stage)


# The files of an artifact


def flipped_bit(case: Case) -> None:
    flip_bit(case.object("sft") / "model.safetensors")


def swapped_file(case: Case) -> None:
    write(
        case.object("policy") / "model.safetensors", (case.object("sft") / "model.safetensors").read_bytes()
    )


def rewritten_manifest(case: Case) -> None:
    flip_bit(case.object("data.prompts") / "weights.txt")
    sealed_again(case.object("data.prompts"))


def rewritten_manifest_and_folder(case: Case) -> None:
    """Rewrite the manifest, name the folder after the new digest, and name that in the ref."""
    flip_bit(case.object("data.prompts") / "weights.txt")
    digest = sealed_again(case.object("data.prompts"))
    case.object("data.prompts").rename(case.object("data.prompts").with_name(digest))
    text = case.ref("data.prompts").read_text()
    write(case.ref("data.prompts"), text.replace(case.digest("data.prompts"), digest).encode())


def added_file(case: Case) -> None:
    case.object("reward").chmod(0o755)
    (case.object("reward") / "extra.py").write_text("")


def removed_file(case: Case) -> None:
    case.object("value").chmod(0o755)
    (case.object("value") / "weights.txt").unlink()


def missing_parent(case: Case) -> None:
    shutil.rmtree(case.object("data.preferences"))


# The ref


def edit_artifact(case: Case, step: str, **changes: Any) -> None:
    edit_json(case.ref(step), lambda ref: ref["artifact"].update(changes))


def parent_in_the_ref(case: Case) -> None:
    parents = json.loads(case.ref("policy").read_bytes())["artifact"]["parents"]
    edit_artifact(case, "policy", parents=parents | {"init": case.digest("model")})


def metrics_in_the_ref(case: Case) -> None:
    edit_artifact(case, "evaluation", metrics={"accuracy_gain": 0.9})


def ref_of_another_artifact(case: Case) -> None:
    """Let the ref of the policy name the SFT model, consistently with that model's own files."""
    other = json.loads(case.ref("sft").read_bytes())["artifact"]
    kept = ("uri", "digest", "files_digest", "metrics", "uncertainty")
    edit_artifact(case, "policy", **{name: other[name] for name in kept})


def ref_of_another_recipe(case: Case) -> None:
    """Let the ref name the SFT model's stage key and parts as well: another key's ref under this name."""
    write(case.ref("policy"), case.ref("sft").read_bytes())


def provenance_in_the_ref(case: Case) -> None:
    edit_json(case.ref("policy"), lambda ref: ref["provenance"].update(code="0" * 64))


def attempt_in_the_ref(case: Case) -> None:
    edit_json(case.ref("policy"), lambda ref: ref.update(attempt=7))


def unreadable_ref(case: Case) -> None:
    write(case.ref("value"), b"{}")


# The run's record


def edit_stage(case: Case, step: str, **changes: Any) -> None:
    edit_json(case.run_json, lambda run: run["stages"][step].update(changes))


def recorded_metric(case: Case) -> None:
    edit_stage(case, "evaluation", metrics={"accuracy_gain": 0.9})


def recorded_verdict(case: Case) -> None:
    edit_json(case.run_json, lambda run: run["stages"]["strict"]["verdicts"][0].update(passed=True))


def recorded_verdict_taken_out(case: Case) -> None:
    edit_stage(case, "reward", verdicts=[])


def recorded_digest(case: Case) -> None:
    edit_stage(case, "reward", digest=case.digest("sft"))


def recorded_recipe(case: Case) -> None:
    edit_json(case.run_json, lambda run: run["recipe"]["stages"]["policy"].update(learning_rate=0.5))


def recorded_gate(case: Case) -> None:
    """Change the threshold of a gate, which is in no stage key, with the verdict that goes with it."""

    def change(run: Any) -> None:
        run["recipe"]["stages"]["strict"]["gate"][0]["at_least"] = 0.05
        run["stages"]["strict"]["verdicts"][0] |= {"threshold": 0.05, "passed": True}

    edit_json(case.run_json, change)


def recorded_status(case: Case) -> None:
    edit_json(case.run_json, lambda run: run.update(status="gate_closed"))


def recorded_key_parts(case: Case) -> None:
    edit_json(case.run_json, lambda run: run["stages"]["sft"]["key_parts"].update(seed=99))


def recorded_stage_taken_out(case: Case) -> None:
    """Take the evaluation whose gate was closed out of the record."""
    edit_json(case.run_json, lambda run: run["stages"].pop("strict"))


def recorded_attempt(case: Case) -> None:
    edit_stage(case, "policy", attempt=7)


def recorded_remark(case: Case) -> None:
    edit_stage(case, "policy", remark="seen by ada")


def recorded_warnings(case: Case) -> None:
    edit_stage(case, "policy", warnings=["none"])


# The outbox


def told_reason(case: Case) -> None:
    """Change a reason that nobody else has a copy of; the outbox is no longer as long as what was sent."""
    data = case.outbox.read_bytes()
    assert b'"reason": null' in data
    write(case.outbox, data.replace(b'"reason": null', b'"reason": "it is good"', 1))


def told_metric_rows(case: Case) -> None:
    """Take a row out of the outbox, which MLflow has."""

    def change(lines: Lines) -> Lines:
        rows = next(
            each for each in lines if each["operation"] == "log_metrics" and each["stage"] == "policy"
        )["rows"]
        del rows[0]
        return lines

    edit_lines(case.outbox, change)


def told_artifact(case: Case) -> None:
    def change(lines: Lines) -> Lines:
        finish_of(lines, "value")["artifact"]["metrics"]["explained_variance"] = 0.99
        return lines

    edit_lines(case.outbox, change)


def told_verdict(case: Case) -> None:
    def change(lines: Lines) -> Lines:
        told = next(
            each for each in lines if each["operation"] == "record_verdicts" and each["stage"] == "strict"
        )
        told["verdicts"][0]["passed"] = True
        return lines

    edit_lines(case.outbox, change)


def told_recipe(case: Case) -> None:
    def change(lines: Lines) -> Lines:
        lines[0]["recipe"]["stages"]["strict"]["gate"][0]["at_least"] = 0.0
        return lines

    edit_lines(case.outbox, change)


def outbox_without_an_end(case: Case) -> None:
    edit_lines(case.outbox, lambda lines: [each for each in lines if each is not finish_of(lines, "policy")])


def outbox_of_garbage(case: Case) -> None:
    write(case.outbox, case.outbox.read_bytes() + b'{"operation": "nothing"}\n')


# MLflow


def edit_tag(case: Case, step: str, key: str, value: str) -> None:
    case.sql("UPDATE tags SET value = ? WHERE run_uuid = ? AND key = ?", value, case.mlflow_run(step), key)


def mlflow_digest_tag(case: Case) -> None:
    edit_tag(case, "policy", "vantage.digest", "0" * 64)


def mlflow_verdict_tag(case: Case) -> None:
    edit_tag(case, "strict", "vantage.verdict", "passed")


def mlflow_evidence_tag(case: Case) -> None:
    edit_tag(case, "evaluation", "vantage.gate.accuracy_gain.evidence", '{"accuracy_gain": 0.5}')


def mlflow_parent_tag(case: Case) -> None:
    edit_tag(case, "value", "vantage.parent.init", case.digest("sft"))


def mlflow_provenance_tag(case: Case) -> None:
    edit_tag(case, "sft", "vantage.provenance.torch", "9.9")


def mlflow_energy_tag(case: Case) -> None:
    edit_tag(case, "sft", "vantage.energy.gpu_joules", "0.1")


def mlflow_code_tag(case: Case) -> None:
    edit_tag(case, "sft", "vantage.code_sha256", "0" * 64)


def mlflow_pointer_tag(case: Case) -> None:
    """Let a lineage link point to another run."""
    edit_tag(case, "policy", "vantage.parent.critic.run", case.mlflow_run("reward"))


def mlflow_gate_tag_added(case: Case) -> None:
    case.sql(
        "INSERT INTO tags (key, value, run_uuid) VALUES ('vantage.gate.safety', 'safety 1.0: passed', ?)",
        case.mlflow_run("policy"),
    )


def mlflow_metric(case: Case) -> None:
    case.sql(
        "UPDATE metrics SET value = 0.0625 WHERE run_uuid = ? AND key = 'loss' AND step = 3",
        case.mlflow_run("sft"),
    )


def mlflow_headline_metric(case: Case) -> None:
    case.sql(
        "UPDATE metrics SET value = 0.9 WHERE run_uuid = ? AND key = 'accuracy_gain'",
        case.mlflow_run("evaluation"),
    )


def mlflow_row_removed(case: Case) -> None:
    case.sql(
        "DELETE FROM metrics WHERE run_uuid = ? AND key = 'loss' AND step = 2", case.mlflow_run("policy")
    )


def mlflow_row_added(case: Case) -> None:
    case.sql(
        "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) SELECT key, value, timestamp, run_uuid, 99, is_nan "
        "FROM metrics WHERE run_uuid = ? AND key = 'loss' AND step = 2",
        case.mlflow_run("policy"),
    )


def mlflow_parent_metric(case: Case) -> None:
    case.sql("UPDATE metrics SET value = 0.9 WHERE key = 'evaluation.accuracy_gain'")


def mlflow_param(case: Case) -> None:
    case.sql(
        "UPDATE params SET value = '0.5' WHERE run_uuid = ? AND key = 'learning_rate'",
        case.mlflow_run("policy"),
    )


def mlflow_recipe_param(case: Case) -> None:
    case.sql("UPDATE params SET value = '99' WHERE key = 'seed' AND value = '17'")


def mlflow_dataset(case: Case) -> None:
    case.sql("UPDATE input_tags SET value = ? WHERE value = ?", "0" * 64, case.digest("data.demonstrations"))


def mlflow_run_deleted(case: Case) -> None:
    case.sql("UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = ?", case.mlflow_run("reward"))


def mlflow_run_renamed(case: Case) -> None:
    """Rename the entry of the strict evaluation to the other one."""
    edit_tag(case, "strict", "vantage.stage", "evaluation")


def logged_model_tag(case: Case) -> None:
    case.sql(
        "UPDATE logged_model_tags SET tag_value = ? WHERE tag_key = 'vantage.parent.init' AND tag_value = ?",
        "0" * 64,
        case.digest("sft"),
    )


def mlflow_shown_metric(case: Case) -> None:
    """Change the value in MLflow's tables, which it keeps beside the rows."""
    case.sql(
        "UPDATE latest_metrics SET value = 0.9 WHERE run_uuid = ? AND key = 'accuracy_gain'",
        case.mlflow_run("evaluation"),
    )


def mlflow_shown_metric_added(case: Case) -> None:
    case.sql(
        "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES ('safety', 1, 1, 0, 0, ?)",
        case.mlflow_run("policy"),
    )


def mlflow_stage_added(case: Case) -> None:
    """Add a stage that the run does not have, with a verdict."""
    client = client_of(case)
    ours = client.get_run(case.mlflow_run("evaluation"))
    tags = {name: value for name, value in ours.data.tags.items() if name.startswith("vantage.")}
    client.create_run(ours.info.experiment_id, tags=tags | {"vantage.stage": "safety"})


def mlflow_remark(case: Case) -> None:
    case.sql(
        "INSERT INTO tags (key, value, run_uuid) VALUES ('vantage.remark', 'seen by ada', ?)",
        case.mlflow_run("policy"),
    )


def mlflow_dataset_name(case: Case) -> None:
    case.sql("UPDATE datasets SET name = 'clean' WHERE name = 'demonstrations'")


def mlflow_dataset_source(case: Case) -> None:
    case.sql("UPDATE datasets SET dataset_source = '{}' WHERE name = 'demonstrations'")


def mlflow_experiment_deleted(case: Case) -> None:
    case.sql("UPDATE experiments SET lifecycle_stage = 'deleted' WHERE name = 'fake'")


def logged_model_param(case: Case) -> None:
    case.sql("UPDATE logged_model_params SET param_value = 'nothing' WHERE param_key = 'parent.critic'")


def logged_model_kind(case: Case) -> None:
    case.sql("UPDATE logged_models SET model_type = 'reward_model' WHERE name = 'policy'")


def logged_model_run(case: Case) -> None:
    case.sql("UPDATE logged_models SET source_run_id = ? WHERE name = 'policy'", case.mlflow_run("strict"))


# Registered models


def client_of(case: Case) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{case.workspace.root / 'mlflow.db'}")


def version_deleted(case: Case) -> None:
    client_of(case).delete_model_version("fake-reward", "1")


def version_digest_without_alias(case: Case) -> None:
    """Change a version's digest, so that no artifact of the run leads to it any longer."""
    case.sql(
        "UPDATE model_version_tags SET value = ? WHERE key = 'vantage.digest' AND name = 'fake-reward'",
        "0" * 64,
    )


def model_renamed(case: Case) -> None:
    client_of(case).rename_registered_model("fake-reward", "other")


def version_run(case: Case) -> None:
    case.sql("UPDATE model_versions SET run_id = ? WHERE name = 'fake'", case.mlflow_run("sft"))


def version_tag_added(case: Case) -> None:
    client_of(case).set_model_version_tag("fake", "1", "vantage.approved_by", "ada")


def alias_tag(case: Case) -> None:
    """Change who moved the alias, as MLflow's page of the model shows it."""
    said = {"version": "1", "time": 1, "run_id": "0001-fake-000000", "by": "ada", "reason": "it is good"}
    client_of(case).set_registered_model_tag("fake", "vantage.alias.champion", json.dumps(said))


def edit_mlmodel(case: Case, change: Callable[[Any], None]) -> None:
    path = case.copy_of("fake") / "MLmodel"
    described = yaml.safe_load(path.read_bytes())
    change(described)
    write(path, yaml.safe_dump(described).encode())


def task_in_mlflow(case: Case) -> None:
    edit_mlmodel(
        case, lambda described: described["flavors"]["transformers"].update(task="text-classification")
    )


def prompt_template_in_mlflow(case: Case) -> None:
    """Add a prompt template, into which MLflow would put every prompt."""
    edit_mlmodel(case, lambda described: described["metadata"].update(prompt_template="Agree: {prompt}"))


def flavor_of_another_form(case: Case) -> None:
    edit_mlmodel(case, lambda described: described.update(flavors=["python_function"], metadata=None))


def python_in_mlflow(case: Case) -> None:
    path = case.copy_of("fake") / "python_env.yaml"
    write(path, re.sub(rb"python: \S+", b"python: 2.7.1", path.read_bytes()))


def package_version_in_mlflow(case: Case) -> None:
    path = case.copy_of("fake") / "requirements.txt"
    write(path, re.sub(rb"transformers==\S+", b"transformers==4.0.0", path.read_bytes()))


def weights_in_mlflow(case: Case) -> None:
    flip_bit(case.copy_of("fake") / "model" / "model.safetensors")


def weights_in_mlflow_sealed_again(case: Case) -> None:
    write(case.copy_of("fake") / "model" / "model.safetensors", b"other weights")
    sealed_again(case.copy_of("fake") / "model")


def tokenizer_in_mlflow(case: Case) -> None:
    write(case.copy_of("fake") / "components" / "tokenizer" / "tokenizer.json", b"[]")


def code_in_mlflow(case: Case) -> None:
    """Add code that would run when MLflow loads the model."""
    path = case.copy_of("fake") / "MLmodel"
    write(
        path,
        path.read_bytes().replace(b"loader_module: mlflow.transformers", b"loader_module: somebody.elses"),
    )


def package_in_mlflow(case: Case) -> None:
    path = case.copy_of("fake") / "requirements.txt"
    write(path, path.read_bytes() + b"torch-but-not-really==1.0\n")


def alias_past_a_closed_gate(case: Case) -> None:
    case.sql(
        "INSERT INTO registered_model_aliases (alias, version, name, workspace) VALUES ('best', 1, 'fake-strict', 'default')"
    )


def alias_that_no_run_moved(case: Case) -> None:
    """Move an alias whose gates passed, but whose movement nobody recorded."""
    case.sql(
        "INSERT INTO registered_model_aliases (alias, version, name, workspace) VALUES ('production', 1, 'fake', 'default')"
    )


def alias_removed(case: Case) -> None:
    case.sql("DELETE FROM registered_model_aliases WHERE alias = 'champion'")


def alias_without_its_publication(case: Case) -> None:
    """Take the publication that moved the alias out of the outbox."""
    edit_lines(case.outbox, lambda lines: [each for each in lines if each.get("registered_model") != "fake"])


def alias_by_a_forged_publication(case: Case) -> None:
    """Move the alias by hand, and let the outbox say that the run did it; the gate was closed."""
    alias_past_a_closed_gate(case)

    def change(lines: Lines) -> Lines:
        next(each for each in lines if each.get("registered_model") == "fake-strict")["alias"] = "best"
        return lines

    edit_lines(case.outbox, change)


def version_tag(case: Case) -> None:
    case.sql(
        "UPDATE model_version_tags SET value = 'accuracy_gain 0.900 >= 0.9: passed' WHERE key = 'vantage.gate.strict.accuracy_gain'"
    )


def version_digest(case: Case) -> None:
    case.sql(
        "UPDATE model_version_tags SET value = ? WHERE key = 'vantage.digest' AND name = 'fake'",
        case.digest("sft"),
    )


CASES: dict[Callable[[Case], None], tuple[str, str]] = {
    flipped_bit: ("sft: files", "model.safetensors: sha256 is"),
    swapped_file: ("policy: files", "model.safetensors: sha256 is"),
    rewritten_manifest: ("data.prompts: files", "manifest.json: sha256 is"),
    rewritten_manifest_and_folder: ("data.prompts", "missing: the store has no artifact"),
    added_file: ("reward: files", "extra.py: is not in the manifest"),
    removed_file: ("value: files", "weights.txt: is missing"),
    missing_parent: ("data.preferences: files", "missing: the store has no artifact"),
    parent_in_the_ref: ("policy: ref", "parents.init is"),
    metrics_in_the_ref: ("evaluation: ref", "metrics.accuracy_gain is 0.9"),
    ref_of_another_artifact: ("policy: ref", "does not confirm"),
    ref_of_another_recipe: ("policy: ref", "holds the ref of another stage key"),
    provenance_in_the_ref: ("policy: run record", "provenance differs from the ref's"),
    attempt_in_the_ref: (
        "policy: outbox",
        "by the ref attempt 7 made the artifact, and by the outbox attempt 1",
    ),
    unreadable_ref: ("value: ref", "cannot be read as a ref"),
    recorded_metric: ("evaluation: run record", "metrics.accuracy_gain is 0.9"),
    recorded_verdict: (
        "strict: gate accuracy_gain",
        "judged again it is “accuracy_gain 0.100 >= 0.9: CLOSED”",
    ),
    recorded_verdict_taken_out: ("reward: gates", "run.json has 0 verdicts, the recipe has 1 gates"),
    recorded_digest: ("reward: run record", "its digest is"),
    recorded_recipe: (
        "policy: run record",
        "its recipe makes another stage key: configuration.learning_rate",
    ),
    recorded_gate: ("run ", "recipe_digest is"),
    recorded_status: ("run ", "its status is gate closed, and no gate of it is"),
    recorded_key_parts: ("sft: run record", "key_parts differ from the ref's: seed: 17 → 99"),
    told_metric_rows: ("policy: MLflow", "metric loss at step 1 is 1, which nobody sent"),
    told_artifact: ("value: outbox", "metrics.explained_variance was recorded as 0.99"),
    told_verdict: ("strict: outbox", "the outbox has other verdicts than run.json"),
    told_recipe: (
        "run ",
        "the outbox has another recipe than run.json: stages.strict.gate.0.at_least: 0.9 → 0",
    ),
    outbox_without_an_end: ("policy: outbox", "has no artifact of policy, and run.json has one"),
    outbox_of_garbage: ("run ", "of the outbox is no operation"),
    told_reason: ("run ", "none of its lines ends there: it was changed since"),
    recorded_stage_taken_out: ("run ", "the outbox has strict, which run.json does not have"),
    recorded_attempt: ("run ", "the outbox records that attempt 1 made policy, run.json has 7"),
    recorded_remark: ("run ", "run.json remarks on policy: seen by ada"),
    recorded_warnings: ("run ", "run.json has other warnings about policy"),
    mlflow_shown_metric: (
        "evaluation: MLflow",
        "metric accuracy_gain is shown as 0.9, and its newest row is 0.1",
    ),
    mlflow_shown_metric_added: ("policy: MLflow", "metric safety is shown as 1, and has no row"),
    mlflow_stage_added: ("run ", "MLflow has a run that claims to be stage safety of this run"),
    mlflow_remark: ("policy: MLflow", "tag vantage.remark is “seen by ada”, which nobody sent"),
    mlflow_dataset_name: ("sft: MLflow", "has the name “clean”, and was sent as “demonstrations”"),
    mlflow_dataset_source: ("sft: MLflow", "has the source “{}”, and was sent as"),
    mlflow_experiment_deleted: ("policy: MLflow", "MLflow has no run of stage policy any longer"),
    logged_model_param: ("policy: MLflow", "params.parent.critic is “nothing”, and was sent as “value"),
    logged_model_kind: ("policy: MLflow", "kind is “reward_model”, and was sent as “policy”"),
    logged_model_run: ("policy: MLflow", "says that MLflow's run"),
    version_deleted: ("run ", "as fake-reward, and MLflow has no version that says it holds it"),
    version_digest_without_alias: ("run ", "as fake-reward, and MLflow has no version that says it holds it"),
    model_renamed: ("run ", "as fake-reward, and MLflow has no version that says it holds it"),
    version_run: ("policy: version fake/1", "the run of MLflow that it names made"),
    version_tag_added: ("policy: version fake/1", "tag vantage.approved_by is “ada”, which no run sent"),
    alias_tag: ("policy: alias fake@champion", "tag vantage.alias.champion of the registered model says"),
    task_in_mlflow: (
        "policy: copy fake/1",
        "flavors.transformers.task is text-classification, must be text-generation",
    ),
    prompt_template_in_mlflow: (
        "policy: copy fake/1",
        "metadata.prompt_template is Agree: {prompt}, nobody published it",
    ),
    flavor_of_another_form: (
        "policy: copy fake/1",
        "MLmodel: flavors.python_function.env.virtualenv is absent",
    ),
    python_in_mlflow: ("policy: copy fake/1", "python_env.yaml: python is '2.7.1', which nobody published"),
    package_version_in_mlflow: (
        "policy: copy fake/1",
        "requirements.txt: another transformers than MLmodel says",
    ),
    mlflow_digest_tag: ("policy: MLflow", "tag vantage.digest is “0000"),
    mlflow_verdict_tag: ("strict: MLflow", "tag vantage.verdict is “passed”, and was sent as “closed”"),
    mlflow_evidence_tag: ("evaluation: MLflow", "tag vantage.gate.accuracy_gain.evidence is"),
    mlflow_parent_tag: ("value: MLflow", "tag vantage.parent.init is"),
    mlflow_provenance_tag: ("sft: MLflow", "tag vantage.provenance.torch is “9.9”"),
    mlflow_energy_tag: ("sft: MLflow", "tag vantage.energy.gpu_joules is “0.1”, and was sent as “7.2”"),
    mlflow_code_tag: ("sft: MLflow", "tag vantage.code_sha256 is"),
    mlflow_pointer_tag: (
        "policy: MLflow",
        "tag vantage.parent.critic.run points to a run whose tag vantage.digest is",
    ),
    mlflow_gate_tag_added: (
        "policy: MLflow",
        "tag vantage.gate.safety is “safety 1.0: passed”, which nobody sent",
    ),
    mlflow_metric: ("sft: MLflow", "metric loss at step 3 is 0.0625, and was sent as 0.333"),
    mlflow_headline_metric: (
        "evaluation: MLflow",
        "metric accuracy_gain at step 0 is 0.9, and was sent as 0.1",
    ),
    mlflow_row_removed: ("policy: MLflow", "metric loss at step 2 is missing, and was sent as 0.5"),
    mlflow_row_added: ("policy: MLflow", "metric loss at step 99 is 0.5, which nobody sent"),
    mlflow_parent_metric: ("run ", "metric evaluation.accuracy_gain at step 0 is 0.9"),
    mlflow_param: ("policy: MLflow", "param learning_rate is “0.5”"),
    mlflow_recipe_param: ("run ", "param seed is “99”, and was sent as “17”"),
    mlflow_dataset: ("sft: MLflow", "dataset input"),
    mlflow_run_deleted: ("reward: MLflow", "MLflow has no run of stage reward any longer"),
    mlflow_run_renamed: ("strict: MLflow", "MLflow has no run of stage strict any longer"),
    logged_model_tag: ("MLflow", "vantage.parent.init is “0000"),
    weights_in_mlflow: ("policy: copy fake/1", "model: model.safetensors: sha256 is"),
    weights_in_mlflow_sealed_again: ("policy: copy fake/1", "manifest.json: sha256 is"),
    tokenizer_in_mlflow: ("policy: copy fake/1", "components/tokenizer: tokenizer.json: sha256 is"),
    code_in_mlflow: ("policy: copy fake/1", "loader_module is somebody.elses, must be mlflow.transformers"),
    package_in_mlflow: (
        "policy: copy fake/1",
        "requirements.txt: 'torch-but-not-really==1.0', which nobody published",
    ),
    alias_past_a_closed_gate: (
        "policy: alias fake-strict@best",
        "no run moved it there; the gate of strict is closed",
    ),
    alias_that_no_run_moved: ("policy: alias fake@production", "no run moved it there"),
    alias_removed: ("alias fake@champion", "MLflow has no such alias any longer"),
    alias_without_its_publication: ("policy: alias fake@champion", "no run moved it there"),
    alias_by_a_forged_publication: (
        "policy: alias fake-strict@best",
        "the gate of strict is closed: accuracy_gain 0.100 >= 0.9: CLOSED",
    ),
    version_tag: ("policy: version fake-strict/1", "which no run sent"),
    version_digest: ("sft: version fake/1", "that of its logged model is"),
}
"""A change by hand → the check of the run's audit that finds it, and a part of the finding."""


@pytest.mark.parametrize("tamper", CASES, ids=lambda tamper: tamper.__name__)
def test_it_is_found(case: Case, tamper: Callable[[Case], None]) -> None:
    """An audit finds this tampering, and names what was changed."""
    assert_found(case, tamper, *CASES[tamper])


def test_a_source_that_has_changed_is_a_note(case: Case) -> None:
    source = case.original / "demonstrations.jsonl"
    kept = source.read_bytes()
    try:
        source.write_bytes(kept + b"\n")
        changed = case.audit(f"{case.record.run_id}/sft")
        source.unlink()
        gone = case.audit(f"{case.record.run_id}/sft")
    finally:
        source.write_bytes(kept)
    assert (changed.exit_code, gone.exit_code) == (0, 0)
    assert "demonstrations.jsonl has changed since" in found(changed, "note")[0]
    assert "is no longer there" in found(gone, "note")[0]


def test_an_alias_that_was_moved_back_by_hand_is_found(
    case: Case, again: Callable[[Case], RunRecord]
) -> None:
    """A later run moved the alias on. The first version passed its gates, yet by no record did anyone move it back."""
    run_once(case.workspace, case.original / "fake.yaml", "stages.policy.seed=5")
    assert case.audit("fake@champion").exit_code == 0
    case.sql("UPDATE registered_model_aliases SET version = 1 WHERE alias = 'champion' AND name = 'fake'")
    report = case.audit("fake@champion")
    assert report.exit_code == 1
    assert "alias fake@champion: no run moved it there; run" in found(report)[0]
    said = found(case.audit("latest"))
    assert any("it points to version 1, by nobody's record" in each for each in said), said


def test_an_edited_list_of_what_was_installed_is_found(case: Case) -> None:
    [kept] = (case.workspace.store / "environments").glob("*.json")
    whole = kept.read_bytes()
    write(kept, whole.replace(b"torch", b"t0rch", 1))
    assert any("sft: environment: environments/" in each for each in found(case.audit("latest/sft")))
    kept.unlink()
    report = case.audit("latest/sft")
    assert (report.exit_code, found(report)) == (2, [])
    kept.write_bytes(whole)
    assert case.audit("latest/sft").exit_code == 0


def test_a_time_that_was_moved_on_leaves_open_who_moved_an_alias_last(case: Case) -> None:
    """The same length, so that the outbox still ends where it was sent."""
    lines = case.outbox.read_bytes().splitlines()
    [line] = [each for each in lines if b'"operation": "publish"' in each and b'"champion"' in each]
    time = str(json.loads(line)["time"]).encode()
    later = line.replace(time, str(int(time) + 10**9).encode())
    write(case.outbox, case.outbox.read_bytes().replace(line, later))
    report = case.audit("latest/sft")
    assert report.exit_code == 1, "the line after it has the sha256 of what it was"
    [said] = [
        each for each in found(report, "unchecked") if "a clock was wrong, or the time was edited" in each
    ]
    assert (
        "set the clock right, and if an alias is in doubt, move it again (`vantage publish` or `vantage rollback`)"
        in said
    )


@pytest.mark.slow
def test_a_ref_that_names_a_run_which_only_found_the_artifact(
    case: Case, again: Callable[[Case], RunRecord]
) -> None:
    second = again(case)
    edit_json(case.ref("policy"), lambda ref: ref.update(run_id=second.run_id))
    wrong = found(case.audit("latest/policy"))
    assert any("and by the outbox the run found it" in each for each in wrong), wrong


def test_a_second_version_and_a_second_run_that_say_they_are_ours(case: Case) -> None:
    client = client_of(case)
    first = client.get_model_version("fake", "1")
    forged = client.create_model_version("fake", first.source, first.run_id, tags=first.tags)
    client.set_registered_model_alias("fake", "champion", forged.version)
    ours = client.get_run(case.mlflow_run("evaluation"))
    tags = {name: value for name, value in ours.data.tags.items() if name.startswith("vantage.")}
    double = client.create_run(ours.info.experiment_id, tags=tags)
    client.log_metric(double.info.run_id, "accuracy_gain", 0.9)
    wrong = found(case.audit("fake@champion"))
    [double_version] = [each for each in wrong if "version 1 holds the artifact already" in each]
    [command] = re.findall(r"`vantage (publish [^`]*)`", double_version)
    known: Any = typer.main.get_command(app)
    given = known.commands["publish"].make_context("publish", command.split()[1:]).params
    assert (given["run_id"], given["model"]) == ("RUN", "fake")
    assert any("evaluation: MLflow: a second run of MLflow" in each for each in wrong), wrong
    said = found(case.audit(double.info.run_id))
    assert any(
        "MLflow's run: it claims to be evaluation, whose own entry is another" in each for each in said
    )
