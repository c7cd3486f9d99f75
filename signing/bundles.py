"""Sign by OpenSSF's ``model_signing``: a Sigstore bundle over a statement's file, made and checked offline.

The library signs files, so a statement is written to a temporary folder. Anyone with the library checks the same two files:
``model_signing verify key statement.json --signature signature.sigstore.json --public_key KEY.pub``.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from vantage.signing.keys import SigningKey, require_packages
from vantage.storage.signatures import SIGNATURE, STATEMENT


def sign(statement: bytes, key: SigningKey) -> bytes:
    """Return the bundle with the signature; like all signatures by elliptic curves, it differs each time.

    Raises:
        MissingPackages: the library is not installed.
        OSError, ValueError: the key's file is gone, or has changed.
    """
    require_packages()
    from model_signing import signing

    with tempfile.TemporaryDirectory(prefix="vantage-sign-") as folder:
        file, signature = Path(folder, STATEMENT), Path(folder, SIGNATURE)
        file.write_bytes(statement)
        # bytes, despite the library's annotation: cryptography accepts only bytes
        password: Any = key.password
        config = signing.Config().use_elliptic_key_signer(private_key=key.path, password=password)
        config.sign(file, signature)
        made = signature.read_bytes()
    problem = problem_of(statement, made, key.public.pem or b"")
    if problem is not None:  # the file was replaced since the key was read
        raise ValueError(f"{key.path} does not hold the key {key.public.short} any longer; sign again")
    return made


def problem_of(statement: bytes, signature: bytes, public_key: bytes) -> str | None:
    """Return the reason why this is no signature of this key over this statement; None: it is one.

    Raises:
        MissingPackages: the library is not installed.
    """
    require_packages()
    from model_signing import hashing, verifying

    with tempfile.TemporaryDirectory(prefix="vantage-verify-") as folder:
        names = (STATEMENT, SIGNATURE, "key.pub")
        for name, data in zip(names, (statement, signature, public_key), strict=True):
            Path(folder, name).write_bytes(data)
        file, bundle, key = (Path(folder, name) for name in names)
        try:
            if not json.loads(signature)["verificationMaterial"]["publicKey"]["hint"]:
                return "it does not say which key made it"  # the library would only print this, and continue
            whole_files = hashing.Config().use_file_serialization(hashing_algorithm="sha256")
            config = verifying.Config().set_hashing_config(whole_files)
            config.use_elliptic_key_verifier(public_key=key).verify(file, bundle)
        except Exception as error:  # a library may raise anything for bytes from an unknown writer
            said = str(error).partition(":")[0].strip()
            return said if said in ("Key mismatch", "Signature mismatch") else type(error).__name__
    return None
