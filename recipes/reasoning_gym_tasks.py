"""Writes the tasks of the recipe ``reasoning_gym_dapo``: ``python -m vantage.recipes.reasoning_gym_tasks tasks.jsonl``.

A row has the question, one right answer, and the whole entry as JSON, which ``builtin:reasoning_gym`` reads. The same number of
rows and seed give the same file.
"""

import argparse
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60},
}
"""Dataset of Reasoning Gym → its settings: easy enough that a model of a million parameters is right now and then."""
MISSING = "the package reasoning-gym is not installed; pip install 'vantage-rlhf[recipes]'"


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """Different questions in random order, a third of each task.

    Raises:
        SystemExit: Reasoning Gym is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise SystemExit(f"{MISSING} ({error})") from None
    found: list[dict[str, str]] = []
    size = count // len(TASKS)
    for name, settings in TASKS.items():
        # A task has repeats; where it has no more new questions, fewer rows are written
        entries = reasoning_gym.create_dataset(name, size=4 * size, seed=seed, **settings)
        different = {entry["question"]: entry for entry in entries}
        found += [
            {"question": question, "answer": entry["answer"], "entry": json.dumps(entry, ensure_ascii=False)}
            for question, entry in islice(different.items(), size)
        ]
    random.Random(seed).shuffle(found)
    return found


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, default=9000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(given.rows, given.seed)]
    given.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{given.output}: {len(lines)} tasks")


if __name__ == "__main__":
    main()
