"""A definition of lm-eval's tasks may read the files of its own folder alone, whether or not lm-eval is installed."""

from pathlib import Path

import pytest

from vantage.tasks.data.benchmark_tasks import UnusableTasks, check_tasks

GOOD = """
task: good
include: base.yaml
dataset_path: json
dataset_kwargs: {data_files: {test: data/rows.jsonl, train: [data/rows.jsonl]}}
doc_to_text: !function utils.text
metric_list: [{metric: acc}]
"""


def folder_with(place: Path, text: str) -> Path:
    (place / "data").mkdir()
    (place / "data/rows.jsonl").write_text("{}\n")
    (place / "base.yaml").write_text("output_type: multiple_choice\n")
    (place / "task.yaml").write_text(text)
    return place


def test_files_of_the_folder_may_be_read(tmp_path: Path) -> None:
    check_tasks(folder_with(tmp_path, GOOD))


def test_a_folder_without_definitions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableTasks, match=r"has no \.yaml file"):
        check_tasks(tmp_path)


@pytest.mark.parametrize(
    "text, told",
    [
        ("task: a\ndataset_path: allenai/ai2_arc", r"dataset_path='allenai/ai2_arc' is a dataset of the Hugging Face hub.*put its files there, and write dataset_path: json"),
        ("group: a\ntask: [{task: b, dataset_path: gsm8k}]", r"task\.yaml: dataset_path='gsm8k' is a dataset of the"),
        ("task: a\ndataset_kwargs: {data_files: https://x.org/a.jsonl}", r"data_files='https://x\.org/a\.jsonl' is no file of"),
        ("task: a\ndataset_kwargs: {data_files: ../a.jsonl}", r"data_files='\.\./a\.jsonl' is no file of"),
        ("task: a\ndataset_kwargs: {data_files: [data/rows.jsonl, gone.jsonl]}", r"data_files='gone\.jsonl' is no file of .*; give its path"),
        ("task: a\ndataset_kwargs: {data_dir: data}", r"data_dir names no single files"),
        ("task: a\ncustom_dataset: !function utils.load", r"custom_dataset='utils\.load' makes data by code"),
        ("class: !function task.Mine", r"class='task\.Mine' is a task of Python; define it in YAML"),
        ("task: a\nunsafe_code: true", r"unsafe_code=True runs code that the model has written"),
        ("task: a\nmetric_list: [{metric: rouge, hf_evaluate: true}]", r"hf_evaluate=True loads a metric from the Hugging Face hub"),
        ("task: a\ninclude: /etc/base.yaml", r"include='/etc/base\.yaml' is no file of .*; copy it there"),
        ("task: [", r"task\.yaml is no YAML \(.*\); correct it"),
    ],
)  # fmt: skip
def test_what_is_not_in_the_folder_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UnusableTasks, match=told):
        check_tasks(folder_with(tmp_path, text))
