"""Compare an artifact's ref with the artifact's own files and with the stage key."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vantage.attempts.jobs import BASE_SUFFIX
from vantage.review.audit.answers import answers_problems, is_answers
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.shorter_stages import is_state, state_problems
from vantage.runs.view import Broken, Missing
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.work import SOURCE
from vantage.schemas.records.artifacts import StoredModel
from vantage.schemas.records.audit import Check
from vantage.storage.measured_file import contradictions
from vantage.storage.refs import Ref

_DIGEST = re.compile(r"[0-9a-f]{64}")


def files_check(evidence: Evidence, digest: str) -> Check:
    """Check every byte against the manifest, and the manifest against the digest."""
    hashed = evidence.hashed(digest)
    if hashed.problems:
        return Check(subject="files", outcome="wrong", detail="; ".join(hashed.problems))
    return Check(subject="files", detail=f"{hashed.num_files} files, {hashed.num_bytes:,} bytes")


def ref_check(evidence: Evidence, ref: Ref) -> Check:
    """Check the ref against the artifact's sealed files, and against the parts of its stage key."""
    if is_state(ref):
        problems = [*state_problems(ref)]
    elif is_answers(ref):
        problems = [*answers_problems(ref)]
    else:
        problems = [*_kind_problems(ref), *_parent_problems(ref)]
    sealed = evidence.sealed(ref.artifact.digest)
    if isinstance(sealed, Broken):
        problems.append(sealed)
    elif not isinstance(sealed, Missing):
        problems += contradictions(ref.artifact, sealed)
        problems += _base_problems(evidence, ref)
    if problems:
        return Check(subject="ref", outcome="wrong", detail="; ".join(problems))
    return check_of("ref", sealed) if isinstance(sealed, Missing) else Check(subject="ref")


def environment_checks(evidence: Evidence, ref: Ref) -> Iterator[Check]:
    """Check the list of distributions that were installed for the computation; yields nothing if there is no list."""
    digest = ref.provenance.get("environment")
    if isinstance(digest, str) and _DIGEST.fullmatch(digest):
        problem = evidence.environment_problem(digest)
        yield Check(subject="environment") if problem is None else check_of("environment", problem)


def _kind_problems(ref: Ref) -> Iterator[str]:
    kind = str(ref.key_parts.get("kind"))
    if kind not in KINDS:
        yield f"key_parts.kind={kind!r} is no kind of work"
    elif KINDS[kind].makes != ref.artifact.kind:
        yield f"a {kind} step makes a {KINDS[kind].makes}, and the ref says {ref.artifact.kind}"


def _parent_problems(ref: Ref) -> Iterator[str]:
    """Check that the parents in the ref are the inputs whose digests the stage key is made of."""
    parents = {
        role: digest for role, digest in ref.artifact.parents.items() if not role.endswith(BASE_SUFFIX)
    }
    named: Mapping[str, str] = ref.key_parts.get("inputs", {})
    for role, digest in named.items():
        if role == SOURCE and role not in parents:
            continue
        if role not in parents and digest in parents.values():
            continue  # a second role of one model, such as the reference
        if parents.get(role) != digest:
            claimed = parents.get(role, "absent")
            yield f"parents.{role} is {claimed[:12]}, the stage key was made with {digest[:12]}"
    inside = _digests({name: part for name, part in ref.key_parts.items() if name != "inputs"})
    for role, digest in parents.items():
        if role not in named and digest not in inside:
            yield f"parents.{role} is {digest[:12]}, of which the stage key knows nothing"
    for digest in sorted(inside - set(parents.values())):
        yield f"the stage key was made with {digest[:12]}, which is none of the parents"


def _digests(value: Any) -> set[str]:
    """Return every content digest within the parts of a key."""
    if isinstance(value, Mapping):
        return set().union(*map(_digests, value.values()), set())
    if isinstance(value, list | tuple):
        return set().union(*map(_digests, value), set())
    return {value} if isinstance(value, str) and _DIGEST.fullmatch(value) else set()


def _base_problems(evidence: Evidence, ref: Ref) -> Iterator[str]:
    """Yield problems of the base model of adapters, whose digest is also in their own files."""
    artifact = ref.artifact
    if not isinstance(artifact, StoredModel) or artifact.base is None:
        return
    assert evidence.store is not None, "the artifact is there"
    try:
        data = evidence.store.read_file(artifact.digest, "base.json")
    except (ValueError, OSError):
        return  # the check of the files reports this
    claimed = None if data is None else json.loads(data).get("base")
    if claimed != artifact.base:
        yield f"base is {artifact.base[:12]}, base.json of the artifact says {str(claimed)[:12]}"
    if artifact.base not in artifact.parents.values():
        yield f"base {artifact.base[:12]} is none of the parents"
