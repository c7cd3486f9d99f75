"""Check signatures of people's decisions: each statement is made again from the run's records and compared with the
signed one."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from vantage.runs.named_models import DamagedModel
from vantage.runs.record import RunRecord
from vantage.signing.bundles import problem_of
from vantage.signing.decisions import Decision, SignedDecision, read_decision
from vantage.signing.key_validity import ALWAYS_VALID, KeyValidity
from vantage.signing.keys import BadKey, MissingPackages, PublicKey, can_check, require_packages
from vantage.signing.signing import statement_of
from vantage.signing.statements import BadStatement, differences, is_about
from vantage.signing.verification import SignatureCheck, key_to_check_with
from vantage.storage.refs import Ref
from vantage.storage.signatures import SignedStatement, read_signatures
from vantage.storage.storage import Readable

RefOf = Callable[[str], Ref | None]


@dataclass(frozen=True)
class Trust:
    """Keys whose signatures of decisions count."""

    keys: tuple[PublicKey, ...] = ()
    """Keys of which one must have signed each decision; empty: no signature is required, and signatures of all keys are
    shown."""
    validity: KeyValidity = ALWAYS_VALID

    @property
    def named(self) -> str:
        """The keys, for messages."""
        return " or ".join(each.short for each in self.keys)


@dataclass(frozen=True)
class _Found:
    """Result of checking one signed statement about a decision."""

    outcome: Literal["ok", "wrong", "other", "refused"]
    """``other``: it refers to another statement of the artifact; ``refused``: its key does not count."""
    detail: str
    key_id: str


class DecisionChecks:
    """The signed decisions about the artifacts of one run."""

    def __init__(self, storage: Readable, record: RunRecord, *, trust: Trust, ref_of: RefOf) -> None:
        """
        Args:
            storage: storage with the signatures.
            record: the run's record.
            trust: keys whose signatures count.
            ref_of: stage key → the artifact's present ref in the storage; None: there is none.
        """
        self._storage = storage
        self._record = record
        self._trust = trust
        self._ref_of = ref_of
        self._keys = {each.key_id: each for each in trust.keys}
        self._stored = cache(self._read)
        self._about = cache(self._statement_now)

    def all(self, decisions: Collection[Decision]) -> list[SignatureCheck]:
        """Check every decision, and every signed decision that is missing in the run's records."""
        if not can_check():
            return [] if not self._trust.keys else [_not_installed()]
        known = {(each.kind, each.identity) for each in decisions}
        keys = {stage.stage_key for stage in self._record.stages.values() if stage.stage_key}
        keys |= {each.stage_key for each in decisions if each.stage_key}
        checks = [check for each in decisions for check in self.of(each)]
        return checks + [check for key in sorted(keys) for check in self._strange(key, known)]

    def of(self, decision: Decision) -> list[SignatureCheck]:
        """Check one decision; empty: it has no signature, and needs none."""
        if not can_check():
            return [] if not self._trust.keys else [_not_installed()]
        found = [
            self._look_at(stored, said, decision)
            for stored, said in self._stored(decision.stage_key)
            if isinstance(said, SignedDecision)
            and _names(said) == (decision.run_id, decision.kind, decision.identity)
        ]
        wrong = [each for each in found if each.outcome == "wrong"]
        if wrong:
            return [
                SignatureCheck("wrong", f"{decision.described}: {each.detail}", each.key_id) for each in wrong
            ]
        good = [each for each in found if each.outcome == "ok"]
        if good:
            unasked = (
                ""
                if self._trust.keys
                else ", which was compared with no key of yours (--require-signature KEY)"
            )
            return [SignatureCheck("ok", f"{decision.described}: {good[0].detail}{unasked}", good[0].key_id)]
        if self._trust.keys:
            why = found[0].detail if found else "there is no signature of it"
            detail = (
                f"{decision.described} is not signed by key {self._trust.named}, which is required: {why}; if it is genuine, "
                f"`vantage sign {decision.run_id} --key FILE` signs it"
            )
            is_gone = (
                bool(found)
                and found[0].outcome == "other"
                and self._about(decision.stage_key, decision.step) is None
            )
            return [SignatureCheck("unchecked" if is_gone else "wrong", detail)]
        return [
            SignatureCheck(
                "unchecked" if each.outcome == "other" else "note",
                f"{decision.described}: {each.detail}",
                each.key_id,
            )
            for each in found[:1]
        ]

    def _look_at(self, stored: SignedStatement, said: SignedDecision, decision: Decision) -> _Found:
        key, short = stored.key_id, stored.key_id[:16]
        if problem := self._signature_problem(stored):
            return _Found("wrong", problem, key)
        if invalid := self._invalid(stored, said):
            return _Found("refused", invalid, key)
        if said.stage_key != decision.stage_key:
            return _Found(
                "wrong", f"key {short} has signed it about another artifact; it was moved here", key
            )
        if said.body != decision.body:
            changed = differences(said.body, decision.body)
            return _Found(
                "wrong", f"the run's records differ from what key {short} has signed: {changed}", key
            )
        if self._keys and key not in self._keys:
            return _Found("refused", f"it is signed by key {short}", key)
        if not self._is_chained(said, decision):
            return _Found("other", f"key {short} has signed it about another statement of the artifact", key)
        return _Found("ok", f"signed by key {short}", key)

    def _is_chained(self, said: SignedDecision, decision: Decision) -> bool:
        """Return whether the decision refers to the artifact's present statement, or to an earlier signed one."""
        if said.about == self._about(decision.stage_key, decision.step):
            return True
        return any(
            each.name == hashlib.sha256(each.statement).hexdigest() == said.about
            and is_about(each.statement, decision.digest)
            and (not self._keys or each.key_id in self._keys)
            and not self._signature_problem(each)
            for each in read_signatures(self._storage, decision.stage_key)
        )

    def _statement_now(self, stage_key: str, step: str) -> str | None:
        """Return the sha256 of the artifact's statement; None: it cannot be made, since the artifact or its ref no
        longer exists."""
        ref = self._ref_of(stage_key) if step else None
        if ref is None:
            return None
        try:
            return hashlib.sha256(statement_of(self._storage, self._record, step, ref)).hexdigest()
        except (DamagedModel, ValueError):
            return None

    def _strange(self, stage_key: str, known: Collection[tuple[str, str]]) -> Iterator[SignatureCheck]:
        """Yield checks of signed decisions of this run that are missing in its records, and of statements that are not
        decisions."""
        for stored, said in self._stored(stage_key):
            short = stored.key_id[:16]
            if not isinstance(said, SignedDecision):
                yield SignatureCheck("wrong", f"key {short}: what it signed {said}", stored.key_id)
                continue
            if said.run_id != self._record.run_id or (
                said.stage_key == stage_key and (said.kind, said.identity) in known
            ):
                continue
            what = said.kind.replace("_", " ")
            if problem := self._signature_problem(stored):
                yield SignatureCheck("wrong", f"{what}: {problem}", stored.key_id)
            elif invalid := self._invalid(stored, said):
                yield SignatureCheck(
                    "note", f"{what}, which the run's records do not have: {invalid}", stored.key_id
                )
            elif said.stage_key != stage_key:
                detail = (
                    f"key {short} has signed this decision ({what}) about another artifact; it was moved here"
                )
                yield SignatureCheck("wrong", detail, stored.key_id)
            else:
                detail = f"key {short} has signed a decision ({what}) that the run's records do not have: {_shown(said.body)}"
                yield SignatureCheck("wrong", detail, stored.key_id)

    def _invalid(self, stored: SignedStatement, said: SignedDecision) -> str:
        """Return the reason why the policy does not accept the key; empty: it accepts the key."""
        invalid = self._trust.validity.problem(
            stored.key_id, statement=hashlib.sha256(stored.statement).hexdigest(), signed_at=said.signed_at
        )
        return "" if invalid is None else invalid.detail

    def _signature_problem(self, stored: SignedStatement) -> str:
        """Return the reason why the signature is wrong; empty: it is valid."""
        try:
            pem = key_to_check_with(stored, self._keys.get(stored.key_id))
        except BadKey as error:
            return f"key {stored.key_id[:16]}: {error}"
        problem = problem_of(stored.statement, stored.signature, pem)
        if problem is None:
            return ""
        return (
            f"the signature by key {stored.key_id[:16]} does not hold: {problem}; statement or signature was changed "
            "after signing"
        )

    def _read(self, stage_key: str) -> Sequence[tuple[SignedStatement, SignedDecision | str]]:
        if not stage_key:
            return []
        return [(each, _parsed(each)) for each in read_signatures(self._storage, stage_key, "decisions")]


def _parsed(stored: SignedStatement) -> SignedDecision | str:
    try:
        return read_decision(stored.statement)
    except BadStatement as error:
        return str(error)


def _names(said: SignedDecision) -> tuple[str, str, str]:
    return said.run_id, said.kind, said.identity


def _shown(body: Mapping[str, object]) -> str:
    """Return the person and the content of a signed decision that is in no record."""
    predicate = body["predicate"]
    decision = predicate.get("decision") if isinstance(predicate, dict) else None
    fields = decision if isinstance(decision, dict) else {}
    words = (
        f"{name} {fields[name]}"
        for name in ("approved", "metric", "alias", "by", "reason", "time")
        if name in fields
    )
    return ", ".join(words)[:300]


def _not_installed() -> SignatureCheck:
    try:
        require_packages()
    except MissingPackages as error:
        return SignatureCheck("unchecked", str(error))
    raise AssertionError("asked for only where they are missing")
