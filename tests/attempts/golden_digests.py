"""Write ``golden_digests.json``: what every kind of stage made of small inputs.

    python -m tests.attempts.golden_digests

does every run of ``tests/tasks/golden_runs.py`` and writes the file again. It refuses if a result has changed and the
revision of its kind in ``vantage.schemas.kinds`` has not been raised. A curve that the record does not have is no changed
result, if all else has the bits that it had.

Bits differ between CPUs and between versions of the libraries. So the digests of artifacts and metrics are kept for each
platform on which the command has been run, and rounded numbers, which hold everywhere, beside them.
"""

import hashlib
import json
import platform as machine
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import isclose, isnan
from pathlib import Path
from typing import TypedDict

import torch
from safetensors.torch import load_file

from tests.tasks.golden_results import Made, Results
from tests.tasks.golden_runs import RUNS, kinds_behind
from vantage.ledger.journal import read as read_journal
from vantage.schemas.kinds import KINDS
from vantage.schemas.metric_names import OF_MACHINE
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.training.scratch import JOURNAL

RECORD = Path(__file__).with_suffix(".json")
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")
RELATIVE, ABSOLUTE = 3e-3, 1e-3
"""By how much a number may differ on another platform."""

CURVE = "mean of "
"""Prefix of the name of a curve among the numbers."""

Numbers = dict[str, float | str | None]


class Record(TypedDict):
    """What the file holds."""

    revisions: dict[str, int]
    """Kind of stage → its revision when the file was written."""
    numbers: dict[str, Numbers]
    """Run → its numbers."""
    digests: dict[str, dict[str, str]]
    """Platform → run → digest of its artifact and all of its metrics."""


@dataclass(frozen=True)
class Golden:
    """What one run made."""

    numbers: Numbers
    """Headline metrics, means of the journal's metrics, norms of weights, and digests of the texts of rows."""
    digest: str
    known: str = ""
    """The digest without the curves that the record does not have; empty: it has them all."""


def read() -> Record:
    """Return the record as it was written last; an empty one if there is no file."""
    if not RECORD.is_file():
        return {"revisions": {}, "numbers": {}, "digests": {}}
    record: Record = json.loads(RECORD.read_text())
    return record


def revisions() -> dict[str, int]:
    """Return the revision of each kind of stage."""
    return {name: kind.revision for name, kind in KINDS.items()}


def this_platform() -> str:
    """Name all that the bits of a result depend on beside our code."""
    cpu = f"{machine.machine()} {_vendor()} {torch.backends.cpu.get_cpu_capability()}"
    return ", ".join([cpu, *(f"{name} {version(name)}" for name in LIBRARIES)])


def _vendor() -> str:
    """Return the maker of the CPU, whose matrix products differ; the system's name where it is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return machine.system()
    return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), machine.system())


def golden(made: Made, recorded: Numbers | None = None) -> Golden:
    """Describe what a run made. ``recorded``: its numbers in the record, to be compared without newer curves."""
    journal = _journal(made.job.scratch / JOURNAL)
    numbers: Numbers = dict(made.result.metrics)
    for name in sorted({name for step in journal for name in step}):
        values = [step[name] for step in journal if name in step]
        numbers[f"{CURVE}{name}"] = sum(values) / len(values)
    for path in sorted(made.job.output.rglob("*.safetensors")):
        tensors = load_file(path).values()
        numbers[f"norm of {path.name}"] = sum(each.double().square().sum().item() for each in tensors) ** 0.5
    for split in SPLITS:
        if (made.job.output / f"{split}.parquet").is_file():
            numbers[f"texts of {split}"] = _digest(
                [_texts(row) for row in read_rows(made.job.output, split)]
            )[:16]
    everything = {
        "artifact": made.artifact,
        "result": made.result.model_dump(mode="json"),
        "journal": journal,
    }
    rounded = {
        name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in numbers.items()
    }
    found = Golden(rounded, _digest(everything))
    if recorded is None or not (new := {name.removeprefix(CURVE) for name in added(found, recorded)}):
        return found
    older = [{name: value for name, value in step.items() if name not in new} for step in journal]
    return replace(found, known=_digest({**everything, "journal": older}))


def added(found: Golden, recorded: Numbers) -> list[str]:
    """Return the curves that a record does not have."""
    return [name for name in found.numbers if name.startswith(CURVE) and name not in recorded]


def _journal(path: Path) -> list[dict[str, float]]:
    """Return the metrics of every step, but for speed and memory; none of a stage that has no steps."""
    entries = read_journal(path) if path.is_file() else []
    return [
        {name: each for name, each in entry.metrics.items() if name not in OF_MACHINE} for entry in entries
    ]


def _texts(row: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if isinstance(value, str)}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def unlike(found: Numbers, recorded: Numbers) -> list[str]:
    """Name the numbers that differ by more than another platform explains, with both values."""
    return [
        f"{name}: {recorded.get(name)} in the record, {found.get(name)} now"
        for name in sorted(found.keys() | recorded.keys())
        if name not in found or name not in recorded or not _alike(found[name], recorded[name])
    ]


def _alike(found: float | str | None, recorded: float | str | None) -> bool:
    if not isinstance(found, float | int) or not isinstance(recorded, float | int):
        return found == recorded
    both_undefined = isnan(found) and isnan(recorded)
    return both_undefined or isclose(found, recorded, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def changes(name: str, found: Golden, record: Record, platform: str) -> list[str]:
    """Describe how a run's result differs from the recorded one; nothing for a run that was never recorded."""
    if name not in record["numbers"]:
        return []
    recorded = record["numbers"][name]
    new = added(found, recorded)
    known = {each: value for each, value in found.numbers.items() if each not in new}
    differences = unlike(known, recorded)
    expected = record["digests"].get(platform, {}).get(name)
    if expected not in (None, found.known if new else found.digest):
        differences.append("the bits of its artifact or of its metrics are others")
    return differences


def updated(record: Record, found: Mapping[str, Golden], platform: str, raised: Mapping[str, int]) -> Record:
    """Return the record of these results.

    Args:
        raised: the revision of each kind as it is now.

    Raises:
        ValueError: a result has changed under an unchanged revision.
    """
    changed = {name: changes(name, each, record, platform) for name, each in found.items()}
    for name, differences in changed.items():
        kinds = sorted(kinds_behind(name))
        if differences and not any(raised[kind] > record["revisions"][kind] for kind in kinds):
            raise ValueError(
                f"{name}: {'; '.join(differences)}; the revision of {' or '.join(kinds)} is as before: undo the change, or "
                "raise the revision in schemas/kinds.py; only if the run itself was changed, remove it from the file first"
            )
    newer = {name for name, each in found.items() if added(each, record["numbers"].get(name, {}))}
    digests = {
        each: {
            run: digest
            for run, digest in kept.items()
            if run in found and run not in newer and not changed[run]
        }
        for each, kept in record["digests"].items()
    }
    digests[platform] = {name: each.digest for name, each in found.items()}
    numbers = {
        name: record["numbers"][name]
        if name in record["numbers"] and name not in newer and not changed[name]
        else each.numbers
        for name, each in found.items()
    }
    return {"revisions": dict(raised), "numbers": numbers, "digests": digests}


def written(record: Record) -> str:
    """Return the text of a record: the numbers of each run in one line."""
    lines = ",\n".join(
        f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(numbers)}"
        for name, numbers in record["numbers"].items()
    )
    text = json.dumps({**record, "numbers": {}}, indent=1, ensure_ascii=False)
    return text.replace('"numbers": {}', f'"numbers": {{\n{lines}\n }}') + "\n"


def main() -> None:
    """Do every run and write the file again."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder))
        recorded = read()["numbers"]
        found = {name: golden(results.of(name), recorded.get(name)) for name in RUNS}
    try:
        record = updated(read(), found, this_platform(), revisions())
    except ValueError as error:
        sys.exit(str(error))
    RECORD.write_text(written(record))


if __name__ == "__main__":
    main()
