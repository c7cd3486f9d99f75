"""The built-in task: short chains of sums on a dial of ten digits, worked out step by step, and its verifier.

A problem is a start and up to eight signed changes, each with a letter; only the last digit is kept (7+4=1,
1-3=8). A response writes every step out:

    prompt      3 a+4 b-2?
    response    a34567 b765 #5

A step is checkable on its own: its letter finds the change in the prompt, its first digit repeats the result
before it, and the sum is one of eighty facts. A *slip* is a step that breaks one of the three, or an answer that
does not repeat the last result; what follows a slip is worked out correctly from the wrong digit, so that a response
with slips ends in a wrong answer. A slipped digit lies at least three places off on the dial.

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

STEP_SLIPS = ("jump", "jump", "skip")
"""What a slip in a step is, drawn evenly: the count jumps to a wrong digit, or the step is left out."""

MANY_SLIPS_RATE = 0.4
"""Chance of a slip at each place of the rejected side of a `many` pair (at least one is forced)."""

PAIR_KINDS = {"one": 0.35, "many": 0.45, "sloppy": 0.2}
"""Share of each kind of preference pair: one slip, several slips, or a false step under the right answer."""

SHORT_PAIR_SHARE = 0.4
"""Share of preference pairs with at most two steps: the place of their slip is easy to find, so they teach first."""

TRAIN_SHARE = 0.8
VALIDATION_SHARE = 0.1

MAX_CHANGE = 4
"""Changes are 1 to 4, up or down: 80 facts, and the wrong sign is never right by chance on a dial of ten."""

SLIP_DISTANCES = (3, 4, 5, 6, 7)
"""By how many places of the dial a slipped digit is off."""

_PROMPT = re.compile(r"([0-9])((?: [a-h][+-][1-9])+)\?")
_ANSWER = re.compile(r"(?:[^#]* )?#([0-9])")


@dataclass(frozen=True)
class Problem:
    """A start and its signed changes; `results` are the true digits after each step."""

    start: int
    changes: tuple[int, ...]

    @property
    def results(self) -> tuple[int, ...]:
        total, results = self.start, []
        for change in self.changes:
            total = (total + change) % 10
            results.append(total)
        return tuple(results)

    @property
    def answer(self) -> int:
        return (self.start + sum(self.changes)) % 10

    @property
    def prompt(self) -> str:
        steps = "".join(
            f" {letter}{change:+d}" for letter, change in zip(LETTERS, self.changes, strict=False)
        )
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
        yield {
            "prompt": problem.prompt,
            "chosen": clean,
            "rejected": rejected,
            "split": split_of(problem.prompt),
        }


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
    changes = tuple(rng.choice((-1, 1)) * rng.randint(1, MAX_CHANGE) for _ in range(num_steps))
    return Problem(start=rng.randint(0, 9), changes=changes)


def _draw_places(problem: Problem, rng: random.Random, *, rate: float) -> frozenset[int]:
    """Which places slip: 0 … n−1 are the steps, n is the answer."""
    return frozenset(place for place in range(len(problem.changes) + 1) if rng.random() < rate)


def _count(before: int, change: int, *, jump: tuple[int, int] | None = None) -> str:
    """The digits from `before` on, one by one; from the place `jump[0]` on they are `jump[1]` off."""
    direction = 1 if change > 0 else -1
    place, distance = jump or (0, 0)
    return "".join(
        str((before + direction * i + (distance if i >= place else 0)) % 10) for i in range(abs(change) + 1)
    )


def _clean_response(problem: Problem) -> str:
    befores = (problem.start, *problem.results)
    steps = [
        letter + _count(before, change)
        for letter, before, change in zip(LETTERS, befores, problem.changes, strict=False)
    ]
    return " ".join([*steps, f"#{problem.answer}"])


def _write_response(problem: Problem, rng: random.Random, *, slip_places: frozenset[int]) -> str:
    """The worked-out response with a slip at each of the places.

    `offset` is by how much the running digit is wrong; a slip changes it, never to 0.
    """
    offset, parts = 0, []
    befores = (problem.start, *problem.results)
    for place, (letter, change) in enumerate(zip(LETTERS, problem.changes, strict=False)):
        before = (befores[place] + offset) % 10
        jump = None
        if place in slip_places:
            skipped = place > 0 and rng.choice(STEP_SLIPS) == "skip" and (offset - change) % 10 != 0
            if skipped:
                offset -= change
                continue
            distance = _draw_distance(rng, offset)
            jump, offset = (rng.randint(1, abs(change)), distance), offset + distance
        parts.append(letter + _count(before, change, jump=jump))
    if len(problem.changes) in slip_places:
        offset += _draw_distance(rng, offset)
    return " ".join([*parts, f"#{(problem.answer + offset) % 10}"])


def _draw_distance(rng: random.Random, offset: int) -> int:
    return rng.choice([distance for distance in SLIP_DISTANCES if (offset + distance) % 10])


def _write_false_step(clean: str, rng: random.Random) -> str:
    """The clean response with one result replaced, although the step after it goes on from the right digit."""
    *steps, answer = clean.split(" ")
    place = rng.randrange(len(steps))
    digit = rng.randrange(2, len(steps[place]))
    false_digit = (int(steps[place][digit]) + rng.choice(SLIP_DISTANCES)) % 10
    steps[place] = f"{steps[place][:digit]}{false_digit}{steps[place][digit + 1 :]}"
    return " ".join([*steps, answer])
