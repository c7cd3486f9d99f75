"""Give each loader a chosen number of random inputs, and count the errors that escape: those that are no refusal.

    python benchmarks/hostile_inputs.py --recipes 100000 --models 2000 --files 100000 --records 100000 [--first 0] [--seconds 600]

100,000 of everything, an hour each at most: `--recipes 100000 --models 100000 --files 100000 --records 100000 --seconds 3600`. One
loader alone: `--recipes 0 --records 100000 --kinds journal policy`, or `--recipes 0 --files 100000 --endings .arrow`.

Numbers below 600 (recipes), 80 (models), 40 (files) and 60 (records) are those that the tests try. What escapes is printed with its
number, which makes the same input again; the last line of each loader counts its ends. The exit code is 1 if anything has escaped.
Takes about 10 ms a recipe and 60 ms a model on one core.
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runs.damaged_records import Finished, finished_run, trial
from tests.schemas.at_random import try_one
from tests.tasks.data.damaged_files import ENDINGS
from tests.tasks.data.test_damaged_files import outcome
from vantage.runs.workspace import Workspace

SLOW = 5.0
"""Seconds of processor time above which an input is printed too."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", type=int, default=100_000)
    parser.add_argument("--models", type=int, default=0)
    parser.add_argument("--files", type=int, default=0, help="of each kind of data file")
    parser.add_argument("--records", type=int, default=0, help="of each kind of record")
    parser.add_argument("--endings", nargs="*", default=ENDINGS, help="kinds of data files")
    parser.add_argument("--kinds", nargs="*", help="kinds of records; default: all")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which each loader ends early")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        escaped = sum(
            _count(what, chosen.first, number, run, chosen.seconds)
            for what, number, run in _loaders(chosen, Path(folder))
        )
    sys.exit(1 if escaped else 0)


def _loaders(chosen: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int, Callable[[int], str]]]:
    """Yield the name of each loader, how many inputs it is given, and what gives it the input of a number."""
    if chosen.recipes:
        yield "recipes", chosen.recipes, lambda number: try_one(number, folder)
    if chosen.models:
        yield "models", chosen.models, _model_trial(folder)
    for ending in chosen.endings if chosen.files else ():
        yield f"{ending} files", chosen.files, _file_trial(ending, folder)
    if chosen.records:
        run = finished_run(Workspace(folder / "workspace"), folder)
        for kind in chosen.kinds or run.files():
            yield kind, chosen.records, _record_trial(kind, run)


def _record_trial(kind: str, finished: Finished) -> Callable[[int], str]:
    return lambda number: trial(number, kind, finished)


def _file_trial(ending: str, folder: Path) -> Callable[[int], str]:
    """Return a function that reads a data file damaged by a number, in this process, which a library's crash ends."""
    return lambda number: outcome(number, ending, folder)


def _model_trial(folder: Path) -> Callable[[int], str]:
    """Return a function that imports the built-in model's folder damaged by a number."""
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


def _count(what: str, first: int, number: int, run: Callable[[int], str], seconds: float) -> int:
    """Run a range of numbers, or as many as there is time for; return how many escaped."""
    ends: Counter[str] = Counter()
    started = time.monotonic()
    for case in range(first, first + number):
        if time.monotonic() - started > seconds:
            print(f"{what}: time is over before {case}", flush=True)
            break
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
