"""Keys are made once, never overwritten, private, and refused with a remedy where they cannot be used."""

import hashlib
import os
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.signing.conftest import CANARY, RECIPE
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.signing import keys as signing_keys
from vantage.signing.keys import (
    PASSWORD,
    BadKey,
    MissingPackages,
    described,
    key_of,
    new_key,
    path_of,
    public_key,
    required_key,
    signing_key,
)


@pytest.fixture(autouse=True)
def _no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD, raising=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_key_is_private_and_openssl_reads_both_files(tmp_path: Path) -> None:
    made = new_key(tmp_path / "key.pem")
    assert mode(tmp_path / "key.pem") == 0o600
    pem = (tmp_path / "key.pem.pub").read_bytes()
    assert made.public.pem == pem
    derived = subprocess.run(
        ["openssl", "pkey", "-in", str(tmp_path / "key.pem"), "-pubout"], capture_output=True, check=True
    )
    assert derived.stdout == pem
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", str(tmp_path / "key.pem.pub"), "-pubout", "-outform", "DER"],
        capture_output=True,
        check=True,
    )
    assert made.public.key_id == hashlib.sha256(der.stdout).hexdigest()
    assert public_key(tmp_path / "key.pem.pub") == public_key(tmp_path / "key.pem") == made.public


@pytest.mark.parametrize("there", ["key.pem", "key.pem.pub"])
def test_nothing_is_written_over(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(BadKey, match="never written over; name another file"):
        new_key(tmp_path / "key.pem")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadKey, match="there is no folder"):
        new_key(tmp_path / "nowhere" / "key.pem")


def test_an_encrypted_key_needs_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, CANARY)
    path = tmp_path / "key.pem"
    made = new_key(path)
    assert b"ENCRYPTED PRIVATE KEY" in path.read_bytes()
    assert CANARY not in repr(made)
    assert signing_key(path) == made
    monkeypatch.setenv(PASSWORD, "not-the-one")
    with pytest.raises(BadKey, match="VANTAGE_KEY_PASSWORD is not its password") as refused:
        signing_key(path)
    assert "not-the-one" not in str(refused.value)
    monkeypatch.delenv(PASSWORD)
    with pytest.raises(BadKey, match="is encrypted, and VANTAGE_KEY_PASSWORD is not set"):
        signing_key(path)


def test_a_password_does_not_disturb_a_key_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = new_key(tmp_path / "key.pem")
    monkeypatch.setenv(PASSWORD, CANARY)
    assert signing_key(tmp_path / "key.pem") == made


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o666])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, bits: int) -> None:
    new_key(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(bits)
    with pytest.raises(BadKey, match=f"has mode 0{bits:o}, so others .* chmod 600 "):
        signing_key(tmp_path / "key.pem")


def pem_of(kind: str) -> bytes:
    private = {
        "rsa": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
        "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    }[kind]()
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "secp256k1"])
def test_keys_of_other_kinds_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(pem_of(kind))
    path.chmod(0o600)
    with pytest.raises(BadKey, match="of another kind than the elliptic curves"):
        signing_key(path)


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "is not there; name a key's file"),
        (b"", "is no key in PEM form"),
        (b"-----BEGIN PUBLIC KEY-----\nAA\n", "is a public key; name the file of a private key"),
        (
            b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
            "cannot be opened: it is damaged",
        ),
        (b"\0" * 70_000, "is longer than 65,536 bytes"),
    ],
)
def test_what_is_no_private_key_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "key.pem"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(BadKey, match=said):
        signing_key(path)


def test_folders_and_odd_names_are_no_keys(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(BadKey):
            signing_key(path)


def test_of_a_pair_that_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    """``FILE`` has a name that is just short enough, ``FILE.pub`` has none."""
    with pytest.raises(OSError, match="name too long"):
        new_key(tmp_path / ("k" * 253))
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_else_writes_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = tmp_path / "key.pem.pub"

    def faster(path: str | Path) -> bool:
        public.write_text("theirs")
        return False

    monkeypatch.setattr(signing_keys.os.path, "lexists", faster)
    with pytest.raises(FileExistsError):
        new_key(tmp_path / "key.pem")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("named", ["", ".", "/"])
def test_a_key_needs_the_name_of_a_file(named: str) -> None:
    with pytest.raises(BadKey, match="is a folder; name the file that the key is to be written to"):
        new_key(Path(named))


def test_a_home_of_nobody_is_named() -> None:
    with pytest.raises(BadKey, match="~no-such-user/key.pem: there is no such user; write the path in full"):
        path_of("~no-such-user/key.pem")
    recipe = parse_recipe(RECIPE.replace("key: keys/key.pem", "key_variable: HOME_KEY"))
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("HOME_KEY", "~no-such-user/key.pem")
        with pytest.raises(BadKey, match="sign.key_variable=HOME_KEY: ~no-such-user/key.pem"):
            key_of(recipe)


def test_a_password_that_is_no_text_and_one_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, os.fsdecode(b"\xff\xfe-bytes"))
    made = new_key(tmp_path / "key.pem")
    assert signing_key(tmp_path / "key.pem") == made
    subprocess.run(
        ["openssl", "pkey", "-in", str(tmp_path / "key.pem"), "-passin", f"env:{PASSWORD}", "-noout"],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv(PASSWORD, "x" * 1024)
    with pytest.raises(
        BadKey, match="has 1,024 bytes, and a key's password at most 1,023; set a shorter one"
    ):
        new_key(tmp_path / "long.pem")
    assert not (tmp_path / "long.pem").exists()
    with pytest.raises(BadKey, match="is not its password"):
        signing_key(tmp_path / "key.pem")


def test_a_required_key_is_an_id_or_a_file_from_a_folder_on(tmp_path: Path) -> None:
    made = new_key(tmp_path / "key.pem").public
    by_id = required_key(made.key_id, tmp_path)
    assert (by_id.key_id, by_id.pem) == (made.key_id, None)
    assert required_key("key.pem.pub", tmp_path) == made
    with pytest.raises(BadKey, match="is not there"):
        required_key("key.pub", tmp_path)
    (tmp_path / ("0" * 64)).write_bytes((tmp_path / "key.pem.pub").read_bytes())
    assert required_key("0" * 64, tmp_path) == made, "a file whose name looks like an id"


def test_a_description_never_has_the_key(tmp_path: Path) -> None:
    made = new_key(tmp_path / "key.pem")
    told = described(tmp_path / "key.pem")
    assert told == {
        "key_id": made.public.key_id,
        "kind": "private, not encrypted",
        "curve": "secp256r1",
        "file": str(tmp_path / "key.pem"),
    }
    assert described(tmp_path / "key.pem.pub")["kind"] == "public"


def test_the_recipe_names_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_key(tmp_path / "key.pem")
    recipe = parse_recipe(RECIPE.replace("keys/", ""), folder=tmp_path)
    assert recipe.sign is not None and recipe.sign.key == str(tmp_path / "key.pem")
    assert key_of(recipe) == made
    recipe = parse_recipe(RECIPE.replace("key: keys/key.pem", "key_variable: MY_KEY"))
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(
        BadKey, match="sign.key_variable=MY_KEY: this environment variable is not set; export MY_KEY=FILE"
    ):
        key_of(recipe)
    monkeypatch.setenv("MY_KEY", str(tmp_path / "key.pem"))
    assert key_of(recipe) == made
    (tmp_path / "key.pem").chmod(0o644)
    with pytest.raises(BadKey, match=r"sign.key_variable=MY_KEY: .* has mode 0644"):
        key_of(recipe)
    assert key_of(parse_recipe(RECIPE.partition("sign:")[0])) is None


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing_keys, "_PACKAGES", ("no_such_package",))
    with pytest.raises(MissingPackages, match=r"pip install 'vantage-rlhf\[sign\]'"):
        new_key(tmp_path / "key.pem")
    assert list(tmp_path.iterdir()) == []
