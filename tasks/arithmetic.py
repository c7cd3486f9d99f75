"""The built-in task: short chains of sums, worked out step by step, with a verifier for the final answer.

A problem is a start and up to eight signed steps, each with a letter; a response writes every step out:

    prompt      3 a+4 b-2?
    response    a3+4=7 b7-2=5 #5

A step is checkable on its own: its letter finds the operand in the prompt, its first number repeats the result
before it, and the sum is one of a few facts, since every number has one digit. A *slip* is a step that breaks one
of the three, or an answer that does not repeat the last result; what follows a slip is worked out correctly from
the wrong number, so that a response with slips ends in a wrong answer.

Everything is a pure function of the seed. The split of a problem is a function of its prompt alone, so that no
problem of `validation` or `test` is ever trained on, in any of the three datasets.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_STEPS = 8
LETTERS = "abcdefgh"

SLIP_RATE = 0.08
"""Chance of a slip in a demonstration, for each step and for the answer."""

MANY_SLIPS_RATE = 0.4
"""Chance of a slip at each place of the rejected side of a `many` pair (at least one is forced)."""

PAIR_KINDS = {"one": 0.35, "many": 0.45, "sloppy": 0.2}
"""Share of each kind of preference pair: one slip, several slips, or a false step under the right answer."""

SHORT_PAIR_SHARE = 0.4
"""Share of preference pairs with at most two steps: the place of their slip is easy to find, so they teach first."""

TRAIN_SHARE = 0.8
VALIDATION_SHARE = 0.1

# True results stay within 1..8, so that a slip by one in either direction still leaves every number one digit.
_LOWEST, _HIGHEST = 1, 8

_PROMPT = re.compile(r"([0-9])((?: [a-h][+-][1-9])+)\?")
_STEP = re.compile(r"([a-h])([0-9])([+-])([0-9])=([0-9])")
_ANSWER = re.compile(r"(?:[^#]* )?#([0-9])")


@dataclass(frozen=True)
class Problem:
    """A start and its signed changes; `results` are the true numbers after each step."""

    start: int
    changes: tuple[int, ...]

    @property
    def results(self) -> tuple[int, ...]:
        total, results = self.start, []
        for change in self.changes:
            total += change
            results.append(total)
        return tuple(results)

    @property
    def answer(self) -> int:
        return self.start + sum(self.changes)

    @property
    def prompt(self) -> str:
        steps = "".join(f" {letter}{change:+d}" for letter, change in zip(LETTERS, self.changes, strict=False))
        return f"{self.start}{steps}?"


def split_of(prompt: str) -> str:
    """`train`, `validation` or `test`, from the sha256 of the prompt's text alone."""
    fraction = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8]) / 2**64
    if fraction < TRAIN_SHARE:
        return "train"
    return "validation" if fraction < TRAIN_SHARE + VALIDATION_SHARE else "test"


def demonstrations(*, seed: int, count: int) -> Iterator[dict[str, str]]:
    """Rows `{prompt, response, split}`; each step and each answer slips with chance `SLIP_RATE`."""
    rng = random.Random(f"arithmetic/demonstrations/{seed}")
    for _ in range(count):
        problem = _draw_problem(rng, num_steps=rng.randint(1, MAX_STEPS))
        response = _write_response(problem, rng, slip_places=_draw_places(problem, rng, rate=SLIP_RATE))
        yield {"prompt": problem.prompt, "response": response, "split": split_of(problem.prompt)}


def preferences(*, seed: int, count: int) -> Iterator[dict[str, str]]:
    """Rows `{prompt, chosen, rejected, split}`; the chosen side is clean, the rejected one has slips."""
    rng = random.Random(f"arithmetic/preferences/{seed}")
    kinds, shares = list(PAIR_KINDS), list(PAIR_KINDS.values())
    for _ in range(count):
        short = rng.random() < SHORT_PAIR_SHARE
        problem = _draw_problem(rng, num_steps=rng.randint(1, 2) if short else rng.randint(3, MAX_STEPS))
        clean = _write_response(problem, rng, slip_places=frozenset())
        kind = rng.choices(kinds, shares)[0]
        places = range(len(problem.changes) + 1)
        if kind == "one":
            rejected = _write_response(problem, rng, slip_places=frozenset({rng.choice(places)}))
        elif kind == "many":
            forced = {rng.choice(places)}
            drawn = _draw_places(problem, rng, rate=MANY_SLIPS_RATE)
            rejected = _write_response(problem, rng, slip_places=drawn | forced)
        else:
            rejected = _write_false_step(clean, rng)
        yield {"prompt": problem.prompt, "chosen": clean, "rejected": rejected, "split": split_of(problem.prompt)}


def prompts(*, seed: int, train: int, validation: int, test: int) -> Iterator[dict[str, str]]:
    """Rows `{prompt, split, answer}`: exactly so many different prompts of each split, in the order drawn."""
    rng = random.Random(f"arithmetic/prompts/{seed}")
    wanted = {"train": train, "validation": validation, "test": test}
    seen: set[str] = set()
    while any(wanted.values()):
        problem = _draw_problem(rng, num_steps=rng.randint(1, MAX_STEPS))
        prompt = problem.prompt
        split = split_of(prompt)
        if wanted[split] and prompt not in seen:
            seen.add(prompt)
            wanted[split] -= 1
            yield {"prompt": prompt, "split": split, "answer": str(problem.answer)}


def verify(prompt: str, response: str) -> bool:
    """Whether the response ends in `#` and the right answer. The steps are not looked at (see `check_steps`).

    Raises ValueError for a prompt that is not one of this task's.
    """
    problem = parse_prompt(prompt)
    answer = _ANSWER.fullmatch(response)
    return answer is not None and int(answer[1]) == problem.answer


def check_steps(prompt: str, response: str) -> bool:
    """Whether every step is there, in order, copied and added correctly, and the answer repeats the last result."""
    return response == _clean_response(parse_prompt(prompt))


def parse_prompt(prompt: str) -> Problem:
    """The problem that a prompt states; ValueError for any other text."""
    match = _PROMPT.fullmatch(prompt)
    steps = match[2].split() if match else []
    if match is None or "".join(step[0] for step in steps) != LETTERS[: len(steps)]:
        raise ValueError(
            f"prompt={prompt!r} is not a problem of the arithmetic task; it must look like '3 a+4 b-2?' "
            f"(one-digit numbers, at most {MAX_STEPS} steps lettered from a)"
        )
    return Problem(start=int(match[1]), changes=tuple(int(step[1:]) for step in steps))


def _draw_problem(rng: random.Random, *, num_steps: int) -> Problem:
    start = value = rng.randint(_LOWEST, _HIGHEST)
    changes = []
    for _ in range(num_steps):
        following = rng.choice([other for other in range(_LOWEST, _HIGHEST + 1) if other != value])
        changes.append(following - value)
        value = following
    return Problem(start=start, changes=tuple(changes))


def _draw_places(problem: Problem, rng: random.Random, *, rate: float) -> frozenset[int]:
    """Which places slip: 0 … n−1 are the steps, n is the answer."""
    return frozenset(place for place in range(len(problem.changes) + 1) if rng.random() < rate)


def _write_step(letter: str, before: int, change: int, after: int) -> str:
    return f"{letter}{before}{change:+d}={after}"


def _clean_response(problem: Problem) -> str:
    befores = (problem.start, *problem.results)
    steps = [
        _write_step(letter, before, change, before + change)
        for letter, before, change in zip(LETTERS, befores, problem.changes, strict=False)
    ]
    return " ".join([*steps, f"#{problem.answer}"])


def _write_response(problem: Problem, rng: random.Random, *, slip_places: frozenset[int]) -> str:
    """The worked-out response with a slip at each of the places.

    `offset` is by how much the running number is wrong. A slip changes it to another offset, never to 0, among
    those that leave all later results one digit; -1 and +1 always do, because true results lie within 1..8.
    """
    results, offset, parts = problem.results, 0, []
    for place, (letter, change) in enumerate(zip(LETTERS, problem.changes, strict=False)):
        before = (results[place - 1] if place else problem.start) + offset
        written_change, after = change, before + change
        if place in slip_places:
            slipped = _draw_offset(results[place:], offset, rng)
            kind = rng.choice(("carry", "operand", "result", "result"))
            operand = change + slipped - offset
            if kind == "operand" and operand * change > 0 and abs(operand) <= 9:
                written_change = operand
            elif kind == "carry" and 0 <= before + slipped - offset <= 9:
                before += slipped - offset
            after, offset = results[place] + slipped, slipped
        parts.append(_write_step(letter, before, written_change, after))
    if len(problem.changes) in slip_places:
        offset = _draw_offset(results[-1:], offset, rng)
    return " ".join([*parts, f"#{problem.answer + offset}"])


def _draw_offset(later_results: tuple[int, ...], offset: int, rng: random.Random) -> int:
    lowest, highest = -min(later_results), 9 - max(later_results)
    return rng.choice([other for other in range(lowest, highest + 1) if other not in (0, offset)])


def _write_false_step(clean: str, rng: random.Random) -> str:
    """The clean response with one result replaced, although the step after it goes on from the right number."""
    *steps, answer = clean.split(" ")
    place = rng.randrange(len(steps))
    true_result = steps[place][-1]
    false_result = rng.choice([digit for digit in "0123456789" if digit != true_result])
    steps[place] = steps[place][:-1] + false_result
    return " ".join([*steps, answer])
