"""A ref's parents against the stage key, for every step of every kind of recipe."""

import hashlib
from pathlib import Path
from typing import Any

from flows.attempts.jobs import key_parts_of, work_of
from flows.audit.artifact_claims import _kind_problems, _parent_problems
from schemas.kind import TOKENIZED
from schemas.kinds import KINDS
from schemas.recipe.recipe import ResolvedRecipe
from schemas.records.stage_key import stage_key
from schemas.steps import dependencies
from storage.refs import Ref, describe
from tests.flows.attempts.test_recorded_keys import all_recipes


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def ref_of(recipe: ResolvedRecipe, step: str) -> Ref:
    """The ref of a step whose inputs are all different."""
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
