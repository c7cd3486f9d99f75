"""A reader of rows names the columns of the file that it does not read, and those that no row had."""

from vantage.schemas.recipe.inputs import Data
from vantage.tasks.data.row_reader import RowReader


def reader(**columns: str) -> RowReader:
    data = Data.model_validate({"source": "rows.jsonl", "columns": {"response": "answer", **columns}})
    return RowReader(data, "demonstrations", [])


def test_a_column_of_which_a_part_is_read_is_read() -> None:
    assert reader(prompt="talk.0.content").unread(["talk", "answer", "id"]) == ["id"]


def test_a_name_with_a_dot_is_a_column_if_the_file_has_it() -> None:
    assert reader(prompt="talk.text").unread(["talk.text", "talk", "answer"]) == ["talk"]


def test_each_column_of_a_template_is_read() -> None:
    assert reader(prompt="{task}\n{input}").unread(["answer", "input", "task", "url"]) == ["url"]
