"""A signature covers more than files: uncertainties, verdicts in a run's record, each of several statements, links."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.signing.conftest import STEPS, Ended, Keys, run_recipe
from vantage.review.audit.exported_signatures import exported_signature_checks
from vantage.schemas.publish_policy import PublishPolicy
from vantage.signing import keys as signing_keys
from vantage.signing.lineage import NotStored, refs_of
from vantage.signing.policy import FILE, VARIABLE, check_publish_policy
from vantage.signing.signing import sign_all
from vantage.signing.statements import judged_by
from vantage.signing.verification import SignatureCheck, signature_checks
from vantage.storage.signatures import KEY_FILE, SIGNATURE, STATEMENT, read_signatures


@pytest.fixture(autouse=True)
def _no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def edit_json(path: Path, change: Any) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.chmod(0o644)
    path.write_text(json.dumps(content))


def edit_ref(ended: Ended, step: str, change: Any) -> None:
    key = ended.record.stages[step].stage_key
    edit_json(ended.workspace.store / "refs" / f"{key}.json", lambda ref: change(ref["artifact"]))


def edit_verdict(ended: Ended, **changes: Any) -> None:
    """Change a verdict in ``run.json``, and nothing else."""
    edit_json(
        ended.workspace.folder(ended.record.run_id) / "run.json",
        lambda run: run["stages"]["reward"]["verdicts"][0].update(changes),
    )


def checks_of(ended: Ended, keys: Keys) -> list[SignatureCheck]:
    ref = ended.workspace.storage.find(str(ended.record.stages["reward"].stage_key))
    assert ref is not None
    judged = judged_by(ended.record, "reward")
    return signature_checks(ended.workspace.storage, ref, required=[keys.own.public], judged=judged)


def why_not(ended: Ended, keys: Keys) -> str | None:
    rule = f"{{keys: [{keys.own.public.key_id}]}}"
    (ended.workspace.root / FILE).write_text(f"models: {{'*': {{aliases: {{'*': {rule}}}}}}}")
    return check_publish_policy(
        ended.workspace, ended.record, "reward", model="tiny-reward", alias="champion"
    )


def test_an_uncertainty_that_was_added_after_signing_is_found(copied: Ended, keys: Keys) -> None:
    """A small standard error makes a gate with a confidence pass."""
    small = {"pair_accuracy": {"n": 10_000, "rows": 10_000, "standard_error": 1e-6}}
    edit_ref(copied, "reward", lambda artifact: artifact.update(uncertainty=small))
    [check] = checks_of(copied, keys)
    assert (check.outcome, "uncertainty" in check.detail) == ("wrong", True)


def test_one_edited_statement_is_wrong_beside_a_good_one(copied: Ended, keys: Keys) -> None:
    """A second run of the recipe has signed with the same key."""
    run_recipe(copied.workspace, keys.recipe)
    key = str(copied.record.stages["reward"].stage_key)
    first, second = read_signatures(copied.workspace.storage, key)
    assert [check.outcome for check in checks_of(copied, keys)] == ["ok"]
    for each in (first, second):
        folder = copied.workspace.store / "signatures" / key / each.key_id / each.name
        (folder / STATEMENT).write_bytes(each.statement.replace(b"0.8", b"0.9"))
        found = checks_of(copied, keys)
        (folder / STATEMENT).write_bytes(each.statement)
        assert [check.outcome for check in found] == ["wrong"]


def test_the_policy_compares_the_verdicts_that_were_signed(copied: Ended, keys: Keys) -> None:
    assert why_not(copied, keys) is None
    edit_verdict(copied, threshold=0.5)
    assert "the verdicts in the record of run" in str(why_not(copied, keys))


def test_the_policy_holds_back_what_could_not_be_checked(
    copied: Ended, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the alias back without the library, and where another run judged otherwise and signed with another key."""
    with monkeypatch.context() as patched:
        patched.setattr(signing_keys, "_PACKAGES", ("no_such_package",))
        assert "pip install" in str(why_not(copied, keys))
    gate = "stages.reward.gate={metric: pair_accuracy, at_least: 0.5}"
    softer = run_recipe(copied.workspace, keys.recipe, f"sign.key={keys.folder / 'other.pem'}", gate)
    assert "but not the verdicts of run" in str(why_not(softer, keys))


def test_an_artifact_that_was_made_of_another_is_not_that_of_the_run(copied: Ended, keys: Keys) -> None:
    """The ref says that another model was trained on than the one that the run's record has."""
    edit_ref(copied, "reward", lambda artifact: artifact["parents"].update(init="0" * 64))
    with pytest.raises(NotStored, match="reward of run .* was made from another init than sft of this run"):
        refs_of(copied.workspace, copied.record, STEPS)
    with pytest.raises(NotStored):
        sign_all(copied.workspace, copied.record, STEPS, keys.other)


@pytest.mark.parametrize(
    ("model", "alias", "held"),
    [
        ("team-a-policy", "prod-eu", ["models.team-?-*.aliases.prod*", "models.*.aliases.*-eu"]),
        ("team-a-policy", "prod", ["models.team-?-*.aliases.prod*"]),
        ("team-ab-policy", "prod-eu", ["models.*.aliases.*-eu"]),
        ("team-a-policy", "Prod-eu", ["models.*.aliases.*-eu"]),
        ("team-a-policy", "trial", []),
    ],
)
def test_patterns_fit_whole_names_of_models_and_of_aliases(model: str, alias: str, held: list[str]) -> None:
    rule = {"users": ["ada"]}
    told = {"team-?-*": {"aliases": {"prod*": rule}}, "*": {"aliases": {"*-eu": rule}}}
    policy = PublishPolicy.model_validate({"models": told})
    assert [path for path, _ in policy.rules_for(model, alias)] == held


@pytest.fixture
def exported(ended: Ended, keys: Keys, tmp_path: Path) -> tuple[Path, dict[str, Any], str]:
    """Return a folder with the signature of the reward model, what its ``vantage.json`` says of it, and the digest."""
    stage = ended.record.stages["reward"]
    [stored] = read_signatures(ended.workspace.storage, str(stage.stage_key))
    folder = tmp_path / "exported" / "signatures" / "key" / "statement"
    folder.mkdir(parents=True)
    (folder / STATEMENT).write_bytes(stored.statement)
    (folder / SIGNATURE).write_bytes(stored.signature)
    (folder.parent / KEY_FILE).write_bytes(stored.public_key or b"")
    told = {"signatures": {stored.key_id: ["signatures/key/statement"]}}
    return tmp_path / "exported", told, str(stage.digest)


def test_an_exported_signature_that_cannot_be_checked_does_not_agree(
    exported: tuple[Path, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [check.outcome for check in exported_signature_checks(*exported)] == ["ok"]
    monkeypatch.setattr(signing_keys, "_PACKAGES", ("no_such_package",))
    [check] = exported_signature_checks(*exported)
    assert (check.outcome, "pip install" in check.detail) == ("unchecked", True)


@pytest.mark.parametrize("name", [STATEMENT, SIGNATURE, f"../{KEY_FILE}"])
def test_a_link_in_an_export_is_no_signature(exported: tuple[Path, dict[str, Any], str], name: str) -> None:
    """What it leads to is no part of the folder, and may be another file tomorrow."""
    file = exported[0] / "signatures" / "key" / "statement" / name
    file.rename(exported[0] / "elsewhere")
    file.symlink_to(exported[0] / "elsewhere")
    [check] = exported_signature_checks(*exported)
    assert (check.outcome, "no plain file" in check.detail) == ("wrong", True)
