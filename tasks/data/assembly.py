"""Turn a row's columns into a row of a dataset: prompt, responses, and which of them is preferred."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vantage.schemas.conversations import Message, extras_of, is_one_prompt, transcript
from vantage.schemas.row_rules import TIE
from vantage.schemas.steps import CONTENT_COLUMNS, missing_columns
from vantage.tasks.data.columns import whole_text
from vantage.tasks.data.conversations import common_beginning, is_transcript, joined, read_transcript
from vantage.tasks.data.judgments import Undecided, Unpairable, preferred
from vantage.tasks.data.single_answers import grade_of

SOURCE_COLUMNS = (
    "conversation",
    "history",
    "system",
    "tools",
    "response_a",
    "response_b",
    "label",
    "scores",
    "score",
)
"""Columns that a file's mapping may have and a dataset has not, since other columns are made from them. Only
``labelled_responses`` keep the label, as true or false."""

Values = dict[str, Any]


@dataclass(frozen=True)
class Assembly:
    """Settings by which the rows of one file become rows of one content."""

    content: str
    columns: Sequence[str]
    """Our columns that the file is mapped to."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """See ``vantage.tasks.data.judgments.preferred``."""
    system: str | None = None
    """System message for rows that have none."""

    @property
    def made(self) -> tuple[str, ...]:
        """Columns of the resulting rows."""
        kept = [column for column in self.columns if column not in SOURCE_COLUMNS]
        missing = missing_columns(self.content, set(self.columns))
        needed = [column for column in CONTENT_COLUMNS[self.content] if column not in missing]
        if self.content == "preferences":
            kept = [column for column in kept if column not in ("responses", "ranks")]
        extras = [f"{side}_extra" for side in _SIDES if side in CONTENT_COLUMNS[self.content]]
        return tuple(dict.fromkeys([*kept, *needed, "messages", *extras]))

    def assemble(self, values: Values) -> Values:
        """Return a row of the dataset.

        Args:
            values: our column → its value in the row, as ``RowMapper`` reads it.

        Raises:
            Undecided: the row's labels prefer neither response.
            ValueError: a conversation lacks the turn that is asked for, or a label is not known.
        """
        row = dict(values)
        if self.content == "preferences" and "chosen" not in self.columns:
            self._choose(row)
        _read_rounds(row)
        turns = self._turns(row)
        if turns is not None:
            turns = _with_earlier_turns(turns, row)
            turns = [*(values.get("history") or []), *turns]
            turns = _with_tools(self._with_system(turns, values.get("system")), values.get("tools"))
            row["messages"] = None if is_one_prompt(turns) else turns
            row["prompt"] = turns[0]["content"] if is_one_prompt(turns) else transcript(turns)
        if self.content == "labelled_responses":
            row["label"] = grade_of({"label": row.get("label")}, self.labels) > 0
        if row.get("scores") is not None and row.get("ranks") is None:
            row["ranks"] = [None if score is None else -score for score in row["scores"]]
        for column in _SIDES:
            if isinstance(row.get(column), list):
                last = _last_turn(row[column], column)
                row[column], row[f"{column}_extra"] = last["content"], last["extra"]
        if turns is not None:
            for column in ("prompt", *_SIDES):
                whole_text(row.get(column))
        return {column: row.get(column) for column in self.made}

    def _turns(self, row: Values) -> list[Message] | None:
        """Return the turns before the response; None: the prompt is missing."""
        if row.get("conversation") is not None:
            turns: list[Message] = row["conversation"]
            return self._before_the_response(turns, row)
        prompt = row.get("prompt")
        if isinstance(prompt, list):
            return _asking(prompt, "prompt")
        if prompt is not None:
            return [Message(role="user", content=prompt, extra=None)]
        return self._implicit_prompt(row)

    def _before_the_response(self, turns: list[Message], row: Values) -> list[Message]:
        answered = turns[-1]["role"] == "assistant"
        if self.content in ("demonstrations", "labelled_responses") and "response" not in self.columns:
            if not answered or len(turns) < 2:
                raise ValueError("a conversation that does not end with the assistant's answer to somebody")
            row["response"] = [turns[-1]]
            return _asking(turns[:-1], "conversation")
        if self.content == "prompts" and answered:
            turns = turns[:-1]
        return _asking(turns, "conversation")

    def _implicit_prompt(self, row: Values) -> list[Message] | None:
        """Return the beginning that the two sides of a pair have in common, for a file without a column for prompts."""
        if self.content != "preferences" or "prompt" in self.columns or "conversation" in self.columns:
            return None
        for column in ("chosen", "rejected"):
            if is_transcript(row.get(column)):
                row[column] = read_transcript(row[column])
        chosen, rejected = row.get("chosen"), row.get("rejected")
        if not isinstance(chosen, list) or not isinstance(rejected, list):
            raise ValueError("two texts without a prompt; name the prompt's column")
        turns = common_beginning(chosen, rejected)
        if not turns or any(len(side) != len(turns) + 1 for side in (chosen, rejected)):
            raise Unpairable
        return turns

    def _with_system(self, turns: list[Message], of_row: str | None) -> list[Message]:
        words = of_row or self.system
        if words is None or any(turn["role"] == "system" for turn in turns):
            return turns
        return [Message(role="system", content=words, extra=None), *turns]

    def _choose(self, row: Values) -> None:
        """Fill ``chosen`` and ``rejected`` from a judgment, or from ranks or scores: the best against the worst."""
        pair = row.get("responses") or [row.get("response_a"), row.get("response_b")]
        if "label" in self.columns:
            if len(pair) != 2:
                raise ValueError(f"a label prefers one of two responses, and here are {len(pair)}")
            best = preferred(row["label"], self.labels)
            row["chosen"], row["rejected"] = pair[best], pair[1 - best]
            return
        ranks = row.get("ranks") or [None if s is None else -s for s in row.get("scores") or []]
        if len(ranks) != len(pair) or len(pair) < 2 or None in ranks:
            raise ValueError("two or more responses need one rank or score each")
        if min(ranks) == max(ranks):
            raise Undecided(TIE)
        row["chosen"], row["rejected"] = pair[ranks.index(min(ranks))], pair[ranks.index(max(ranks))]


_SIDES = ("response", "chosen", "rejected")


def _read_rounds(row: Values) -> None:
    """Replace a prompt and responses that are JSON lists of texts, one item per round (Chatbot Arena), by messages."""
    sides = [side for side in _SIDES if row.get(side) is not None]
    asked = texts_in_json(row.get("prompt"))
    said = [texts_in_json(row[side]) for side in sides]
    if not asked or not said or any(texts is None or len(texts) != len(asked) for texts in said):
        return
    for side, texts in zip(sides, said, strict=True):
        row[side] = [
            Message(role=role, content=text, extra=None)
            for each in zip(asked, texts or [], strict=True)
            for role, text in zip(("user", "assistant"), each, strict=True)
        ]
    row["prompt"] = [Message(role="user", content=asked[0], extra=None)]


def texts_in_json(value: Any) -> list[str] | None:
    """Return the texts of a JSON list in a text; None: the value is something else."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(found, list) and all(isinstance(item, str) for item in found)
    return found if is_list else None


def _with_earlier_turns(turns: list[Message], row: Values) -> list[Message]:
    """Return the prompt with all turns before the last one of the responses, if these are conversations."""
    for column in _SIDES:
        if is_transcript(row.get(column)):
            read = read_transcript(row[column])
            if len(read) > 1 and joined(turns, read[:-1]) is not None:
                row[column] = read
    sides = [row[column] for column in _SIDES if isinstance(row.get(column), list)]
    before = [side[:-1] for side in sides]
    if not any(before):
        return turns
    if any(each != before[0] for each in before):
        raise Unpairable
    return joined(turns, before[0]) or turns


def _learnt(message: Message) -> Message:
    if extras_of(message).get("weight") == 0:
        raise ValueError("a last answer with weight 0, so nothing is learnt")
    return message


def _with_tools(turns: list[Message], tools: list[Any] | None) -> list[Message]:
    """Return the turns; the first one lists the available tools."""
    if not tools:
        return turns
    extra = {**extras_of(turns[0]), "tools": tools}
    first = Message(
        role=turns[0]["role"],
        content=turns[0]["content"],
        extra=json.dumps(extra, ensure_ascii=False),
    )
    return [first, *turns[1:]]


def _asking(turns: list[Message], column: str) -> list[Message]:
    """Return turns that an answer of the assistant can follow."""
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"{column}: it does not end with a user's or a tool's message, so nothing is asked")
    return turns


def _last_turn(turns: list[Message], column: str) -> Message:
    last = _learnt(turns[-1])
    if last["role"] != "assistant" and len(turns) > 1:
        raise ValueError(f"{column}: it does not end with the assistant's message")
    return last
