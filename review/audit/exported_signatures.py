"""Check the signatures in an exported folder, each with the key beside it, as anyone without a workspace can."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vantage.review.audit.signatures import SUBJECT
from vantage.schemas.records.audit import Check
from vantage.storage.signatures import KEY_FILE, MAX_BYTES, SIGNATURE, STATEMENT


def signature_files(provenance: Mapping[str, Any]) -> set[str]:
    """Return the files of the signatures that ``vantage.json`` names."""
    folders = [Path(folder) for _, folder in _named(provenance)]
    return {
        path.as_posix()
        for folder in folders
        for path in (folder / STATEMENT, folder / SIGNATURE, folder.parent / KEY_FILE)
    }


def exported_signature_checks(path: Path, provenance: Mapping[str, Any], digest: str) -> Iterator[Check]:
    """Yield a check of each signature that ``vantage.json`` names."""
    for key_id, folder in _named(provenance):
        outcome, detail = _look_at(path / folder, key_id, digest)
        yield Check.model_validate({"subject": f"{SUBJECT} {folder}", "outcome": outcome, "detail": detail})


def _named(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key id, folder of a statement), without entries of another type or with a path out of the folder."""
    named = provenance.get("signatures")
    return [
        (str(key_id), folder)
        for key_id, folders in (named.items() if isinstance(named, dict) else ())
        for folder in (folders if isinstance(folders, list) else ())
        if isinstance(folder, str) and not Path(folder).is_absolute() and ".." not in Path(folder).parts
    ]


def _look_at(folder: Path, key_id: str, digest: str) -> tuple[str, str]:
    from vantage.signing.bundles import problem_of
    from vantage.signing.keys import BadKey, MissingPackages, public_key_in
    from vantage.signing.statements import is_about

    try:
        statement, signature, pem = (
            _small(each) for each in (folder / STATEMENT, folder / SIGNATURE, folder.parent / KEY_FILE)
        )
        key = public_key_in(pem, KEY_FILE)
        if key.key_id != key_id:
            return "wrong", f"the key beside it is {key.short}, and vantage.json says {key_id[:16]}"
        problem = problem_of(statement, signature, pem)
    except MissingPackages as error:
        return "unchecked", str(error)
    except (OSError, BadKey) as error:
        return "wrong", f"cannot be read: {error}"
    if problem is not None:
        return (
            "wrong",
            f"the signature does not hold: {problem}; statement or signature was changed after signing",
        )
    if not is_about(statement, digest):
        return "wrong", f"the statement is not about the artifact {digest[:12]}; it was moved here"
    return "ok", f"signed by key {key.short}, which was compared with no key of yours"


def _small(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise OSError(f"{path.name} is missing, no plain file, or larger than {MAX_BYTES:,} bytes")
    return path.read_bytes()
