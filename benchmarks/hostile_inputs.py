"""Give the loader (and the import of models) as many inputs made at random as one likes, and count what escapes.

    python benchmarks/hostile_inputs.py --recipes 100000 --models 2000 --files 100000 [--first 0]

Numbers below 600 (recipes) and 80 (models) are those that the tests try. What escapes is told with its number, which makes the
same input again. Takes about 10 ms a recipe and 60 ms a model on one core.
"""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.schemas.at_random import try_one
from tests.tasks.data.damaged_files import ENDINGS
from tests.tasks.data.test_damaged_files import outcome

SLOW = 5.0
"""Seconds of processor time above which an input is told too."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", type=int, default=100_000)
    parser.add_argument("--models", type=int, default=0)
    parser.add_argument("--files", type=int, default=0, help="of each kind of data file")
    parser.add_argument("--first", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        escaped = _count(
            "recipes", chosen.first, chosen.recipes, lambda number: try_one(number, Path(folder))
        )
        if chosen.models:
            escaped += _count("models", chosen.first, chosen.models, _model_trial(Path(folder)))
        for ending in ENDINGS if chosen.files else ():
            escaped += _count(
                f"{ending} files", chosen.first, chosen.files, _file_trial(ending, Path(folder))
            )
    sys.exit(1 if escaped else 0)


def _file_trial(ending: str, folder: Path) -> Callable[[int], str]:
    """Reading of a data file in this process, damaged by a number: where a library crashes, this ends."""
    return lambda number: outcome(number, ending, folder)


def _model_trial(folder: Path) -> Callable[[int], str]:
    """Import of the built-in model's folder, damaged by a number."""
    import torch
    import transformers

    from tests.models.damage import at_random
    from vantage.models.builtin import build_builtin
    from vantage.models.source_folders import import_model

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    build_builtin("tiny", folder / "tiny", seed=1)

    def run(number: int) -> str:
        for name in ("model", "out"):
            shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(folder / "tiny", folder / "model")
        at_random(folder / "model", number)
        try:
            import_model(str(folder / "model"), folder / "out", seed=0)
        except ValueError:
            return "refused"
        return "loaded"

    return run


def _count(what: str, first: int, number: int, run: Callable[[int], str]) -> int:
    """Run a range of numbers; how many escaped."""
    ends: Counter[str] = Counter()
    started = time.monotonic()
    for case in range(first, first + number):
        begun = time.process_time()
        try:
            ends[run(case)] += 1
        except BaseException as error:  # whatever it is: that is what is counted
            if isinstance(error, KeyboardInterrupt):
                raise
            ends["escaped"] += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"{what} {case}: {type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {str(error)[:200]!r}",
                flush=True,
            )
        if (case - first + 1) % 10_000 == 0:
            print(f"{what}: {case - first + 1} tried, {dict(ends)}", flush=True)
        if time.process_time() - begun > SLOW:
            ends["slow"] += 1
            print(f"{what} {case}: {time.process_time() - begun:.1f} s", flush=True)
    print(f"{what}: {dict(ends)} in {time.monotonic() - started:.0f} s", flush=True)
    return ends["escaped"]


if __name__ == "__main__":
    main()
