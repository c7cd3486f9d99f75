"""``vantage keys`` and ``vantage sign`` work as a user types them."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.signing.conftest import CANARY, RECIPE, STEPS, Ended, Keys
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.cli.output import _code_of
from vantage.review.diff.sides import find_side
from vantage.signing import keys as signing_keys
from vantage.signing.keys import PASSWORD
from vantage.signing.targets import find_target


def vantage(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def test_keys_are_made_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key.pem"
    done = vantage("keys", "new", file)
    assert done.exit_code == 0, done.output
    assert f"private key  {file}  (mode 0600, encrypted)" in done.stdout
    assert CANARY not in done.output
    shown = json.loads(vantage("keys", "show", file, "--json").stdout)
    assert shown["kind"] == "private, encrypted"
    assert f"key id       {shown['key_id']}" in done.stdout
    assert vantage("keys", "show", f"{file}.pub").stdout.startswith(
        f"key id      {shown['key_id']}\nkind        public\n"
    )
    again = vantage("keys", "new", file)
    assert (again.exit_code, "never written over" in again.stderr) == (ExitCode.BAD_INPUT, True)
    monkeypatch.delenv(PASSWORD)
    refused = vantage("keys", "show", file)
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert (
        refused.stderr
        == f"vantage: {file} is encrypted, and VANTAGE_KEY_PASSWORD is not set; set it to the key's password\n"
    )
    plain = vantage("keys", "new", tmp_path / "plain.pem", "--json")
    assert json.loads(plain.stdout)["encrypted"] is False


def test_sign_says_what_it_signed_and_what_was_signed_before(copied: Ended, keys: Keys) -> None:
    place = ("--workspace", copied.workspace.root)
    first = vantage("sign", "latest/sft", "--key", keys.folder / "other.pem", *place)
    assert first.exit_code == 0, first.output
    lines = first.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["model", "data.demonstrations", "sft"]
    assert all(line.endswith("  signed") for line in lines[:3])
    assert lines[3].endswith(f"3 signed, 0 signed before, by key {keys.other.public.key_id}")
    second = vantage("sign", "latest", "--key", keys.folder / "other.pem", *place, "--json")
    told = json.loads(second.stdout)
    assert [(each["step"], each["new"]) for each in told["artifacts"]] == [
        (step, step in ("data.preferences", "reward")) for step in STEPS
    ]


@pytest.mark.parametrize(
    "target, key, code, said",
    [
        ("latest", "key.pem.pub", ExitCode.BAD_INPUT, "is a public key; name the file of a private key"),
        ("latest", "none.pem", ExitCode.BAD_INPUT, "none.pem is not there"),
        ("9", "other.pem", ExitCode.BAD_INPUT, "there is no run 9"),
        ("latest/policy", "other.pem", ExitCode.BAD_INPUT, "has no artifact of policy"),
        ("no-such-model@champion", "other.pem", ExitCode.BAD_INPUT, "no-such-model"),
    ],
)
def test_what_cannot_be_signed_is_one_sentence(
    copied: Ended, keys: Keys, target: str, key: str, code: ExitCode, said: str
) -> None:
    done = vantage("sign", target, "--key", keys.folder / key, "--workspace", copied.workspace.root)
    assert done.exit_code == code
    assert said in done.stderr
    assert "Traceback" not in done.output


def test_sign_takes_the_run_beside_a_folder_of_its_name(
    copied: Ended, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--key", keys.folder / "other.pem", "--workspace", copied.workspace.root, "--json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latest").mkdir()
    told = [json.loads(vantage("sign", named, *options).stdout) for named in ("latest", "run:latest")]
    assert [each["run_id"] for each in told] == [copied.record.run_id] * 2
    for named, said in {
        "folder:latest": "folder:latest is a folder; ",
        "recipe:quickstart": "recipe:quickstart is a recipe, not a result of a run; ",
    }.items():
        refused = vantage("sign", named, *options)
        assert (refused.exit_code, said in refused.stderr) == (ExitCode.BAD_INPUT, True)
        assert "sign` accepts RUN, RUN/STAGE, RUN/model, or NAME, NAME@ALIAS" in refused.stderr


def test_where_the_statements_are_is_told_of_any_workspace(copied: Ended, keys: Keys, tmp_path: Path) -> None:
    place = tmp_path / "signatures" / "workspace"
    place.parent.mkdir()
    copied.workspace.root.rename(place)
    done = vantage("sign", "latest", "--key", keys.folder / "other.pem", "--workspace", place)
    assert done.stdout.endswith(f"statements and signatures: {place}/store/signatures\n")


@pytest.mark.parametrize("named", ["tiny@champion", "tiny/1", "tiny", "models:/tiny"])
def test_a_registered_model_while_mlflow_does_not_answer(
    ended: Ended, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """The exit code is 69, as for every command that asks MLflow; `explained` ends the process with it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    for find in (find_target, find_side):
        with pytest.raises(ConnectionError, match="MLflow at http://127.0.0.1:9 does not answer") as refused:
            find(ended.workspace, named)
        assert _code_of(refused.value) == ExitCode.UNAVAILABLE


def test_a_damaged_artifact_is_a_damage_of_the_storage(copied: Ended, keys: Keys) -> None:
    file = copied.workspace.store / "objects" / str(copied.record.stages["sft"].digest) / "weights.txt"
    file.chmod(0o644)
    file.write_text("x")
    done = vantage("sign", "latest", "--key", keys.folder / "other.pem", "--workspace", copied.workspace.root)
    assert done.exit_code == ExitCode.STORAGE
    assert "nothing is signed: weights.txt: has 1 bytes" in done.stderr


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_key_that_cannot_sign_is_refused_before_anything_is_trained(
    command: str, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "signed.yaml"
    recipe.write_text(RECIPE.replace("keys/", f"{keys.folder}/"))
    monkeypatch.setenv(PASSWORD, "not-the-one")
    done = vantage(command, recipe, "--workspace", tmp_path / "workspace")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "vantage: sign.key: " in done.stderr
    assert "VANTAGE_KEY_PASSWORD is not its password" in done.stderr
    assert not list((tmp_path / "workspace").glob("runs/*"))
    monkeypatch.setattr(signing_keys, "_PACKAGES", ("no_such_package",))
    done = vantage(command, recipe, "--workspace", tmp_path / "workspace")
    assert "pip install 'vantage-rlhf[sign]'" in done.stderr
