"""Keys for signatures: elliptic-curve keys in PEM files.

A key's id is the sha256 of its public key (DER, SubjectPublicKeyInfo), so an id alone identifies the key.
"""

import hashlib
import importlib.util
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vantage.schemas.recipe.recipe import Recipe
from vantage.storage.durable_files import sync_folder, write_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

PASSWORD = "VANTAGE_KEY_PASSWORD"
"""Environment variable with the password of private keys; stages do not get it (``vantage.schemas.safe_text``)."""
CURVES = ("secp256r1", "secp384r1", "secp521r1")
"""Curves that ``model_signing`` accepts; new keys use the first."""
KEY_ID = re.compile(r"[0-9a-f]{64}")

_MAX_BYTES = 64 * 1024
_LONGEST_PASSWORD = 1023
"""Most bytes of a password that OpenSSL accepts."""
_PACKAGES = ("model_signing", "OpenSSL", "cryptography")
"""``model_signing`` 1.1 imports OpenSSL without declaring it, so the extra names both."""


class BadKey(ValueError):
    """A key cannot be used; the message contains the reason and the remedy."""


class MissingPackages(ValueError):
    """The packages for signatures are not installed."""


@dataclass(frozen=True)
class PublicKey:
    """A key by which signatures are checked."""

    key_id: str
    pem: bytes | None = None
    """The key; None: only its id is known. A key that is stored under this id is then compared with the id."""

    @property
    def short(self) -> str:
        """The beginning of its id, for display."""
        return self.key_id[:16]


@dataclass(frozen=True)
class SigningKey:
    """A private key that can be used: its file, and its password if it has one."""

    path: Path
    public: PublicKey
    password: bytes | None = field(repr=False)
    """Password; None: the file is not encrypted."""


def require_packages() -> None:
    """Raise MissingPackages if the packages for signing and checking are not installed."""
    if not can_check():
        raise MissingPackages(
            "signatures need the package model_signing; install it: pip install 'vantage-rlhf[sign]'"
        )


def can_check() -> bool:
    """Return whether the packages for signing and checking are installed."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def new_key(path: Path) -> SigningKey:
    """Write a new private key (mode 0600) and its public key, ``FILE.pub``; with a password if the environment has one.

    Raises:
        BadKey: one of the files exists already, or the folder does not.
        OSError: the disk fails.
    """
    require_packages()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not path.name:
        raise BadKey(f"{path} is a folder; name the file that the key is to be written to")
    public_path = path.with_name(f"{path.name}.pub")
    for each in (path, public_path):
        if os.path.lexists(each):
            raise BadKey(f"{each} exists, and a key is never written over; name another file")
    if not path.parent.is_dir():
        raise BadKey(f"there is no folder {path.parent}; make it first")
    private = ec.generate_private_key(ec.SECP256R1())
    password = _password()
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        if len(password) > _LONGEST_PASSWORD:
            raise BadKey(
                f"{PASSWORD} has {len(password):,} bytes, and a key's password at most {_LONGEST_PASSWORD:,}; set a shorter one"
            )
        encryption = serialization.BestAvailableEncryption(password)
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    public = _public(private.public_key())
    assert public.pem is not None, "made here"
    _write_pair(path, pem, public_path, public.pem)
    return SigningKey(path, public, password)


def _write_pair(path: Path, private: bytes, public_path: Path, public: bytes) -> None:
    """Write both files, or neither if one of them cannot be written."""
    made: list[Path] = []
    try:
        for each, data in ((path, private), (public_path, public)):
            made.append(each)
            write_file(each, data, private=each == path)
    except OSError as error:
        if isinstance(error, FileExistsError):  # another process made this file a moment ago
            made.pop()
        for each in made:
            with suppress(OSError):
                each.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def signing_key(path: Path) -> SigningKey:
    """Return the private key in a file, if it can be used now.

    Raises:
        BadKey: there is no key, others may read it, its password is missing or wrong, or it is of another kind.
    """
    require_packages()
    data = _read(path)
    if b"PRIVATE KEY" not in data:
        what = "a public key" if b"PUBLIC KEY" in data else "no key in PEM form"
        raise BadKey(
            f"{path} is {what}; name the file of a private key, which `vantage keys new FILE` writes"
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise BadKey(
            f"{path} has mode {mode:04o}, so others than its owner may use this private key; chmod 600 {path}"
        )
    private, password = _private(path, data)
    return SigningKey(path, _public(private.public_key()), password)


def public_key(path: Path) -> PublicKey:
    """Return the public key in a file, which may also hold the private one.

    Raises:
        BadKey: as ``signing_key``, but the mode of a private key's file is not checked.
    """
    require_packages()
    data = _read(path)
    if b"PRIVATE KEY" in data:
        return _public(_private(path, data)[0].public_key())
    return public_key_in(data, str(path))


def public_key_in(pem: bytes, where: str) -> PublicKey:
    """Return the public key in a PEM text; ``where`` names it in messages.

    Raises:
        BadKey: the text has no key, or one of another kind.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        loaded = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise BadKey(
            f"{where} holds no public key in PEM form; name a file that `vantage keys new` wrote"
        ) from None
    return _public(_checked(loaded, where))


def path_of(named: str | Path) -> Path:
    """Return a path, with ``~`` and ``~USER`` expanded as in shells. Raises BadKey if there is no such user."""
    try:
        return Path(named).expanduser()
    except RuntimeError:
        raise BadKey(f"{named}: there is no such user; write the path in full") from None


def required_key(named: str, folder: Path) -> PublicKey:
    """Return a key that must have signed: its id, or the file of its public key, relative to ``folder``.

    Raises:
        BadKey: ``named`` is neither.
    """
    path = folder / path_of(named)
    if KEY_ID.fullmatch(named) and not path.exists():
        return PublicKey(named)
    return public_key(path)


def key_of(recipe: Recipe) -> SigningKey | None:
    """Read and return the key of ``sign:``; None: the recipe's artifacts are not signed.

    Raises:
        BadKey, MissingPackages: the key cannot be used; the message names the field.
    """
    if recipe.sign is None:
        return None
    if recipe.sign.key is not None:
        field_name, path = "sign.key", recipe.sign.key
    else:
        variable = str(recipe.sign.key_variable)
        field_name, path = f"sign.key_variable={variable}", os.environ.get(variable, "")
        if not path:
            raise BadKey(
                f"{field_name}: this environment variable is not set; export {variable}=FILE, the path of a private key"
            )
    try:
        return signing_key(path_of(path))
    except BadKey as error:
        raise BadKey(f"{field_name}: {error}") from None
    except MissingPackages as error:
        raise MissingPackages(f"{field_name}: {error}") from None


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is no file" if path.exists() else "is not there"
            raise BadKey(f"{path} {what}; name a key's file, or make one with `vantage keys new FILE`")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, BadKey):
            raise
        raise BadKey(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); check its path and permissions"
        ) from None
    if len(data) > _MAX_BYTES:
        raise BadKey(f"{path} is longer than {_MAX_BYTES:,} bytes, and no key; name a key's file")
    return data


def _private(path: Path, data: bytes) -> "tuple[EllipticCurvePrivateKey, bytes | None]":
    """Return the private key, and its password if it is encrypted."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    password = _password() if b"ENCRYPTED" in data else None
    if b"ENCRYPTED" in data and password is None:
        raise BadKey(f"{path} is encrypted, and {PASSWORD} is not set; set it to the key's password")
    try:
        loaded = load_pem_private_key(data, password)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        why = (
            f"{PASSWORD} is not its password" if password else "it is damaged, or in a form that is not known"
        )
        raise BadKey(f"{path} cannot be opened: {why}; correct it, or name another key") from None
    _checked(loaded.public_key(), str(path))
    assert isinstance(loaded, EllipticCurvePrivateKey), "as its public key"
    return loaded, password


def _checked(loaded: object, where: str) -> "EllipticCurvePublicKey":
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    if not isinstance(loaded, EllipticCurvePublicKey) or loaded.curve.name not in CURVES:
        raise BadKey(
            f"{where} is a key of another kind than the elliptic curves {', '.join(CURVES)}; make one with `vantage keys new FILE`"
        )
    return loaded


def _public(key: "EllipticCurvePublicKey") -> PublicKey:
    from cryptography.hazmat.primitives import serialization

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    der = key.public_bytes(serialization.Encoding.DER, form)
    return PublicKey(hashlib.sha256(der).hexdigest(), key.public_bytes(serialization.Encoding.PEM, form))


def _password() -> bytes | None:
    # the raw bytes of the variable, in whatever encoding
    return os.fsencode(os.environ.get(PASSWORD, "")) or None


def described(path: Path) -> dict[str, str]:
    """Return the output of ``vantage keys show``: id, kind and curve of a key, never the key itself.

    Raises:
        BadKey: as ``public_key``.
    """
    require_packages()
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    found = public_key(path)
    assert found.pem is not None, "read from a file"
    loaded = load_pem_public_key(found.pem)
    assert isinstance(loaded, EllipticCurvePublicKey), "as public_key checks"
    data = _read(path)
    kind = "public"
    if b"PRIVATE KEY" in data:
        kind = "private, encrypted" if b"ENCRYPTED" in data else "private, not encrypted"
    return {"key_id": found.key_id, "kind": kind, "curve": loaded.curve.name, "file": str(path)}
