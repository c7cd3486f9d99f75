"""The stored answers of judges, reward servers and teachers, from which a stage read scores and log-probabilities."""

from collections.abc import Iterator, Mapping
from typing import Any

from vantage.review.audit.evidence import Evidence
from vantage.runs.view import Broken
from vantage.schemas.records.audit import Check
from vantage.schemas.records.stored_answers import (
    ANSWERS_KIND,
    ANSWERS_PART,
    Asked,
    answers_key,
    answers_key_parts,
    read_answer,
)
from vantage.storage.refs import Ref
from vantage.tasks.training.scratch import ANSWERS

SUBJECT = "stored answers"


def is_answers(ref: Ref | None) -> bool:
    """Return whether a ref names stored answers."""
    return ref is not None and ref.artifact.kind == ANSWERS_KIND


def answers_problems(ref: Ref) -> Iterator[str]:
    """Yield problems of the key parts of stored answers. They must name the stage that was given the answers."""
    if ref.key_parts != answers_key_parts(str(ref.key_parts.get("of"))):
        yield "key_parts are not those of stored answers"
    if ref.artifact.parents:
        yield "stored answers have no parents, and the ref names some"


def answers_ref(evidence: Evidence, ref: Ref | None) -> Ref | Broken | None:
    """Return the ref of the answers that a stage was given; None: there is none, or this stage asks no server."""
    if ref is None or not _sources(ref.key_parts):
        return None
    return evidence.ref(answers_key(ref.artifact.stage_key))


def answer_checks(evidence: Evidence, ref: Ref) -> Iterator[Check]:
    """Check the answers that a stage was given: every byte, the digest of each question, and who was asked.

    Yields nothing for a stage that asks no server.
    """
    sources = _sources(ref.key_parts)
    if not sources:
        return
    kept = answers_ref(evidence, ref)
    if isinstance(kept, Broken):
        yield Check(subject=SUBJECT, outcome="wrong", detail=kept)
    elif kept is None or not evidence.has_object(kept.artifact.digest):
        yield Check(subject=SUBJECT, outcome="unchecked", detail="the store has no answers of its servers")
    else:
        problems = [
            *evidence.hashed(kept.artifact.digest).problems,
            *answers_problems(kept),
            *_other_answers(ref, kept),
        ]
        problems = problems or [*_line_problems(evidence, kept, sources)]
        counts = kept.artifact.metrics
        detail = f"{counts.get('answers') or 0:,.0f} answers to {counts.get('questions') or 0:,.0f} questions"
        yield Check(
            subject=SUBJECT,
            outcome="wrong" if problems else "ok",
            detail="; ".join(problems[:10]) if problems else detail,
        )


def _other_answers(ref: Ref, kept: Ref) -> Iterator[str]:
    """Yield a problem if the stage was given answers other than the stored ones; refs of earlier versions name none."""
    given = ref.provenance.get(ANSWERS_PART)
    if given is not None and given != kept.artifact.digest:
        yield f"they are {kept.artifact.digest[:12]}, and the stage was given {str(given)[:12]}"


def _line_problems(evidence: Evidence, kept: Ref, sources: set[str]) -> Iterator[str]:
    assert evidence.store is not None, "the answers are there"
    data = evidence.store.read_file(kept.artifact.digest, ANSWERS)
    if data is None:
        yield f"they have no file {ANSWERS}"
        return
    seen: set[Asked] = set()
    for number, line in enumerate(data.splitlines(), 1):
        try:
            answer = read_answer(line)
        except ValueError as error:
            yield f"line {number}: {' '.join(str(error).split())[:200]}"
            continue
        if answer.source not in sources:
            yield f"line {number}: {answer.source} answered, and the stage key names {', '.join(sorted(sources))}"
        if answer.asked_as in seen:
            yield f"line {number}: a second answer {answer.time} to the question {answer.question[:12]}"
        seen.add(answer.asked_as)
    if len(seen) != kept.artifact.metrics.get("answers"):
        yield f"they are {len(seen)} answers, and the ref counts {kept.artifact.metrics.get('answers')}"


def _sources(key_parts: Mapping[str, Any]) -> set[str]:
    """Return the models and versions of servers that a stage key names."""
    rewards: Mapping[str, Any] = key_parts.get("rewards") or {}
    terms = [term for reward in rewards.values() for term in reward.get("terms", ())]
    judges = {term["judge"]["model"] for term in terms if term.get("judge")}
    servers = {term["http"]["version"] for term in terms if term.get("http")}
    teacher = (key_parts.get("configuration") or {}).get("teacher_server")
    return judges | servers | ({teacher["model"]} if teacher else set())
