"""An audit of an exported or copied folder finds what is wrong with it, also where the workspace's own files are whole."""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.review.audit.tampering import Case, edit_json, flip_bit, found, sealed_again, write
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.folders import add_folder
from vantage.review.audit.walk import Walk
from vantage.runs.workspace import RunError
from vantage.schemas.records.audit import AuditReport

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "weights.txt")


@pytest.fixture
def exported(case: Case) -> Path:
    """Return a folder as ``vantage export`` writes it of the policy, without the files that it writes anew."""
    folder = case.workspace.root / "exported"
    folder.mkdir()
    for name in FILES:
        shutil.copy(case.object("policy") / name, folder / name)
    manifest = json.loads((case.object("policy") / "manifest.json").read_bytes())
    files = {each["path"]: each["sha256"] for each in manifest["files"] if each["path"] != "metrics.json"}
    ref = json.loads(case.ref("policy").read_bytes())["artifact"]
    told = {
        "digest": ref["digest"], "stage_key": ref["stage_key"], "run_id": case.record.run_id, "stage": "policy",
        "parents": {role: {"digest": digest} for role, digest in ref["parents"].items()}, "metrics": ref["metrics"],
        "gates": [], "files": files,
    }  # fmt: skip
    (folder / "vantage.json").write_text(json.dumps(told))
    return folder


def list_anew(folder: Path, name: str) -> None:
    """Write the list of files again, with what a file is now."""
    sha = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    edit_json(folder / "vantage.json", lambda told: told["files"].update({name: sha}))


def test_an_exported_folder_is_compared_with_the_artifact(case: Case, exported: Path) -> None:
    assert case.audit(str(exported)).exit_code == 0
    write(exported / "model.safetensors", b"other")
    assert "model.safetensors: sha256 is" in found(case.audit(str(exported)))[0]
    shutil.copy(case.object("policy") / "model.safetensors", exported / "model.safetensors")
    tokenizer = exported / "components" / "tokenizer"
    tokenizer.mkdir(parents=True)
    (tokenizer / "tokenizer.json").write_text("[]")
    (tokenizer / "code.py").write_text("")
    (exported / "MLmodel").write_text("flavors: {python_function: {loader_module: somebody.elses}}")
    for name in ("requirements.txt", "python_env.yaml"):
        shutil.copy(case.copy_of("fake") / name, exported / name)
    said = found(case.audit(str(exported)))[0]
    assert "components/tokenizer/tokenizer.json: sha256 is" in said
    assert "components/tokenizer/code.py: is not in vantage.json" in said
    assert "MLmodel: flavors.python_function.loader_module is somebody.elses, must be" in said


ODD = (
    None,
    0,
    1.5,
    True,
    "",
    "text",
    [],
    [[1, 2]],
    [["a", "b"]],
    {},
    {"a": 1},
    {"a": None},
    {"a": ["b"]},
    {"a": {"b": []}},
)


def test_odd_values_in_an_exported_list_end_in_checks_or_in_a_sentence(case: Case, exported: Path) -> None:
    """Anybody may have written the list, so any value in it must be handled."""
    told = json.loads((exported / "vantage.json").read_bytes())
    with Evidence(case.workspace) as evidence:
        for field in (*told, "signatures", "merged_into"):
            for value in ODD:
                write(exported / "vantage.json", json.dumps({**told, field: value}).encode())
                with suppress(RunError):
                    _, checks = add_folder(evidence, Walk(evidence), exported)
                    assert checks


def tell(**changes: Any) -> Callable[[Path], None]:
    """Write other values into ``vantage.json``."""
    return lambda folder: edit_json(folder / "vantage.json", lambda told: told.update(changes))


def weights_and_their_list(folder: Path) -> None:
    """Write other weights, with a list that agrees with them."""
    write(folder / "model.safetensors", b"other weights")
    list_anew(folder, "model.safetensors")


def weights_their_list_and_stage_key(folder: Path) -> None:
    """Write other weights, their list, and a stage key that no ref of the artifact has."""
    weights_and_their_list(folder)
    tell(stage_key="0" * 64)(folder)


def weights_that_are_said_to_be_merged(folder: Path) -> None:
    """Record the weights as merged, as an export of adapters does, whose files are no artifact's own."""
    weights_and_their_list(folder)
    tell(merged_into="0" * 64)(folder)


def file_taken_out(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()


def file_and_its_line_taken_out(folder: Path) -> None:
    file_taken_out(folder)
    edit_json(folder / "vantage.json", lambda told: told["files"].pop("tokenizer_config.json"))


def link_in_the_place_of_a_file(folder: Path) -> None:
    """Put a link in the place of a file: what it leads to may change after the audit."""
    elsewhere = shutil.move(folder / "model.safetensors", folder.with_name("elsewhere"))
    (folder / "model.safetensors").symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("change", "where", "said"),
    [
        (weights_and_their_list, "vantage.json", "model.safetensors: vantage.json says sha256"),
        (weights_their_list_and_stage_key, "vantage.json", "stage_key is 000000000000, the artifact's is"),
        (weights_that_are_said_to_be_merged, "vantage.json", "merged_into is 000000000000, the artifact's base"),
        (file_taken_out, "folder", "tokenizer_config.json: is missing"),
        (file_and_its_line_taken_out, "vantage.json", "tokenizer_config.json: is in the artifact, and not in"),
        (link_in_the_place_of_a_file, "folder", "model.safetensors: is a link"),
        (tell(metrics={"score": 9.0}), "vantage.json", "metric score is 9.0, the artifact's is 1.5"),
        (tell(parents={}), "vantage.json", "parent critic is None, the artifact's is"),
        (tell(gates=["safety 1.0 >= 0.9: passed"]), "vantage.json", "and no run has recorded these"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)  # fmt: skip
def test_an_edited_export_is_found(
    case: Case, exported: Path, change: Callable[[Path], None], where: str, said: str
) -> None:
    change(exported)
    report = case.audit(str(exported))
    assert report.exit_code == 1, found(report, "unchecked")
    assert any(f": {where}: " in each and said in each for each in found(report)), found(report)


def test_gates_of_a_run_that_is_not_here_are_not_compared(case: Case, exported: Path) -> None:
    tell(gates=["safety 1.0 >= 0.9: passed"], run_id="0009-other-abcdef")(exported)
    report = case.audit(str(exported))
    assert (found(report), report.exit_code) == ([], 2)
    assert "run 0009-other-abcdef is not in" in found(report, "unchecked")[0]


def elsewhere(case: Case, place: Path, change: Callable[[Path], object]) -> AuditReport:
    """Return the audit of a changed folder beside a workspace that nobody touched."""
    change(place)
    report = case.audit(str(place))
    assert all(": folder: " in each for each in found(report)), found(report)
    return report


def test_a_copied_artifact_is_hashed_itself(case: Case, tmp_path: Path) -> None:
    copied = shutil.copytree(case.object("reward"), tmp_path / "copied")
    report = elsewhere(case, copied, lambda folder: flip_bit(folder / "model.safetensors"))
    assert "model.safetensors: sha256 is" in found(report)[0]


def test_a_manifest_that_was_rewritten_is_not_that_of_the_folders_name(case: Case, tmp_path: Path) -> None:
    def rewrite(folder: Path) -> None:
        flip_bit(folder / "model.safetensors")
        sealed_again(folder)

    copied = shutil.copytree(case.object("reward"), tmp_path / case.digest("reward"))
    report = elsewhere(case, copied, rewrite)
    assert "the manifest was rewritten" in found(report)[0]
    assert report.exit_code == 1


def test_mlflows_copy_elsewhere_is_hashed_itself(case: Case, tmp_path: Path) -> None:
    copied = shutil.copytree(case.copy_of("fake-reward"), tmp_path / "copied")
    report = elsewhere(case, copied, lambda folder: flip_bit(folder / "model" / "model.safetensors"))
    assert "model: model.safetensors: sha256 is" in found(report)[0]
