"""Which code the numbers of each kind of work came from, and why it changed last: ``code_record.json``.

    python tests/attempts/code_record.py "same numbers: the loop over chunks is one function now"

writes down the code as it is. Either the kinds of work that run a changed module have had their
``revision`` in ``vantage.schemas.kinds`` raised, or the reason begins with ``same numbers:``, and then somebody vouches that
they are: an artifact made with the old code stands for one made with the new.
"""

import json
import sys
from pathlib import Path
from typing import TypedDict

from vantage.attempts.code_digest import module_digests
from vantage.schemas.kinds import KINDS

RECORD = Path(__file__).with_suffix(".json")
SAME = "same numbers:"


class Written(TypedDict):
    """What a record holds."""

    revisions: dict[str, int]
    """Kind of work → its revision."""
    modules: dict[str, str]
    """Module → digest of its syntax tree."""
    reasons: dict[str, str]
    """Module → why it changed last."""


def read(path: Path = RECORD) -> Written:
    """The record as it was written last; an empty one where there is none."""
    if not path.is_file():
        return {"revisions": {}, "modules": {}, "reasons": {}}
    written: Written = json.loads(path.read_text())
    return written


def present() -> dict[str, dict[str, str]]:
    """Kind of work → module that it runs → digest."""
    return {name: module_digests(kind.module) for name, kind in KINDS.items()}


def revisions() -> dict[str, int]:
    """Kind of work → its revision."""
    return {name: kind.revision for name, kind in KINDS.items()}


def unrecorded(written: Written, code: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Changed, new or removed module → the kinds of work that run it."""
    now = {module: digest for digests in code.values() for module, digest in digests.items()}
    changed = {
        module
        for module in now.keys() | written["modules"].keys()
        if now.get(module) != written["modules"].get(module)
    }
    return {module: [kind for kind in code if module in code[kind]] for module in sorted(changed)}


def recorded(
    written: Written, code: dict[str, dict[str, str]], revisions: dict[str, int], *, reason: str
) -> Written:
    """The record of the code as it is.

    Raises:
        ValueError: no reason, or neither a raised revision nor ``same numbers:``.
    """
    changed = unrecorded(written, code)
    if not reason.removeprefix(SAME).strip():
        raise ValueError(f'say why the code has changed: "{SAME} ...", or what is different where it is not')
    if not reason.startswith(SAME):
        kinds = {kind for kinds in changed.values() for kind in kinds}
        same = sorted(kind for kind in kinds if revisions[kind] == written["revisions"].get(kind))
        if same:
            raise ValueError(
                f"{', '.join(same)} run changed code under an unchanged revision; raise it in "
                f'schemas/kinds.py, or begin with "{SAME}" if their numbers are the same'
            )
    now = {module: digest for digests in code.values() for module, digest in digests.items()}
    reasons = {
        module: reason if module in changed else written["reasons"].get(module, reason) for module in now
    }
    return {
        "revisions": dict(revisions),
        "modules": dict(sorted(now.items())),
        "reasons": dict(sorted(reasons.items())),
    }


def main(reason: str) -> None:
    """Write the record anew."""
    try:
        written = recorded(read(), present(), revisions(), reason=reason)
    except ValueError as error:
        sys.exit(str(error))
    RECORD.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
