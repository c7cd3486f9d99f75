"""The parents in a ref are checked against the stage key, for every step of every kind of recipe."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.attempts.test_recorded_keys import all_recipes
from vantage.attempts.jobs import key_parts_of, work_of
from vantage.review.audit.artifact_claims import _base_problems, _kind_problems, _parent_problems
from vantage.schemas.kind import TOKENIZED
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.artifacts import PolicyCheckpoint
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies
from vantage.storage.refs import Ref, describe


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def ref_of(recipe: ResolvedRecipe, step: str) -> Ref:
    """Return the ref of a step whose inputs are all different."""
    work = work_of(recipe, step)
    parents = {role: sha(read) for role, read in dependencies(recipe)[step].items()}
    has_source = KINDS[work.kind].imports is not None
    parts = key_parts_of(recipe, step, parents, source={"source": sha("source")} if has_source else {})
    row = KINDS[work.kind]
    own: dict[str, Any] = {"tokenizer_digest": sha("tokenizer")} if row.makes in TOKENIZED else {}
    if row.makes == "dataset":
        own = {"content": getattr(work, "content", None) or row.content}
    description = {"kind": row.makes, "parents": parents, **own}
    artifact = describe(description, stage_key=stage_key(parts), digest=sha(step), files_digest=sha("files"))
    return Ref(artifact=artifact, attempt=1, run_id="0001-test-abcdef", key_parts=parts, provenance={})


def test_the_parents_of_every_step_are_those_of_its_key_and_any_other_is_found(tmp_path: Path) -> None:
    kinds = set()
    for name, recipe in all_recipes(tmp_path).items():
        for step, inputs in dependencies(recipe).items():
            ref = ref_of(recipe, step)
            kinds.add(str(ref.key_parts["kind"]))
            assert [*_kind_problems(ref), *_parent_problems(ref)] == [], (name, step)
            for role in (*inputs, "more"):
                parents = {**ref.artifact.parents, role: sha("another")}
                artifact = ref.artifact.model_copy(update={"parents": parents})
                told = list(_parent_problems(ref.model_copy(update={"artifact": artifact})))
                assert any(f"parents.{role} is {sha('another')[:12]}" in each for each in told), (
                    name,
                    step,
                    role,
                )
    assert len(kinds) >= 11, "every kind of stage, and the implicit ones"


def with_artifact(ref: Ref, **changes: Any) -> Ref:
    return ref.model_copy(update={"artifact": ref.artifact.model_copy(update=changes)})


def test_a_parent_that_is_taken_out_and_two_that_are_exchanged_are_found(tmp_path: Path) -> None:
    """A role whose digest another role has too is the exception, since then nothing is lost."""
    taken_out = exchanged = 0
    for name, recipe in all_recipes(tmp_path).items():
        for step in dependencies(recipe):
            ref = ref_of(recipe, step)
            parents = ref.artifact.parents
            for role, digest in parents.items():
                others = {other: each for other, each in parents.items() if other != role}
                told = list(_parent_problems(with_artifact(ref, parents=others)))
                taken_out += digest not in others.values()
                assert bool(told) == (digest not in others.values()), (name, step, role)
            roles = sorted(ref.key_parts["inputs"].keys() & parents.keys())
            if len({parents[role] for role in roles}) == len(roles) > 1:
                first, second = roles[:2]
                swapped = parents | {first: parents[second], second: parents[first]}
                told = list(_parent_problems(with_artifact(ref, parents=swapped)))
                assert {each.partition(" ")[0] for each in told} == {f"parents.{first}", f"parents.{second}"}
                exchanged += 1
    assert taken_out > 20 and exchanged > 5


def test_a_ref_of_another_kind_than_its_step_makes_is_found(tmp_path: Path) -> None:
    for recipe in all_recipes(tmp_path).values():
        for step in dependencies(recipe):
            ref = ref_of(recipe, step)
            other = "evaluation" if ref.artifact.kind != "evaluation" else "dataset"
            [told] = _kind_problems(with_artifact(ref, kind=other))
            assert told.endswith(f"makes a {ref.artifact.kind}, and the ref says {other}")


@pytest.mark.parametrize(
    ("told", "parents", "said"),
    [
        (sha("base"), {"init": sha("base")}, []),
        (sha("other"), {"init": sha("base")}, [f"base.json of the artifact says {sha('other')[:12]}"]),
        (sha("base"), {"init": sha("other")}, ["is none of the parents"]),
    ],
)
def test_the_base_of_adapters_is_the_one_in_their_files_and_a_parent(
    told: str, parents: dict[str, str], said: list[str]
) -> None:
    own = {"uri": "objects/x", "digest": sha("sft"), "stage_key": sha("key"), "tokenizer_digest": sha("t")}
    artifact = PolicyCheckpoint.model_validate({**own, "parents": parents, "base": sha("base")})
    ref = Ref(artifact=artifact, attempt=1, run_id="0001-test-abcdef", key_parts={}, provenance={})
    read = {(artifact.digest, "base.json"): json.dumps({"base": told}).encode()}
    evidence: Any = SimpleNamespace(store=SimpleNamespace(read_file=lambda *which: read[which]))
    found = list(_base_problems(evidence, ref))
    assert len(found) == len(said)
    assert all(text in each for text, each in zip(said, found, strict=True))
