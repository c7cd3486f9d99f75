"""Read what the runs of ``golden_runs`` made, and the inputs that they read."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tasks.golden_runs import RUNS
from tests.tasks.unequal_inputs import write_inputs
from vantage.schemas.records.job import StageJob, StageResult
from vantage.storage.sealed_folders import seal
from vantage.tasks.data.rows import read_rows, write_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.stages import run_stage

OWN_VERIFIER = (
    "def verify(prompt, response, answer):\n    return answer is not None and response.count(answer) == 1\n"
)
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{place}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@dataclass(frozen=True)
class Made:
    """What a run made."""

    job: StageJob
    result: StageResult
    artifact: str
    """Content digest of its folder."""


class Results:
    """Runs in one folder, each at most once, with those that make its inputs before it."""

    def __init__(self, root: Path) -> None:
        """Write the inputs."""
        self._root = root
        self._inputs = write_inputs(root)
        for name in ("sources", "benchmark"):
            self._inputs[name] = root / name
            (root / name).mkdir()
        self._made: dict[str, Made] = {}
        _repeat_prompts(self._inputs)
        _write_sources(self._inputs["sources"])
        _write_benchmark(self._inputs["benchmark"])

    def of(self, name: str) -> Made:
        """Do a run, or return what it made before."""
        if name not in self._made:
            number = list(RUNS).index(name)
            job = RUNS[name].job(self._root / f"run-{number}", self.folder)
            result = run_stage(job)
            self._made[name] = Made(job, result, artifact=seal(job.output))
        return self._made[name]

    def folder(self, name: str) -> Path:
        """Return the folder of an input, or of a run's artifact."""
        return self.of(name).job.output if name in RUNS else self._inputs[name]


def _repeat_prompts(folders: Mapping[str, Path]) -> None:
    """Write two more rows of the first prompt of every split, with answers of their own."""
    changed: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
        "prompts": lambda row, answer: {**row, "answer": answer},
        "demonstrations": lambda row, answer: {**row, "response": f"a{answer}"},
        "pairs": lambda row, answer: {**row, "chosen": f"{answer}a", "margin": 0.4},
    }
    for name, change in changed.items():
        for split in SPLITS:
            rows = list(read_rows(folders[name], split))
            write_rows(folders[name], split, [*rows, *(change(rows[0], answer) for answer in ("3", "2"))])


def _write_sources(folder: Path) -> None:
    rows = [{"question": f"{a}+{b}?", "reply": str((a + b) % 5)} for a in range(5) for b in range(5)]
    rows.append({"question": "0+0?", "reply": "4"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(OWN_VERIFIER)


def _write_benchmark(folder: Path) -> None:
    questions = [
        {"question": f"{a}+{b}?", "choices": [str((a + b) % 5), str((a + b + 2) % 5), "a"], "place": a % 3}
        for a in range(4)
        for b in range(3)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (folder / "sums.yaml").write_text(TASK)
