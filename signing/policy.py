"""Decide whether the policy on publishing lets an alias move.

The policy is the file that ``VANTAGE_PUBLISH_POLICY`` names, else ``policy.yaml`` of the workspace. Without a policy,
every alias may move. With a policy that cannot be read, none may.
"""

import os
import pwd
from dataclasses import replace
from pathlib import Path

from vantage.runs.loosened import earlier_verdicts, known_loosened
from vantage.runs.record import RunRecord
from vantage.runs.workspace import Workspace
from vantage.schemas.key_rules import KeyRule
from vantage.schemas.loading import plain_yaml
from vantage.schemas.loading.field_errors import validated
from vantage.schemas.problems import Problem, RecipeError
from vantage.schemas.publish_policy import AliasRule, PublishPolicy
from vantage.schemas.records.approvals import PUBLISH_PREFIX
from vantage.signing.decision_checks import Trust
from vantage.signing.decision_policy import unsigned_decision
from vantage.signing.key_validity import ALWAYS_VALID, KeyValidity
from vantage.signing.keys import PublicKey, required_key
from vantage.signing.lineage import lineage, refs_of
from vantage.signing.statements import judged_by
from vantage.signing.verification import signature_checks

VARIABLE = "VANTAGE_PUBLISH_POLICY"
_BEGINS = "a policy starts with `models:`"
FILE = "policy.yaml"


class BadPolicy(ValueError):
    """The policy cannot be read; the message names the file, the field and the rule."""


def check_publish_policy(
    workspace: Workspace, record: RunRecord, step: str, *, model: str, alias: str, after: str | None = None
) -> str | None:
    """Return the reason why the policy does not let an alias move to a run's model, with the rule and the remedy; None:
    it may move.

    Args:
        record: the run's present record.
        step: the step whose artifact the alias would point to.
        model: the registered model.
        alias: its alias.
        after: the stage for whose gate the alias waits.
    """
    try:
        policy = read_policy(workspace)
        if policy is None:
            return None
        for path, rule in policy.rules.rules_for(model, alias):
            subject = f"{PUBLISH_PREFIX}{model}@{alias}"
            why = _why_not(workspace, record, step, after, rule, policy) or _undecided(
                workspace, record, [step] if after is None else [step, after], subject, rule, policy
            )
            if why is not None:
                return f"{policy.name}, {path}: {why}"
    except (
        ValueError,
        OSError,
    ) as error:  # a policy, a key or an artifact that cannot be read allows nothing
        return f"the policy on publishing cannot be checked: {error}"
    return None


class Policy:
    """A policy that was read, with its origin."""

    def __init__(self, rules: PublishPolicy, name: str, folder: Path, validity: KeyValidity) -> None:
        """Hold the rules. Paths of keys are relative to ``folder``; ``name`` is the policy's name in messages."""
        self.rules = rules
        self.name = name
        self.folder = folder
        self.validity = validity


def read_policy(workspace: Workspace) -> Policy | None:
    """Return the policy of this workspace; None: it has none.

    Raises:
        BadPolicy: the file exists, or was named, but cannot be read.
    """
    named = os.environ.get(VARIABLE)
    if named:
        try:
            path = Path(named).expanduser().absolute()
            return _parsed(_read(path), f"{VARIABLE}={named}", path.parent)
        except (OSError, RuntimeError) as error:  # RuntimeError: ~USER without such a user
            raise BadPolicy(
                f"{VARIABLE}={named} cannot be read ({_why(error)}); correct it, or unset it"
            ) from None
    if workspace.uri is not None:
        from vantage.storage.bucket import open_bucket
        from vantage.storage.records import read_record

        data, _ = read_record(open_bucket(workspace.uri), FILE)
        return None if data is None else _parsed(data, f"{workspace.uri}/{FILE}", Path.cwd())
    path = workspace.root / FILE
    if not os.path.lexists(path):  # a link to a missing file is a policy that cannot be read
        return None
    try:
        return _parsed(_read(path), str(path), path.parent)
    except OSError as error:
        raise BadPolicy(
            f"{path} cannot be read ({_why(error)}); correct it, or move it away: then no policy applies"
        ) from None


def _read(path: Path) -> bytes:
    """Return at most one byte more than a policy may have. A pipe or a device, which may be endless, is refused."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError("it is no file")
    with path.open("rb") as file:
        return file.read(plain_yaml.MAX_BYTES + 1)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _parsed(data: bytes, name: str, folder: Path) -> Policy:
    try:
        document = plain_yaml.read(plain_yaml.decode(data, begins=_BEGINS))
    except RecipeError as error:
        raise BadPolicy(_listed(name, error.problems)) from None
    found = validated(PublishPolicy, document.value)
    problems = [*document.problems, *found.problems]
    if found.value is None or problems:
        lines = document.lines
        raise BadPolicy(
            _listed(name, [replace(each, line=each.line or lines.get(each.path)) for each in problems])
        )
    for rules in found.value.models.values():
        for rule in rules.aliases.values():
            keys_of(rule, folder)  # a missing key is reported now, not when a model is published
            decision_keys_of(rule, folder)
    return Policy(found.value, name, folder, _validity(found.value, name, folder))


def _validity(rules: PublishPolicy, name: str, folder: Path) -> KeyValidity:
    """Return key id → rule. Raises BadPolicy if two entries are about one key."""
    found: dict[str, KeyRule] = {}
    for named, rule in rules.keys.items():
        key = required_key(named, folder)
        if key.key_id in found:
            raise BadPolicy(
                f"{name}: keys.{named}: key {key.short} has an entry already; write one for each key"
            )
        found[key.key_id] = rule
    return KeyValidity(found)


def key_validity(workspace: Workspace) -> KeyValidity:
    """Return the validity of keys by the policy of this workspace. Raises BadPolicy or BadKey if it cannot be read."""
    policy = read_policy(workspace)
    return ALWAYS_VALID if policy is None else policy.validity


def _listed(name: str, problems: "list[Problem] | tuple[Problem, ...]") -> str:
    return "; ".join(str(replace(each, source=name)) for each in problems)


def _why_not(
    workspace: Workspace, record: RunRecord, step: str, after: str | None, rule: AliasRule, policy: Policy
) -> str | None:
    if rule.users is not None and (user := present_user()) not in rule.users:
        allowed = ", ".join(rule.users) or "nobody"
        return f"users: {user} may not move this alias ({allowed} may); have one of them run `vantage publish {record.run_id}`"
    judged_steps = [step] if after is None else [step, after]
    if rule.loosened_gates == "refuse" and (why := _loosened(workspace, record, judged_steps)):
        return why
    return _unsigned(workspace, record, step, judged_steps, rule, policy)


def _unsigned(
    workspace: Workspace,
    record: RunRecord,
    step: str,
    judged_steps: list[str],
    rule: AliasRule,
    policy: Policy,
) -> str | None:
    """Return the first artifact that one of the rule's keys has not signed."""
    required = keys_of(rule, policy.folder)
    if not required:
        return None
    made_from = lineage(record, step)
    for name, ref in refs_of(workspace, record, lineage(record, *judged_steps)).items():
        judged = judged_by(record, name)
        checks = signature_checks(
            workspace.storage,
            ref,
            required=required,
            judged=judged,
            with_verdicts=True,
            validity=policy.validity,
        )
        for check in checks:
            if check.outcome not in ("ok", "note"):
                target = record.run_id if name not in made_from else f"{record.run_id}/{step}"
                return (
                    f"keys: {name} of run {record.run_id}: {check.detail}; sign it (`vantage sign {target} --key FILE`), then "
                    f"`vantage publish {record.run_id}`"
                )
    return None


def _undecided(
    workspace: Workspace, record: RunRecord, steps: list[str], subject: str, rule: AliasRule, policy: Policy
) -> str | None:
    """Return the first decision, on the steps or on their inputs at any depth, that none of the rule's keys has signed."""
    keys = decision_keys_of(rule, policy.folder)
    if not keys:
        return None
    trust = Trust(tuple(keys), policy.validity)
    why = unsigned_decision(workspace, record, lineage(record, *steps), subject=subject, trust=trust)
    if why is None:
        return None
    return f"decision_keys: {why}; once it is signed: `vantage publish {record.run_id}`"


def _loosened(workspace: Workspace, record: RunRecord, steps: list[str]) -> str | None:
    """Return the first gate, of the steps or of their inputs at any depth, that was loosened after it had closed."""
    made = [name for name in lineage(record, *steps) if name in record.stages]
    for name, gate in known_loosened(record, made, earlier_verdicts(workspace, record)):
        return (
            f"loosened_gates: {name} of run {record.run_id}: {gate}; train a model that passes the earlier gate, or have who "
            "keeps this policy change it"
        )
    return None


def keys_of(rule: AliasRule, folder: Path) -> list[PublicKey]:
    """Return the keys that a rule requires. Raises BadKey if one of them cannot be read."""
    return [required_key(named, folder) for named in rule.keys or ()]


def decision_keys_of(rule: AliasRule, folder: Path) -> list[PublicKey]:
    """Return the keys of which one must have signed each decision. Raises BadKey if one of them cannot be read."""
    return [required_key(named, folder) for named in rule.decision_keys or ()]


def present_user() -> str:
    """Return the user of the operating system, whatever the environment contains."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # the user of a container may have no name
        return str(os.getuid())
