"""Signatures of people's decisions reveal a person who edits every record consistently, where a key is required."""

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.review.audit.tampering import found
from tests.review.audit.test_decisions import RECIPE, Place
from tests.support.made_once import made_once
from tests.support.orchestrated import Witness
from vantage.cli.main import app
from vantage.flows.publishing.moving_aliases import publish_again, roll_back
from vantage.ledger.outbox import BEFORE
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs import approving
from vantage.runs.record import RunRecord
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.audit import AuditReport
from vantage.signing.bundles import sign
from vantage.signing.deciding import sign_and_answer
from vantage.signing.keys import SigningKey, new_key, signing_key
from vantage.signing.policy import FILE, VARIABLE
from vantage.signing.signing import sign_all
from vantage.signing.signing_decisions import sign_decisions_of
from vantage.storage.signatures import SIGNATURE, STATEMENT, add_signature

ADA, EVE = "ada of the review board", "eve of the review board"
SIGNED = f"{RECIPE}sign: {{key: key.pem}}\n"


class SignedPlace(Place):
    """A workspace whose recipe signs its artifacts."""

    def __init__(self, folder: Path, original: Path | None = None) -> None:
        """Publish in a new place. ``original``: the folder that has the recipe already; None: a recipe that does not
        sign is written.
        """
        if original is None:
            super().__init__(folder)
        else:
            self.workspace, self.recipe = Workspace(folder / "workspace"), original / "asking.yaml"
        self.folder = folder

    @property
    def key(self) -> SigningKey:
        return signing_key(self.recipe.with_name("key.pem"))

    @property
    def other(self) -> SigningKey:
        return signing_key(self.recipe.with_name("other.pem"))

    def decide(self, subject: str, key: Path | None = None, *, approved: bool = True) -> str | None:
        return sign_and_answer(
            self.workspace,
            self.record.run_id,
            subject,
            approved=approved,
            by=ADA,
            reason="the slice is small",
            key=key,
        ).key_id

    def required(
        self,
        target: str = "latest",
        keys: Sequence[SigningKey] | None = None,
        deciding: Sequence[SigningKey] = (),
    ) -> AuditReport:
        named = [self.key] if keys is None else keys
        with Evidence(
            self.workspace,
            required_keys=[each.public for each in named],
            decision_keys=[each.public for each in deciding],
        ) as evidence:
            return audit(evidence, target)

    def statements(self) -> list[Path]:
        return sorted((self.workspace.store / "decisions").rglob(STATEMENT))

    def statement(self, kind: str) -> Path:
        [found] = [
            path for path in self.statements() if json.loads(path.read_bytes())["predicate"]["kind"] == kind
        ]
        return found

    def policy(self, text: str) -> None:
        (self.workspace.root / FILE).write_text(text)


def published(place: SignedPlace, *overrides: str) -> RunRecord:
    """Return a run whose gate and alias a person let pass; each answer is signed with the recipe's key."""
    place.run(*overrides)
    place.decide("sft")
    place.run(*overrides)
    place.decide("publish:asking")
    return place.run(*overrides)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two published runs, whose alias was moved back to the first. Tests may only read it."""

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.delenv("MLFLOW_TRACKING_URI", raising=False)
            patched.delenv(VARIABLE, raising=False)
            for name in ("key.pem", "other.pem"):
                new_key(folder / name)
            (folder / "asking.yaml").write_text(SIGNED)
            place = SignedPlace(folder, folder)
            published(place, "seed=1")
            published(place, "seed=2")
            roll_back(
                place.workspace,
                "asking",
                "champion",
                to=None,
                by=ADA,
                reason="worse on long prompts",
                watcher=Witness(),
            )

    return made_once(tmp_path_factory, "signed decisions", make)


@pytest.fixture
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SignedPlace:
    """Return a copy, which a test may change."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    shutil.copytree(original / "workspace", tmp_path / "workspace", symlinks=True)
    return SignedPlace(tmp_path, original)


def replace_everywhere(place: SignedPlace, old: str, new: str) -> None:
    """Change a text of one length in every record of every run, and make all sums of the outboxes again."""
    assert len(old) == len(new), "offsets in sent.json stay"
    for path in (place.workspace.root / "runs").rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
    for path in (place.workspace.root / "runs").rglob("outbox.jsonl"):
        lines, so_far = [], hashlib.sha256()
        for line in path.read_bytes().replace(old.encode(), new.encode()).splitlines(keepends=True):
            value = json.loads(line)
            again = line.replace(value[BEFORE].encode(), so_far.hexdigest().encode())
            so_far.update(again)
            lines.append(again)
        path.write_bytes(b"".join(lines))
    with closing(sqlite3.connect(place.workspace.root / "mlflow.db")) as database:
        for table in ("tags", "registered_model_tags", "logged_model_tags"):
            column = "tag_value" if table == "logged_model_tags" else "value"
            database.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old, new))
        database.execute("UPDATE model_versions SET description = replace(description, ?, ?)", (old, new))
        database.commit()


@pytest.mark.slow
def test_everything_that_was_decided_is_signed(place: SignedPlace) -> None:
    for target in ("asking@champion", "latest", place.record.run_id):
        report = place.required(target)
        assert (found(report), found(report, "unchecked")) == ([], [])
    said = [
        check for _, check in place.required("asking@champion").every_check() if check.subject == "decisions"
    ]
    assert [each.detail.count("signed by key") for each in said] == [3]
    assert "the movement of alias asking@champion" in said[0].detail
    assert len(place.statements()) == 5


def test_an_approver_who_was_changed_in_every_record_is_found(place: SignedPlace) -> None:
    replace_everywhere(place, ADA, EVE)
    shown = [check.detail for _, check in place.audit("asking@champion").every_check()]
    assert any(f"moved by {EVE}" in each for each in shown), "the records agree with one another"
    report = place.required("asking@champion")
    assert report.exit_code == 1
    said = found(report)
    assert all("decisions" in each for each in said), said
    assert any(
        f"the answer about sft: the run's records differ from what key {place.key.public.short} has signed: "
        f'decision.by was signed as "{ADA}", and is "{EVE}"' in each
        for each in said
    ), said
    assert any("the movement of alias asking@champion" in each for each in said)


@pytest.mark.parametrize(
    "old, new",
    [("the slice is small", "the slice is SMALL"), ("worse on long prompts", "worse on tall prompts")],
)
def test_why_somebody_decided_is_signed_too(place: SignedPlace, old: str, new: str) -> None:
    replace_everywhere(place, old, new)
    said = found(place.required("asking@champion"))
    assert any(f'reason was signed as "{old}", and is "{new}"' in each for each in said), said


def test_each_decision_that_is_removed_is_missed(place: SignedPlace) -> None:
    first = place.required("asking@champion")
    assert first.exit_code == 0
    for statement in place.statements():
        said = json.loads(statement.read_bytes())["predicate"]
        hidden = statement.with_name(f"{statement.name}.hidden")
        statement.rename(hidden)
        report = place.required(said["run"]["id"])
        assert report.exit_code == 1, said["kind"]
        assert any(
            "is not signed by key" in each and "there is no signature of it" in each for each in found(report)
        )
        assert place.audit(said["run"]["id"]).exit_code == 0, "without a key nothing is required"
        hidden.rename(statement)


def test_decisions_that_were_swapped_between_artifacts_are_found(place: SignedPlace) -> None:
    one, other = (path for path in place.statements() if b'"subject":"sft"' in path.read_bytes())
    assert one.parents[2] != other.parents[2], "of two stage keys"
    for name in (STATEMENT, SIGNATURE):
        first, second = one.with_name(name), other.with_name(name)
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)
    said = found(place.required())
    assert any("the answer about sft is not signed" in each for each in said), said


def test_a_decision_that_was_moved_to_another_artifact_of_its_run_is_found(place: SignedPlace) -> None:
    record = place.record
    mine = [path for path in place.statements() if record.run_id in path.read_text()]
    [answer] = [path for path in mine if '"subject":"sft"' in path.read_text()]
    elsewhere = (
        place.workspace.store / "decisions" / str(record.stages["model"].stage_key) / answer.parents[1].name
    )
    shutil.copytree(answer.parents[1], elsewhere)
    said = found(place.audit())
    assert any("about another artifact; it was moved here" in each for each in said), said


def test_a_signed_decision_that_the_records_have_lost_is_found(place: SignedPlace) -> None:
    record = place.record
    path = place.workspace.folder(record.run_id) / "run.json"
    run = json.loads(path.read_bytes())
    run["approvals"] = []
    path.write_text(json.dumps(run))
    for file in (path.parent / "approvals").glob("*.json"):
        file.unlink()
    said = found(place.audit())
    assert any(
        "has signed a decision (approval) that the run's records do not have" in each and ADA in each
        for each in said
    ), said


def test_a_statement_that_was_edited_does_not_hold(place: SignedPlace) -> None:
    path = place.statement("moved_alias")
    path.write_bytes(path.read_bytes().replace(ADA.encode(), EVE.encode()))
    replace_everywhere(place, ADA, EVE)
    for report in (place.audit("asking@champion"), place.required("asking@champion")):
        assert any("statement or signature was changed after signing" in each for each in found(report))


@pytest.mark.parametrize(
    "statement",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"predicate": []}',
        b'{"predicate": {"about": 1, "signed_at": 1}, "predicateType": "urn:x-vantage-rlhf:decision:v1"}',
        "later",
        "another kind",
    ],
)
def test_what_is_signed_and_no_decision_is_wrong(place: SignedPlace, statement: bytes | str) -> None:
    """Whoever has the key may sign anything; the audit names it, and goes on."""
    record, key = place.record, place.key
    whole = json.loads(place.statement("moved_alias").read_bytes())
    if statement == "later":
        whole["predicate"]["signed_at"] = 10**30
    elif statement == "another kind":
        whole["predicateType"] = "https://slsa.dev/provenance/v1"
    data = statement if isinstance(statement, bytes) else json.dumps(whole).encode()
    assert key.public.pem is not None
    add_signature(
        place.workspace.storage,
        str(record.stages["sft"].stage_key),
        key_id=key.public.key_id,
        public_key=key.public.pem,
        statement=data,
        signature=sign(data, key),
        about="decisions",
    )
    said = found(place.audit())
    assert len(said) == 1
    assert "what it signed is no statement about a decision" in said[0]


def test_a_decision_holds_for_the_artifact_as_it_was_then(place: SignedPlace) -> None:
    """The decision's statement names that of the artifact; other provenance, verdicts or inputs make another one."""
    record = place.record
    ref = place.workspace.store / "refs" / f"{record.stages['sft'].stage_key}.json"
    ref.chmod(0o644)
    ref.write_bytes(ref.read_bytes().replace(b'"provenance":{', b'"provenance":{"added":"later",'))
    deciding = [place.key]
    report = place.required(keys=(), deciding=deciding)
    assert not any("decisions" in each for each in found(report)), (
        "that statement is signed, and of an earlier state"
    )
    shutil.rmtree(place.workspace.store / "signatures")
    said = found(place.required(keys=(), deciding=deciding))
    assert any(
        "the answer about sft" in each and "another statement of the artifact" in each for each in said
    ), said


class TestKeys:
    """When keys count, by the policy."""

    def test_a_revoked_key_signs_nothing_any_longer(self, place: SignedPlace) -> None:
        key = place.key.public.key_id
        place.policy(
            f"models: {{}}\nkeys: {{{key}: {{revoked: {{at: 2026-01-01, reason: laptop stolen}}}}}}\n"
        )
        report = place.required("asking@champion")
        said = found(report)
        assert report.exit_code == 1
        assert any(": signature: is not signed by key" in each for each in said), said
        [answer] = [each for each in said if "decisions: the answer about sft" in each]
        assert f"key {key[:16]} was revoked as of 2026-01-01 (laptop stolen)" in answer
        plain = place.audit("asking@champion")
        assert found(plain) == []
        assert any("does not count" in each for each in found(plain, "note"))

        listed = [path.parent.name for path in place.workspace.store.rglob(STATEMENT)]
        accepted = ", ".join(listed)
        place.policy(
            f"models: {{}}\nkeys: {{{key}: {{revoked: {{at: 2026-01-01, reason: x, accepted_statements: [{accepted}]}}}}}}\n"
        )
        assert place.required("asking@champion").exit_code == 0

    @pytest.mark.parametrize("period", ["valid_until: 2026-01-31", "valid_from: 2999-01-01"])
    def test_a_key_out_of_its_period_signs_no_decision(self, place: SignedPlace, period: str) -> None:
        key = place.key.public.key_id
        place.policy(f"models: {{}}\nkeys: {{{key}: {{{period}}}}}\n")
        report = place.required("asking@champion")
        said = found(report)
        assert any(
            "decisions: the answer about sft" in each and period.partition(": ")[2] in each for each in said
        )
        assert not any(": signature:" in each for each in said), "a statement about an artifact has no time"
        assert any(
            ": signature: is not signed by key" in each and "a key that is valid now" in each
            for each in found(report, "unchecked")
        )

    def test_a_key_within_its_period_signs(self, place: SignedPlace) -> None:
        key = place.key.public.key_id
        place.policy(f"models: {{}}\nkeys: {{{key}: {{valid_from: 2000-01-01, valid_until: 9999-12-31}}}}\n")
        assert place.required("asking@champion").exit_code == 0

    def test_an_unreadable_policy_leaves_the_validity_of_keys_open(self, place: SignedPlace) -> None:
        place.policy("keys: [")
        report = place.required("asking@champion")
        assert (found(report), report.exit_code) == ([], 2)
        assert any("when keys are valid is not known" in each for each in found(report, "unchecked"))

    def test_a_person_may_sign_with_a_key_of_their_own(self, place: SignedPlace) -> None:
        place.run("seed=3")
        assert place.decide("sft", place.recipe.with_name("other.pem")) == place.other.public.key_id
        assert any("is not signed by key" in each for each in found(place.required()))
        assert found(place.required(deciding=[place.other])) == []


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that waits for an answer, its recipe and two keys. Tests may only read it."""

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.delenv("MLFLOW_TRACKING_URI", raising=False)
            patched.delenv(VARIABLE, raising=False)
            for name in ("key.pem", "other.pem"):
                new_key(folder / name)
            SignedPlace(folder).run()

    return made_once(tmp_path_factory, "unsigned decisions", make)


class TestWithoutAKey:
    """Without a key, decisions are recorded as before."""

    @pytest.fixture
    def unsigned(self, waiting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SignedPlace:
        """Return a copy whose MLflow keeps new files in the copy."""
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.delenv(VARIABLE, raising=False)
        shutil.copytree(waiting, tmp_path, symlinks=True, dirs_exist_ok=True)
        with closing(sqlite3.connect(tmp_path / "workspace" / "mlflow.db")) as database:
            for table, column in (
                ("experiments", "artifact_location"),
                ("runs", "artifact_uri"),
                ("logged_models", "artifact_location"),
            ):
                database.execute(
                    f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (str(waiting), str(tmp_path))
                )
            database.commit()
        return SignedPlace(tmp_path, tmp_path)

    @pytest.mark.slow
    def test_an_answer_needs_none(self, unsigned: SignedPlace) -> None:
        assert unsigned.decide("sft") is None
        assert unsigned.statements() == []
        unsigned.run()
        report = unsigned.audit()
        assert (found(report), found(report, "unchecked")) == ([], [])

    def test_it_is_signed_later(self, unsigned: SignedPlace) -> None:
        unsigned.decide("sft")
        record = unsigned.run()
        sign_all(unsigned.workspace, record, list(record.stages), unsigned.key)
        assert any("the answer about sft is not signed" in each for each in found(unsigned.required()))
        steps = list(record.stages)
        assert sign_decisions_of(unsigned.workspace, record, steps, unsigned.key) == 1
        assert sign_decisions_of(unsigned.workspace, record, steps, unsigned.key) == 0
        assert unsigned.required().exit_code == 0

    def test_the_policy_may_ask_for_one(self, unsigned: SignedPlace) -> None:
        key = unsigned.key.public.key_id
        unsigned.policy(f"models: {{asking: {{aliases: {{champion: {{decision_keys: [{key}]}}}}}}}}\n")
        with pytest.raises(
            RunError, match=r"decision_keys: the answer about sft must be signed by key .*--key"
        ):
            unsigned.decide("sft")
        with pytest.raises(RunError, match="and it is key"):
            unsigned.decide("sft", unsigned.folder / "other.pem")
        assert unsigned.record.approvals == ()
        assert unsigned.decide("sft", unsigned.folder / "key.pem") == key
        unsigned.run()
        assert unsigned.decide("publish:asking", unsigned.folder / "key.pem") == key
        assert unsigned.run().refused_aliases == {}
        assert found(unsigned.audit("asking@champion")) == []
        with pytest.raises(RunError, match="the movement of asking@champion must be signed by key"):
            publish_again(unsigned.workspace, unsigned.record.run_id, Witness(), model=None, alias=None)

    def test_an_answer_that_was_not_signed_holds_the_alias_back(self, unsigned: SignedPlace) -> None:
        unsigned.decide("sft")
        unsigned.policy(
            f"models: {{asking: {{aliases: {{champion: {{decision_keys: [{unsigned.key.public.key_id}]}}}}}}}}\n"
        )
        record = unsigned.run()
        [why] = record.refused_aliases.values()
        assert "decision_keys: the answer about sft is not signed by key" in why
        assert f"`vantage sign {record.run_id} --key FILE`" in why
        sign_decisions_of(unsigned.workspace, record, list(record.stages), unsigned.key)
        key = unsigned.folder / "key.pem"
        publish_again(unsigned.workspace, record.run_id, Witness(), model=None, alias=None, key=key)
        unsigned.decide("publish:asking", key)
        outcomes = publish_again(
            unsigned.workspace, record.run_id, Witness(), model=None, alias=None, key=key
        )
        assert outcomes == {"asking@champion": "published"}

    def test_a_revoked_or_expired_key_decides_nothing_more(self, unsigned: SignedPlace) -> None:
        key = unsigned.key.public.key_id
        for text, said in (
            ("revoked: {at: 2026-01-01, reason: lost}", "was revoked as of 2026-01-01"),
            ("valid_until: 2026-01-01", "was valid until 2026-01-01"),
        ):
            unsigned.policy(f"models: {{}}\nkeys: {{{key}: {{{text}}}}}\n")
            with pytest.raises(RunError, match=said):
                unsigned.decide("sft", unsigned.folder / "key.pem")
        assert unsigned.record.approvals == ()

    def test_of_two_answers_at_once_only_the_recorded_one_is_signed(
        self, unsigned: SignedPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = unsigned.folder / "key.pem"
        stored = approving.add_answer

        def other_was_faster(workspace: Workspace, run_id: str, approval: Approval) -> None:
            stored(workspace, run_id, approval.model_copy(update={"by": EVE}))
            stored(workspace, run_id, approval)

        monkeypatch.setattr(approving, "add_answer", other_was_faster)
        with pytest.raises(RunError, match="is approved by eve"):
            unsigned.decide("sft", key)
        assert unsigned.statements() == []

    def test_a_named_key_that_cannot_sign_records_nothing(self, unsigned: SignedPlace) -> None:
        record = unsigned.run()
        manifest = unsigned.workspace.store / "objects" / str(record.stages["sft"].digest) / "manifest.json"
        manifest.chmod(0o644)
        manifest.write_text("{}")
        with pytest.raises(OSError, match="sft of run .* is damaged"):
            unsigned.decide("sft", unsigned.folder / "key.pem")
        assert unsigned.record.approvals == ()
        assert unsigned.decide("sft") is None, "without a key it is recorded"

    def test_an_answer_that_was_edited_is_not_signed(self, unsigned: SignedPlace) -> None:
        unsigned.decide("sft")
        record = unsigned.run()
        path = unsigned.workspace.folder(record.run_id) / "run.json"
        path.write_bytes(path.read_bytes().replace(ADA.encode(), EVE.encode()))
        with pytest.raises(OSError, match="is not signed: run.json has it as approved by eve"):
            sign_decisions_of(unsigned.workspace, unsigned.record, list(record.stages), unsigned.key)
        assert unsigned.statements() == []


def test_a_loosened_gate_is_signed_by_the_run_and_missed_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    new_key(tmp_path / "key.pem")
    place = SignedPlace(tmp_path)
    place.recipe.write_text(SIGNED)
    place.run("publish=[]")
    record = place.run("publish.0.approve=false", "stages.sft.gate.at_most=5")
    assert record.stages["sft"].loosened
    report = place.required("asking@champion")
    assert (found(report), found(report, "unchecked")) == ([], [])
    statement = place.statement("loosened_gate")
    assert json.loads(statement.read_bytes())["predicate"]["decision"]["metric"] == "test_nll"
    shutil.rmtree(statement.parent)
    said = found(place.required("asking@champion"))
    assert any("the loosened gate test_nll of sft is not signed by key" in each for each in said), said


class TestCommands:
    """``approve``, ``rollback``, ``sign`` and ``audit`` as a user types them."""

    def test_a_key_of_ones_own(self, place: SignedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ada's key signs decisions and no artifact, so --decision-key names it."""
        where = ("--workspace", str(place.workspace.root))
        release, ada = (place.recipe.with_name(name) for name in ("key.pem.pub", "other.pem"))
        place.run("seed=3")
        given = ("approve", "latest", "sft", "--reason", "a small slice", "--by", ADA, "--key")
        refused = vantage(*given, f"{ada}.pub", *where)
        assert (refused.exit_code, "is a public key; name the file of a private key" in refused.stderr) == (
            65,
            True,
        )
        assert place.record.approvals == ()
        done = vantage(*given, str(ada), *where)
        assert (done.exit_code, f"signed by key {place.other.public.key_id}" in done.stdout) == (0, True)
        required = ("audit", "latest", "--require-signature", str(release), *where)
        assert vantage(*required).exit_code == 1
        assert vantage(*required, "--decision-key", f"{ada}.pub").exit_code == 0
        signed = vantage("sign", "latest", "--key", str(place.recipe.with_name("key.pem")), *where)
        assert "decisions of people about them: 1 signed" in signed.stdout
        assert vantage(*required).exit_code == 0

    def test_an_alias_that_is_moved_is_signed(self, place: SignedPlace) -> None:
        where = ("--workspace", str(place.workspace.root))
        ada = place.recipe.with_name("other.pem")
        back = ("rollback", "asking@champion", "--to", "2", "--reason", "better", "--key", str(ada), *where)
        done = vantage(*back)
        assert done.exit_code == 0, done.output
        report = place.required("asking@champion", deciding=[place.other])
        assert (found(report), report.exit_code) == ([], 0)
        said = found(place.required("asking@champion"))
        assert [
            each for each in said if "decisions" in each and "the movement of alias asking@champion" in each
        ]

    def test_without_the_recipes_key_the_answer_is_recorded_unsigned(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        new_key(tmp_path / "key.pem")
        place = SignedPlace(tmp_path)
        place.recipe.write_text(SIGNED)
        place.run()
        (tmp_path / "key.pem").rename(tmp_path / "moved.pem")
        where = ("--workspace", str(place.workspace.root))
        done = vantage("approve", "latest", "sft", "--reason", "a small slice", *where)
        assert done.exit_code == 0, done.output
        assert "NOT SIGNED: sign.key: " in done.stderr
        assert f"sign {place.record.run_id} --key FILE" in done.stderr
        told = vantage("reject", "latest", "sft", "--reason", "no", *where, "--json")
        assert told.exit_code == 65, "an answer is never changed"


def vantage(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))
