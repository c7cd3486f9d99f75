"""The policy on publishing holds an alias back until the right keys have signed and the right user asks."""

import os
import pwd
from pathlib import Path
from typing import Any

import obstore
import pytest

from tests.signing.conftest import RECIPE, STEPS, Ended, Here, Keys
from tests.support.every import every
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.flows.execution import exit_code
from vantage.flows.publishing.publishing import publish
from vantage.ledger.run_ledger import CopyStatus
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.recipe import Publication
from vantage.signing.before_runs import check_signing, signing_warnings
from vantage.signing.policy import FILE, VARIABLE, BadPolicy, check_publish_policy, read_policy
from vantage.signing.signing import sign_all, sign_step
from vantage.storage.bucket import open_bucket

ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture(autouse=True)
def _no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def rule(text: str, *, model: str = "tiny-*", alias: str = "champion") -> str:
    return f"models: {{'{model}': {{aliases: {{'{alias}': {text}}}}}}}"


def why_not(ended: Ended, *, model: str = "tiny-reward", alias: str = "champion") -> str | None:
    return check_publish_policy(ended.workspace, ended.record, "reward", model=model, alias=alias)


def write(ended: Ended, text: str) -> None:
    (ended.workspace.root / FILE).write_text(text)


@pytest.mark.slow
def test_without_a_policy_everything_may_be_published(ended: Ended) -> None:
    assert read_policy(ended.workspace) is None
    assert why_not(ended) is None


def test_every_key_must_have_signed_the_model_and_what_it_was_made_from(copied: Ended, keys: Keys) -> None:
    own, other = keys.own.public.key_id, keys.folder / "other.pem.pub"
    write(copied, rule(f"{{keys: [{own}]}}"))
    assert why_not(copied) is None
    write(copied, rule(f"{{keys: [{own}, {other}]}}"))
    why = why_not(copied)
    assert why is not None
    path = copied.workspace.root / FILE
    assert why.startswith(
        f"{path}, models.tiny-*.aliases.champion: keys: model of run {copied.record.run_id}: "
    )
    assert f"is not signed by key {keys.other.public.short}, which is required" in why
    assert f"sign it (`vantage sign {copied.record.run_id}/reward --key FILE`)" in why
    sign_all(copied.workspace, copied.record, ["reward"], keys.other)  # its ancestors are not signed yet
    assert "keys: model of run" in str(why_not(copied))
    sign_all(copied.workspace, copied.record, STEPS, keys.other)
    assert why_not(copied) is None


@pytest.mark.parametrize(
    "model, alias, held",
    [("tiny-reward", "champion", True), ("tiny-reward", "candidate", False), ("other", "champion", False)],
)
def test_rules_are_for_the_models_and_aliases_that_they_name(
    copied: Ended, model: str, alias: str, held: bool
) -> None:
    write(copied, rule("{users: [nobody-here]}"))
    assert (why_not(copied, model=model, alias=alias) is not None) is held


def test_all_rules_that_fit_have_to_hold(copied: Ended, keys: Keys) -> None:
    held = f"models: {{'*': {{aliases: {{'*': {{users: [{ME}]}}}}}}, tiny-reward: {{aliases: {{champion: {{keys: [{'ab' * 32}]}}}}}}}}"
    write(copied, held)
    assert why_not(copied, alias="candidate") is None
    assert "models.tiny-reward.aliases.champion: keys:" in str(why_not(copied))


def test_users_are_those_of_the_operating_system(copied: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    write(copied, rule("{users: [somebody, else]}"))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv("LOGNAME", "somebody")
    assert f"users: {ME} may not move this alias (somebody, else may)" in str(why_not(copied))
    write(copied, rule("{users: []}"))
    assert "(nobody may)" in str(why_not(copied))
    write(copied, rule(f"{{users: [{ME}]}}"))
    assert why_not(copied) is None


def test_what_was_edited_after_signing_is_held_back(copied: Ended, keys: Keys) -> None:
    write(copied, rule(f"{{keys: [{keys.own.public.key_id}]}}"))
    for statement in copied.workspace.store.rglob("statement.json"):
        statement.write_bytes(statement.read_bytes().replace(b"0.8", b"0.9"))
    assert "the signature does not hold" in str(why_not(copied))


def test_the_environment_names_another_which_alone_counts(
    copied: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(copied, rule(f"{{users: [{ME}]}}"))
    named = tmp_path / "elsewhere.yaml"
    named.write_text(rule("{users: []}"))
    monkeypatch.setenv(VARIABLE, str(named))
    assert f"{VARIABLE}={named}, models.tiny-*.aliases.champion: users:" in str(why_not(copied))
    named.unlink()
    assert "cannot be read (No such file or directory); correct it, or unset it" in str(why_not(copied))


@every(
    "text, said",
    [
        ("", "is empty"),
        ("models: [", ""),
        ("model: {}", "models: is required"),
        (rule("{}"), "none of keys, decision_keys, users and loosened_gates: refuse is there"),
        (rule("{keys: []}"), "none of keys, decision_keys, users and loosened_gates: refuse is there"),
        (rule("{keyz: [a]}"), "keyz"),
        (rule("{keys: [nowhere.pub]}"), "nowhere.pub is not there"),
        ("models: &a {x: *a}", ""),
    ],
)
def test_a_policy_that_cannot_be_read_allows_nothing_and_is_told_before_a_run(
    copied: Ended, text: str, said: str
) -> None:
    write(copied, text)
    why = why_not(copied)
    assert why is not None
    assert why.startswith("the policy on publishing cannot be checked: ")
    assert said in why
    publication = Publication(stage="reward", registered_model="tiny-reward", alias="champion")
    publishes = copied.record.recipe.model_copy(update={"publish": (publication,)})
    with pytest.raises(ValueError, match=said or FILE):
        check_signing(publishes, copied.workspace)
    check_signing(copied.record.recipe, copied.workspace)  # publishes nothing


@every(
    "model, alias, said",
    [
        ("*", "Champion", "no name has 'C', so the pattern fits nothing and would hold nothing back"),
        ("*", "champi\u043en", r"no name has '\\u043e'"),
        ("*", "champion ", "no name has ' '"),
        ("*", "champion_1", "no name has '_'"),
        ("t\u0456ny", "*", r"no name has '\\u0456'"),
        ("[tiny-*", "*", r"no name has '\['"),
        ("tiny/1", "*", "no name has '/'; a name has letters|no name has '/'"),
    ],
)
def test_a_pattern_that_can_fit_nothing_is_refused(copied: Ended, model: str, alias: str, said: str) -> None:
    """Such a pattern would look like a rule, but hold nothing back."""
    write(copied, rule("{users: []}", model=model, alias=alias))
    with pytest.raises(BadPolicy, match=said):
        read_policy(copied.workspace)
    assert "cannot be checked" in str(why_not(copied))


@every("pattern", ["champion", "*", "c?ampion", "[c-d]*", "[!A-Z]*", "champion*", "[]c]*"])
def test_patterns_that_fit_hold(copied: Ended, pattern: str) -> None:
    write(copied, rule("{users: []}", alias=pattern))
    assert "(nobody may)" in str(why_not(copied))


def test_a_policy_that_is_no_file_allows_nothing(
    copied: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipes and devices are not read to their end, which they may not have."""
    file = copied.workspace.root / FILE
    file.symlink_to("nowhere")
    assert f"{file} cannot be read (No such file or directory)" in str(why_not(copied))
    file.unlink()
    os.mkfifo(file)
    assert f"{file} cannot be read (it is no file)" in str(why_not(copied))
    file.unlink()
    file.symlink_to("/dev/zero")
    assert f"{file} cannot be read (it is no file)" in str(why_not(copied))
    file.unlink()
    file.write_bytes(b"#" * 2**19)
    assert "is longer than 262144 bytes" in str(why_not(copied))
    for named, said in (("/dev/zero", "it is no file"), ("~no-such-user/policy.yaml", "home directory")):
        monkeypatch.setenv(VARIABLE, named)
        assert f"{VARIABLE}={named} cannot be read ({said}" in str(why_not(copied)).replace(
            "Could not determine ", ""
        )


def test_a_key_in_the_home_of_nobody_allows_nothing(copied: Ended) -> None:
    write(copied, rule("{keys: ['~no-such-user/key.pub']}"))
    assert "~no-such-user/key.pub: there is no such user; write the path in full" in str(why_not(copied))


def test_a_run_whose_recipe_dropped_the_gate_needs_a_signature_of_its_own(copied: Ended, keys: Keys) -> None:
    """What was signed is that the gate of the first run was judged, not that there is none."""
    write(copied, rule(f"{{keys: [{keys.own.public.key_id}]}}"))
    record = copied.record
    reward = record.stages["reward"].model_copy(update={"verdicts": ()})
    other = record.model_copy(
        update={"run_id": "0002-signed-123456", "stages": {**record.stages, "reward": reward}}
    )
    why = check_publish_policy(copied.workspace, other, "reward", model="tiny-reward", alias="champion")
    assert "but not the verdicts of run 0002-signed-123456, which has no gate on it; sign it" in str(why)
    sign_step(copied.workspace, other, "reward", keys.own)
    why = check_publish_policy(copied.workspace, other, "reward", model="tiny-reward", alias="champion")
    assert why is None


def test_the_stage_whose_gate_the_alias_waits_for_must_be_signed_too(copied: Ended, keys: Keys) -> None:
    write(copied, rule(f"{{keys: [{keys.other.public.key_id}]}}"))
    workspace, record = copied.workspace, copied.record
    sign_all(workspace, record, ["model", "data.demonstrations", "sft"], keys.other)
    assert check_publish_policy(workspace, record, "sft", model="tiny-x", alias="champion") is None
    why = check_publish_policy(workspace, record, "sft", model="tiny-x", alias="champion", after="reward")
    assert "there is no signature by it" in str(why)
    assert f"sign it (`vantage sign {record.run_id} --key FILE`)" in str(why)
    sign_all(workspace, record, STEPS, keys.other)
    why = check_publish_policy(workspace, record, "sft", model="tiny-x", alias="champion", after="reward")
    assert why is None


def test_a_plan_tells_what_will_be_held_back(copied: Ended, keys: Keys) -> None:
    publication = Publication(stage="reward", registered_model="tiny-reward", alias="champion")
    recipe = copied.record.recipe.model_copy(update={"publish": (publication,)})
    assert signing_warnings(recipe, copied.workspace) == []
    own, other = keys.own.public, keys.other.public
    write(copied, rule(f"{{keys: [{own.key_id}, {other.key_id}], users: [nobody-here]}}"))
    path = copied.workspace.root / FILE
    held = f"tiny-reward@champion: {path}, models.tiny-*.aliases.champion"
    assert signing_warnings(recipe, copied.workspace) == [
        f"{held} asks for signatures by key {other.short}, with which this recipe does not sign; the alias stays where it is "
        "until somebody has signed with it (`vantage sign`)",
        f"{held} does not let {ME} move it, so the alias stays where it is",
    ]
    write(copied, rule(f"{{keys: [{own.key_id}], users: [{ME}]}}"))
    assert signing_warnings(recipe, copied.workspace) == []
    unsigned = recipe.model_copy(update={"sign": None})
    assert [own.short in each for each in signing_warnings(unsigned, copied.workspace)] == [True]


def test_a_workspace_in_a_bucket_has_its_policy_there(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path))
    workspace = Workspace.at(bucket)
    assert read_policy(workspace) is None
    obstore.put(open_bucket(bucket), FILE, rule("{users: [a]}").encode())
    policy = read_policy(workspace)
    assert policy is not None
    assert [path for path, _ in policy.rules.rules_for("tiny-x", "champion")] == [
        "models.tiny-*.aliases.champion"
    ]
    obstore.put(open_bucket(bucket), FILE, b"models: 3")
    with pytest.raises(BadPolicy, match=f"{bucket}/{FILE}:1: models"):
        read_policy(workspace)


class Registry:
    """A ledger's side of publishing, which remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    def publish(
        self,
        stage: str,
        artifact: Any,
        folder: Path,
        registered_model: str,
        *,
        alias: str | None,
        by: str | None = None,
        newest: int | None = None,
    ) -> str:
        self.asked.append((registered_model, alias))
        return "1"

    def log_bill(self, stage: str, file: Path) -> None:
        assert file.is_file()

    def copy_status(self, registered_model: str, artifact: Any) -> CopyStatus:
        return CopyStatus(location=None, repaired=(), refused=None)


def test_a_run_keeps_the_alias_where_it_is_until_it_is_signed(
    keys: Keys, tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is registered, the refusal is recorded and is in the exit code."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    recipe = tmp_path / "unsigned.yaml"
    published = "publish: [{stage: reward, registered_model: tiny-reward, alias: champion}]\n"
    recipe.write_text(RECIPE.partition("sign:")[0] + published)
    workspace = Workspace(tmp_path / "workspace")
    workspace.root.mkdir()
    (workspace.root / FILE).write_text(rule(f"{{keys: [{keys.folder / 'key.pem.pub'}]}}"))
    with orchestrated(workspace, recipe) as orchestrator:
        orchestrator._launcher = Here()
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
        registry = Registry()
        orchestrator.ledger = registry  # type: ignore[assignment]
        [publication] = orchestrator.recipe.publish
        publish(publication, orchestrator)
        assert registry.asked == [("tiny-reward", None)]
        refused = orchestrator.run.record
        assert "there is no signature by it" in refused.refused_aliases["tiny-reward@champion"]
        lines = getattr(orchestrator.watcher, "lines")  # noqa: B009
        assert any(line.startswith("  champion stays where it is: ") for line in lines)
        assert exit_code(refused) == ExitCode.GATE_CLOSED
        sign_all(workspace, refused, STEPS, keys.own)
        publish(publication, orchestrator)
        assert registry.asked[1:] == [("tiny-reward", "champion")]
