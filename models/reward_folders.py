"""Import a reward model from a folder or the hub: a sequence classifier of transformers with one label, or one of Vantage's own."""

import shutil
import tempfile
from pathlib import Path

import torch

from vantage.models.folder_check import UnsafeModel, read_json_object
from vantage.models.folders import check_folder, load_tokenizer, refusing
from vantage.models.heads import ScalarModel, load_scalar, save_reward, scores
from vantage.models.scalar_sidecar import SIDECAR, read_sidecar, write_sidecar
from vantage.models.sequences import collate
from vantage.models.source_digest import copy_source, parse_source
from vantage.models.source_folders import download
from vantage.schemas.recipe.sources import Hub, LocalPath


def import_reward_model(
    source: str, output: Path, *, planned: str | None = None, scratch: Path | None = None
) -> None:
    """Write the reward model that ``source`` names to the folder ``output``, in float32.

    Args:
        planned: expected `source_digest`; None: any.
        scratch: folder to which files are copied before they are read; None: the system's temporary folder.

    Raises:
        ValueError: the source is no folder and no model of the hub, or the hub cannot be reached.
        SourceChanged, SourceTooLarge: see `vantage.models.source_digest.copy_source`.
        UnsafeModel: see `vantage.models.folders.check_folder`; or it is no reward model.
    """
    original = parse_source(source)
    if not isinstance(original, LocalPath | Hub):
        raise ValueError(
            f"model.source={source!r} is no reward model; name the folder of a sequence classifier with one label"
        )
    if isinstance(original, LocalPath):
        check_folder(original.path)  # check all files there, even those that are not copied
    with tempfile.TemporaryDirectory(dir=scratch, prefix="source-") as temporary:
        folder = Path(temporary)
        parsed = copy_source(source, folder, planned=planned)
        if isinstance(parsed, Hub):
            download(parsed, folder)
        if not (folder / SIDECAR).is_file():
            _refuse_other_heads(folder, source)
            write_sidecar(folder, role="reward", score_shift=0.0)
        tokenizer = load_tokenizer(folder)
        sidecar = read_sidecar(folder)
        if sidecar.role != "reward":
            raise UnsafeModel(f"{source} is a {sidecar.role} model; name a reward model")
        model = load_scalar(folder, role="reward")
        _try_out(model, source)
        save_reward(model, tokenizer, output, score_shift=sidecar.score_shift)


def copy_reward_model(folder: Path, output: Path) -> None:
    """Copy a reward model that Vantage has published or another run has made, byte for byte, so that its artifacts have
    equal files.

    Raises:
        UnsafeModel: see `vantage.models.folders.check_folder`.
        ValueError: the folder is no reward model.
    """
    load_tokenizer(folder)
    _try_out(load_scalar(folder, role="reward"), str(folder))
    shutil.copytree(folder, output, dirs_exist_ok=True)


def _refuse_other_heads(folder: Path, source: str) -> None:
    """Refuse a folder that is no sequence classifier with one label."""
    config = read_json_object(folder / "config.json")
    architectures = config.get("architectures")
    labels = config.get("id2label")
    is_classifier = isinstance(architectures, list) and any(
        str(each).endswith("ForSequenceClassification") for each in architectures
    )
    if not is_classifier:
        raise UnsafeModel(
            f"{source}: config.json has architectures={architectures}, and a reward model is a sequence classifier; name a folder "
            "that AutoModelForSequenceClassification saved with num_labels=1"
        )
    if not isinstance(labels, dict) or len(labels) != 1:
        raise UnsafeModel(
            f"{source}: config.json has id2label={labels}, and a reward model has one label; save it with num_labels=1"
        )


@torch.no_grad()
def _try_out(model: ScalarModel, source: str) -> None:
    """Score two tokens; this fails for nonsensical configurations or weights."""
    with refusing(Path(source), "makes a reward model that cannot be run"):
        found = scores(model, collate([[0]], [[0]], pad_token_id=0))
    if not torch.isfinite(found).all():
        raise UnsafeModel(
            f"{source} gives a score that is no finite number: its weights hold NaN or infinities; fetch the model again"
        )
