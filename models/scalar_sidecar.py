"""The file beside a reward or value model that gives its role, the shift of its score, and the form of its head."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vantage.models.folders import UnsafeModel
from vantage.schemas.recipe.critic_head import ONE_VALUE, CriticHead

SIDECAR = "scalar.json"

Role = Literal["reward", "value"]
_FORMS = ("quantiles", "ensemble")


class HeadDiffers(ValueError):
    """The form of a critic's head differs from the recipe."""


@dataclass(frozen=True)
class Sidecar:
    """The content of the file."""

    role: str
    score_shift: float
    head: CriticHead = ONE_VALUE
    """Form of the head; settings of its loss are not stored."""


def write_sidecar(folder: Path, *, role: Role, score_shift: float, head: CriticHead = ONE_VALUE) -> None:
    """Write the file; a head with one value has no entry."""
    form = {name: getattr(head, name) for name in _FORMS if getattr(head, name) is not None}
    text = json.dumps({"role": role, "score_shift": score_shift, **form}, indent=2)
    (folder / SIDECAR).write_text(text + "\n", encoding="utf-8")


def read_sidecar(folder: Path) -> Sidecar:
    """Return the content of the file in the folder.

    Raises:
        UnsafeModel: there is no such file, or it cannot be read.
    """
    path = folder / SIDECAR
    if not path.is_file():
        raise UnsafeModel(f"{path} is missing: {folder} holds no reward or value model")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        head = CriticHead(**{name: found[name] for name in _FORMS if name in found})
        return Sidecar(str(found["role"]), float(found["score_shift"]), head)
    except (ValueError, KeyError, TypeError) as error:
        raise UnsafeModel(
            f"{path} does not give role and score_shift ({error!r}); save the model again"
        ) from error


def refuse_other_head(folder: Path, wanted: CriticHead) -> None:
    """Raise HeadDiffers if the head of the folder's value model has another form than the recipe asks for."""
    found = read_sidecar(folder).head
    if found.form != wanted.form:
        raise HeadDiffers(
            f"critic_head={wanted.form} is not the head of the critic in {folder}, which has critic_head={found.form}; set "
            f"critic_head: {found.form}, or pretrain a critic with head: {wanted.form}"
        )
