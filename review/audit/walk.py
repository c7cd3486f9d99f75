"""Walk from artifacts through their parents to datasets and base models, and then check each of them.

All artifacts are found first. Then all files are hashed in parallel, each once, even if several edges lead to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from vantage.attempts.jobs import BASE_SUFFIX, work_of
from vantage.ledger.replay import Replay
from vantage.review.audit.answers import answer_checks, answers_ref, is_answers
from vantage.review.audit.artifact_claims import environment_checks, files_check, ref_check
from vantage.review.audit.cards import model_card_checks
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.guards import guard_checks
from vantage.review.audit.input_sources import source_check
from vantage.review.audit.mlflow_claims import check_without_outbox, mlflow_check
from vantage.review.audit.run_claims import ENDED, edge_problems, outbox_check, record_checks, steps_of
from vantage.review.audit.shorter_stages import (
    edge_problem,
    gone_on_from,
    is_state,
    shorter_checks,
    shorter_in,
)
from vantage.review.audit.signatures import signature_checks, unsigned
from vantage.review.audit.versions import version_checks, versions_of
from vantage.runs.record import RunRecord
from vantage.runs.view import Broken, Missing
from vantage.schemas.recipe.extending import PREVIOUS, PREVIOUS_ROLES, PREVIOUS_STATE
from vantage.schemas.recipe.work import SOURCE, copied_stage
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.audit import AuditedArtifact, Check, Edge
from vantage.schemas.records.extensions import Shorter, state_key
from vantage.storage.refs import Ref
from vantage.storage.removed import Removal

_PUBLISHED = ("policy", "reward_model")


@dataclass
class Found:
    """An artifact of the lineage, before it is checked."""

    digest: str
    stage_key: str | None
    ref: Ref | None
    """The ref of its stage key, if that names this artifact."""
    problem: Check | None = None
    """Reason why there is no such ref."""
    run_id: str | None = None
    step: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Runs that are audited as targets, each with its step that has this artifact."""
    parents: dict[str, "Found"] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.step or 'artifact'}-{self.digest[:12]}-{(self.stage_key or '')[:6]}"


class Walk:
    """The lineage of some artifacts."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.found: dict[tuple[str, str | None], Found] = {}
        self.first: set[str] = set()
        """Ids of artifacts that begin the tree, even if other artifacts are made of them."""
        self.checked_versions: set[tuple[str, str]] = set()
        """Name and version of the registered versions that are checked elsewhere."""

    # Finding the artifacts

    def add(self, digest: str, stage_key: str | None, *, asked: tuple[str, str] | None = None) -> Found:
        """Return an artifact, and add its inputs at any depth.

        Args:
            asked: a run that is audited as a target, and its step that has the artifact.
        """
        first = self._look_up(digest, stage_key, asked)
        waiting = [first]
        while waiting:
            each = waiting.pop()
            for role, parent in self._parents(each).items():
                key = self._key_of_parent(each, role, parent)
                if (parent, key) not in self.found:
                    waiting.append(self._look_up(parent, key, None))
                each.parents[role] = self.found[parent, key]
        return first

    def add_digest(self, digest: str) -> None:
        """Add an artifact by every ref that names it; without one, by the first run that recorded it."""
        refs = self.evidence.refs_of.get(digest, [])
        for ref in refs:
            self.add(digest, ref.artifact.stage_key)
        if refs:
            return
        for run_id in self.evidence.run_ids:
            record = self.evidence.record(run_id)
            for step, stage in record.stages.items() if isinstance(record, RunRecord) else ():
                if stage.digest == digest:
                    self.add(digest, stage.stage_key, asked=(run_id, step))
                    return
        self.add(digest, None)

    def runs(self) -> list[str]:
        """Return every run that made one of the artifacts, or is audited as a target; the earliest first."""
        made = {each.run_id for each in self.found.values() if each.run_id}
        return sorted(made | {run_id for each in self.found.values() for run_id, _ in each.asked})

    def _look_up(self, digest: str, stage_key: str | None, asked: tuple[str, str] | None) -> Found:
        known = self.found.get((digest, stage_key))
        if known is None:
            known = self._new(digest, stage_key, asked)
            self.found[digest, stage_key] = known
        if asked is not None and asked not in known.asked:
            known.asked.append(asked)
        return known

    def _new(self, digest: str, stage_key: str | None, asked: tuple[str, str] | None) -> Found:
        ref = None if stage_key is None else self.evidence.ref(stage_key)
        found = Found(digest, stage_key, None)
        kept = self._ref_of_removed(digest, stage_key) if ref is None else None
        if isinstance(ref, Broken):
            found.problem = Check(subject="ref", outcome="wrong", detail=ref)
        elif kept is not None:
            found.ref, found.run_id = kept, kept.run_id
        elif ref is None:
            said = (
                "no ref names it"
                if stage_key is None
                else f"there is no ref of its stage key {stage_key[:12]}"
            )
            found.problem = Check(subject="ref", outcome="unchecked", detail=said)
        elif ref.artifact.digest != digest:
            found.problem = self._other_artifact(ref, digest)
        else:
            found.ref, found.run_id = ref, ref.run_id
        if found.run_id is None and asked is not None:
            found.run_id = asked[0]
        found.step = asked[1] if asked is not None else self._step_of(found)
        return found

    def _ref_of_removed(self, digest: str, stage_key: str | None) -> Ref | None:
        """Return the ref that was kept when the artifact was removed."""
        removal = self.evidence.removal(digest)
        refs = removal.refs if isinstance(removal, Removal) else ()
        return next((ref for ref in refs if stage_key in (None, ref.artifact.stage_key)), None)

    def _other_artifact(self, ref: Ref, digest: str) -> Check:
        """Return the check of a ref that names another artifact: either a recorded run made it again, or it was swapped."""
        key = ref.artifact.stage_key
        record = self.evidence.record(ref.run_id)
        confirmed = isinstance(record, RunRecord) and any(
            stage.stage_key == key and stage.digest == ref.artifact.digest and stage.status in ENDED
            for stage in record.stages.values()
        )
        said = f"the ref of its stage key names {ref.artifact.digest[:12]}"
        if confirmed:
            said += f", since run {ref.run_id} has made it again with other bits"
            return Check(subject="ref", outcome="unchecked", detail=said)
        return Check(
            subject="ref",
            outcome="wrong",
            detail=f"{said}, which the record of run {ref.run_id} does not confirm",
        )

    def _step_of(self, found: Found) -> str:
        record = self.evidence.record(found.run_id) if found.run_id else None
        if isinstance(record, RunRecord) and found.stage_key:
            steps = steps_of(record, found.stage_key, found.digest)
            if steps:
                return steps[0]
        return found.ref.artifact.kind if found.ref is not None else "artifact"

    def _artifact(self, found: Found) -> Artifact | None:
        """Return the artifact's description, from the ref or else from the run's operations."""
        if found.ref is not None:
            return found.ref.artifact
        replay = self.evidence.replay(found.run_id) if found.run_id else None
        claimed = replay.artifact_of(found.step) if isinstance(replay, Replay) else None
        return claimed if claimed is not None and claimed.digest == found.digest else None

    def _parents(self, found: Found) -> dict[str, str]:
        artifact = self._artifact(found)
        return dict(artifact.parents) if artifact is not None else {}

    def _key_of_parent(self, found: Found, role: str, digest: str) -> str | None:
        """Return the stage key of a parent: from its run's record, its run's outbox, or any ref that names it."""
        record = self.evidence.record(found.run_id) if found.run_id else None
        if role in PREVIOUS_ROLES:
            return self._key_of_previous(found, role, record)
        if role == SOURCE:
            return self._key_of_copied(found, digest, record)
        if isinstance(record, RunRecord):
            read = self.evidence.reads(record, found.step).get(role)
            named = record.stages.get(read) if read else None
            if named is not None and named.digest == digest:
                return named.stage_key
        replay = self.evidence.replay(found.run_id) if found.run_id else None
        entry = replay.entry.stages.get(found.step) if isinstance(replay, Replay) else None
        given = entry.inputs.get(role) if entry is not None else None
        if given is not None and given.artifact.digest == digest:
            return given.artifact.stage_key
        if isinstance(record, RunRecord):
            for stage in record.stages.values():
                if stage.digest == digest:
                    return stage.stage_key
        refs = self.evidence.refs_of.get(digest, [])
        return refs[0].artifact.stage_key if refs else None

    def _key_of_copied(self, found: Found, digest: str, record: object) -> str | None:
        """Return the stage key of a model that was copied from another run: by that run's record, or by any ref."""
        copied = copied_stage(work_of(record.recipe, found.step)) if isinstance(record, RunRecord) else None
        maker = None if copied is None else self.evidence.record(copied.run)
        stage = maker.stages.get(copied.step) if copied and isinstance(maker, RunRecord) else None
        if stage is not None and stage.digest == digest:
            return stage.stage_key
        keys = (ref.artifact.stage_key for ref in self.evidence.refs_of.get(digest, []))
        return next((key for key in keys if key != found.stage_key), None)

    def _key_of_previous(self, found: Found, role: str, record: object) -> str | None:
        """Return the stage key of the shorter stage that an artifact goes on from, or of its training state."""
        previous = self._parents(found).get(PREVIOUS, "")
        shorter = gone_on_from(record, found.stage_key)
        refs = self.evidence.refs_of.get(previous, [])
        key = shorter.stage_key if shorter is not None else refs[0].artifact.stage_key if refs else None
        return state_key(key) if key is not None and role == PREVIOUS_STATE else key

    # The checks

    def audited(self) -> list[AuditedArtifact]:
        """Return every artifact with its checks; all files are hashed now."""
        there = [each.digest for each in self.found.values() if self.evidence.has_object(each.digest)]
        answers = [answers_ref(self.evidence, each.ref) for each in self.found.values()]
        kept = [each.artifact.digest for each in answers if isinstance(each, Ref)]
        self.evidence.hash_objects([*there, *filter(self.evidence.has_object, kept)])
        present = set(there)
        return [self._audited(each, is_there=each.digest in present) for each in self.found.values()]

    def _audited(self, found: Found, *, is_there: bool) -> AuditedArtifact:
        artifact = self._artifact(found)
        hashed = self.evidence.hashed(found.digest) if is_there else None
        checks = [
            files_check(self.evidence, found.digest)
            if is_there
            else absent_check(self.evidence, found.digest)
        ]
        if found.problem is not None:
            checks.append(found.problem)
        elif found.ref is not None and is_there:
            checks.append(ref_check(self.evidence, found.ref))
        if found.ref is not None:
            checks += environment_checks(self.evidence, found.ref)
            checks += answer_checks(self.evidence, found.ref)
        own = self._own_shorter(found)
        if own is not None:
            record, step, shorter = own
            checks += shorter_checks(self.evidence, record, step, shorter, found.ref)
        for run_id, step in self._recorded_by(found):
            checks += self._claims(found, run_id, step, artifact)
        if found.ref is not None and not _is_beside(found.ref):
            checks += self._source(found, found.ref)
            verdicts = None if own is None else own[2].verdicts
            checks += signature_checks(self.evidence, found.ref, found.step, verdicts=verdicts)
        elif found.ref is None:
            checks += unsigned(self.evidence)
        checks += self._versions(found, artifact)
        return AuditedArtifact(
            id=found.id,
            step=found.step,
            kind=artifact.kind if artifact is not None else "artifact",
            digest=found.digest,
            stage_key=found.stage_key,
            run_id=found.run_id,
            num_files=hashed.num_files if hashed else 0,
            num_bytes=hashed.num_bytes if hashed else 0,
            checks=tuple(checks),
            parents=tuple(self._edge(found, role, parent) for role, parent in found.parents.items()),
        )

    def _recorded_by(self, found: Found) -> list[tuple[str, str]]:
        """Return the runs whose records have the artifact, each with its step: the one that made it first."""
        if _is_beside(found.ref):
            return []  # runs record the stage beside which it is stored, not the artifact itself
        made = [] if found.ref is None else [(found.ref.run_id, found.step)]
        if self._own_shorter(found) is not None:
            made = []
        for run_id, step in made:
            record = self.evidence.record(run_id)
            if isinstance(record, RunRecord) and found.stage_key:
                steps = steps_of(record, found.stage_key, found.digest)
                made = [(run_id, steps[0] if steps else step)]
        return list(dict.fromkeys([*made, *found.asked]))

    def _own_shorter(self, found: Found) -> tuple[RunRecord, str, Shorter] | None:
        """Return the run that made an artifact and went on from it, its step, and what it recorded; None: no run did."""
        record = self.evidence.record(found.ref.run_id) if found.ref is not None else None
        own = shorter_in(record, found.stage_key, found.digest)
        return (record, *own) if own is not None and isinstance(record, RunRecord) else None

    def _claims(self, found: Found, run_id: str, step: str, artifact: Artifact | None) -> Iterator[Check]:
        """Check the claims of one run and of its entry in MLflow about the artifact."""
        evidence, digest = self.evidence, found.digest
        is_maker = found.ref is None or run_id == found.ref.run_id
        checks = list(record_checks(evidence, run_id, step, digest, found.ref))
        replay = evidence.replay(run_id)
        checks.append(outbox_check(evidence, run_id, step, digest, found.ref))
        if found.ref is not None and is_maker:
            checks += guard_checks(evidence, run_id, step, found.ref)
        record = evidence.record(run_id)
        if isinstance(replay, Replay):
            checks.append(mlflow_check(evidence, run_id, step))
            checks += model_card_checks(evidence, run_id, step)
        elif isinstance(record, RunRecord) and artifact is not None:
            checks.append(check_without_outbox(evidence, record, step, artifact))
        for check in checks:
            yield (
                check
                if is_maker
                else check.model_copy(update={"subject": f"{check.subject} of run {run_id}"})
            )

    def _source(self, found: Found, ref: Ref) -> Iterator[Check]:
        record = self.evidence.record(ref.run_id)
        if isinstance(record, RunRecord):
            check = source_check(record.recipe, found.step, ref)
            if check is not None:
                yield check

    def _versions(self, found: Found, artifact: Artifact | None) -> Iterator[Check]:
        """Check every version of a registered model that claims to hold this artifact."""
        if artifact is None or artifact.kind not in _PUBLISHED:
            return
        versions = versions_of(self.evidence, found.digest)
        if isinstance(versions, Missing):
            return  # the check of its entry reports this
        others = {ref.artifact.stage_key for ref in self.evidence.refs_of.get(found.digest, [])}
        for version in sorted(versions, key=lambda each: (each.name, int(each.version))):
            key = version.tags.get("vantage.stage_key")
            is_anothers = key != found.stage_key and key in others
            if not is_anothers and (version.name, version.version) not in self.checked_versions:
                yield from version_checks(self.evidence, version)

    def _edge(self, found: Found, role: str, parent: Found) -> Edge:
        problems: list[str] = []
        if found.run_id is not None:
            problems += edge_problems(
                self.evidence, found.run_id, found.step, role, parent.digest, parent.ref
            )
        if role == PREVIOUS_STATE and PREVIOUS in found.parents:
            problem = edge_problem(parent.ref, found.parents[PREVIOUS].stage_key)
            problems += [] if problem is None else [problem]
        if role.endswith(BASE_SUFFIX):
            adapters = found.parents.get(role.removesuffix(BASE_SUFFIX))
            base = getattr(adapters.ref.artifact, "base", None) if adapters and adapters.ref else None
            if base is not None and base != parent.digest:
                problems.append(f"the adapters belong to the base {base[:12]}")
        return Edge(
            role=role,
            digest=parent.digest,
            parent=parent.id,
            checks=(
                Check(subject="parent", outcome="wrong" if problems else "ok", detail="; ".join(problems)),
            ),
        )


def _is_beside(ref: Ref | None) -> bool:
    """Return whether a ref names something that a stage has left beside its artifact."""
    return is_state(ref) or is_answers(ref)


def absent_check(evidence: Evidence, digest: str) -> Check:
    """Check an artifact that is not in the store: it was removed, and the record of the removal describes it, or it is
    missing."""
    removal = evidence.removal(digest)
    if removal is None:
        return Check(
            subject="files", outcome="wrong", detail=f"missing: the store has no artifact {digest[:12]}"
        )
    if isinstance(removal, Broken):
        return check_of("files", removal)
    said = f"removed on {removal.when} by {removal.by}: {removal.why}"
    if removal.files is not None:
        size = sum(file.size for file in removal.files.values())
        said += f"; it was {len(removal.files)} files, {size:,} bytes"
    return Check(subject="files", outcome="unchecked", detail=said)
