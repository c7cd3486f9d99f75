"""In-toto's and SLSA's own classes read the statements, and the same artifact gives the same bytes."""

import base64
import hashlib
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement

from tests.signing.conftest import STEPS, Ended, Keys, run_recipe
from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.records.milliseconds import LATEST
from vantage.signing import decisions
from vantage.signing.statements import BadStatement, differences, judged_by, read_statement, statement
from vantage.storage.sealed_folders import read_manifest
from vantage.storage.signatures import read_signatures


def statements(ended: Ended) -> dict[str, bytes]:
    """Return step → its only statement."""
    found = {}
    for step in STEPS:
        [stored] = read_signatures(ended.workspace.storage, str(ended.record.stages[step].stage_key))
        found[step] = stored.statement
    return found


def test_in_totos_classes_take_them(ended: Ended) -> None:
    """Unknown fields and wrong types are refused by the parser, missing digests by ``validate``."""
    for text in statements(ended).values():
        parsed = Statement.copy_from_pb(json_format.Parse(text, statement_pb2.Statement()))
        parsed.validate()
        assert parsed.pb.predicate_type == "https://slsa.dev/provenance/v1"
        predicate = json_format.Parse(json.dumps(json.loads(text)["predicate"]), provenance_pb2.Provenance())
        assert predicate.build_definition.build_type and predicate.run_details.builder.id
        assert predicate.run_details.metadata.invocation_id == f"{ended.record.run_id}/attempts/1"


def test_what_it_says_is_what_is_stored(ended: Ended) -> None:
    said = read_statement(statements(ended)["reward"])
    record, storage = ended.record, ended.workspace.storage
    stage = record.stages["reward"]
    folder = storage.local_folder(str(stage.digest))
    assert folder is not None
    names = [each["name"] for each in said["subject"]]
    assert names == ["manifest.json", *sorted(read_manifest(folder))]
    for each in said["subject"]:
        assert each["digest"]["sha256"] == hashlib.sha256((folder / each["name"]).read_bytes()).hexdigest()
    definition = said["predicate"]["buildDefinition"]
    assert {each["name"]: each["digest"]["sha256"] for each in definition["resolvedDependencies"]} == {
        "init": record.stages["sft"].digest,
        "data": record.stages["data.preferences"].digest,
    }
    assert definition["externalParameters"]["stage"]["configuration"] == stage.key_parts["configuration"]
    recipe = canonical_json(record.recipe.model_dump(mode="json")).encode()
    assert definition["externalParameters"]["recipe"]["sha256"] == hashlib.sha256(recipe).hexdigest()
    assert definition["internalParameters"]["provenance"] == stage.provenance
    measured, verdicts = said["predicate"]["runDetails"]["byproducts"]
    assert measured["annotations"]["metrics"] == {"pair_accuracy": 0.8}
    [verdict] = json.loads(base64.b64decode(verdicts["content"]))
    assert (verdict["passed"], verdict["threshold"], verdict["measured"]) == (True, 0.75, 0.8)


def test_no_clock_no_host_and_no_path_is_in_it(ended: Ended, keys: Keys) -> None:
    for text in statements(ended).values():
        said = text.decode()
        for word in (
            str(ended.workspace.root),
            str(keys.folder),
            socket.gethostname(),
            "started",
            "finished",
            "time",
        ):
            assert word not in said
        assert said == canonical_json(json.loads(said))


@pytest.mark.slow
def test_another_run_of_the_same_recipe_says_the_same_but_for_its_name(
    ended: Ended, keys: Keys, copied: Ended
) -> None:
    """The artifacts are reused, so only who judged them differs."""
    again = run_recipe(copied.workspace, keys.recipe)
    assert again.record.run_id != ended.record.run_id
    for step in STEPS:
        stored = read_signatures(copied.workspace.storage, str(ended.record.stages[step].stage_key))
        texts = sorted(each.statement.decode().replace(again.record.run_id, "RUN") for each in stored)
        assert len(texts) == 2
        first = statements(ended)[step].decode()
        judged = judged_by(ended.record, step)
        assert first in {each.statement.decode() for each in stored}
        assert first.count(judged.run_id) == 3
        assert (
            texts[0].count("RUN") + texts[1].count("RUN") == 2
        )  # the run of the recipe and the verdicts, not the run that made it


def test_one_about_other_files_is_made_as_well(ended: Ended) -> None:
    """A signature is compared with a statement about the files that it names, and those may be any."""
    ref = ended.workspace.storage.find(str(ended.record.stages["reward"].stage_key))
    assert ref is not None
    said = read_statement(statement(ref, {"model.safetensors": "a" * 64}, judged_by(ended.record, "reward")))
    of_metrics = said["predicate"]["runDetails"]["byproducts"][0]
    assert (of_metrics["name"], of_metrics.get("digest", {})) == ("metrics.json", {})
    assert of_metrics["annotations"]["metrics"] == ref.artifact.metrics


def test_of_equal_artifacts_the_one_with_the_key_is_the_step() -> None:
    """Two steps with the same files, such as a model that was only copied: each has its own stage key."""
    stages = {
        name: SimpleNamespace(digest="d" * 64, stage_key=key * 64)
        for name, key in (("sft", "1"), ("copy", "2"))
    }
    record: Any = SimpleNamespace(stages=stages)
    found = [decisions._step_of(record, "d" * 64, key * 64) for key in ("1", "2", "3")]
    assert found == ["sft", "copy", ""]


@pytest.mark.parametrize(
    ("signed_at", "is_read"), [(0, True), (LATEST, True), (-1, False), (LATEST + 1, False), (True, False)]
)
def test_a_decision_has_a_time_that_a_calendar_knows(signed_at: int, is_read: bool) -> None:
    predicate = {
        "kind": "approval",
        "run": {"id": "0001-tiny-abcdef"},
        "stage_key": "k",
        "identity": "q",
        "about": {"digest": {"sha256": "a"}},
        "signed_at": signed_at,
    }
    said = {
        "predicateType": decisions.DECISION_TYPE,
        "subject": [{"digest": {"sha256": "d"}}],
        "predicate": predicate,
    }
    if is_read:
        found = decisions.read_decision(canonical_json(said).encode())
        assert (found.signed_at, found.digest, found.about) == (signed_at, "d", "a")
        return
    with pytest.raises(BadStatement, match="is no statement about a decision"):
        decisions.read_decision(canonical_json(said).encode())


@pytest.mark.parametrize(
    ("signed", "found", "expected"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, "a.1 was signed as 2, and is 3"),
        ({"a": [1]}, {"a": [1, 3]}, "a.1 was signed as null, and is 3"),
        ({"a": [1]}, {"a": "b"}, 'a was signed as [1], and is "b"'),
        ({"a": "b"}, {"a": [1]}, 'a was signed as "b", and is [1]'),
        ({"a": {"b": 1}}, {"a": None}, 'a was signed as {"b": 1}, and is null'),
        (
            {"p": [{"name": "x", "n": 1}]},
            {"p": [{"name": "y"}, {"name": "x", "n": 2}]},
            'p.x.n was signed as 1, and is 2; p.y was signed as null, and is {"name": "y"}',
        ),
    ],
)
def test_each_difference_of_two_statements_is_named(signed: Any, found: Any, expected: str) -> None:
    assert differences(signed, found) == expected
