"""Built-in tasks: sums on a dial of ten digits, counted out step by step, with a verifier.

A problem is a start and some changes, each with a letter; after 9 the dial goes on with 0. A response counts every
change out, digit by digit, and repeats the last digit as its answer:

    prompt      3 a+2 b-3?
    response    a+2:345 b-3:5432 #2

A response is checked by looking only at neighbouring digits, the copied change and the repeated answer. A model of a
million parameters learns that in a minute; it would not learn to check a table of sums at all. A *slip* is a count that
jumps, a step left out, or an answer that does not repeat the last digit. After a slip the count goes on correctly from the
wrong digit, so a response with slips ends in a wrong answer.

The task has three forms, which differ only in their `Dial`. `SHORT` (``builtin:arithmetic``, up to 6 steps, about 30
tokens) is learned in a minute. `LONG` (``builtin:arithmetic_long``, 5 to 14 steps, about 80 tokens) is long enough that
it matters how a reward at the end reaches the first tokens. `HABIT` (``builtin:arithmetic_habit``) is as short as
`SHORT`, but its demonstrations have a *habit*: where a step passes between 9 and 0, they slip more often than not, and
always in the same way. So the most likely response of a policy that imitates them is wrong wherever that happens:

    prompt      8 a+3?
    right       a+3:8901 #1
    by habit    a+3:8945 #5

Everything is a pure function of the seed. A problem's prompt decides its side of a split, as for any other data.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

BUILTIN_ROWS = 24_000
"""Number of rows of a built-in dataset for which the recipe gives none; about four fifths are for training."""

MAX_CHANGE = 3


@dataclass(frozen=True)
class Dial:
    """Settings of one form of the task."""

    name: str
    """Name in ``builtin:NAME/KIND`` and among the verifiers; the drawn rows depend on it."""
    letters: str
    """Letters of the steps, one for each step that a problem can have."""
    min_steps: int
    """The fewest steps of a demonstration or a prompt."""
    slip_rates: tuple[float, ...]
    """Chance of a slip in the first, second, ... step of a demonstration."""
    short_pairs: tuple[int, int]
    long_pairs: tuple[int, int]
    """Fewest and most steps of a preference pair: `short_pairs` for `SHORT_PAIR_SHARE` of the pairs, `long_pairs` for the
    others."""
    habit_rate: float | None = None
    """Chance that a step of a demonstration that passes between 9 and 0 slips by habit; such a step has no other slips.
    None: no habit, and the step is like any other."""

    @property
    def max_steps(self) -> int:
        """The most steps of a problem."""
        return len(self.letters)

    @property
    def num_problems(self) -> int:
        """Return how many different problems demonstrations and prompts are drawn from."""
        return sum(10 * (2 * MAX_CHANGE) ** steps for steps in range(self.min_steps, self.max_steps + 1))


SHORT = Dial(
    name="arithmetic",
    letters="abcdef",
    min_steps=1,
    # The rates fall, so that much of a response's outcome is decided early: the best possible critic has an explained
    # variance of 0.68. With an even rate of 0.1 it would be 0.37, and a gate at 0.3 would show little.
    slip_rates=(0.36, 0.04, 0.02, 0.02, 0.01, 0.01),
    short_pairs=(1, 2),
    long_pairs=(3, 6),
)
LONG = Dial(
    name="arithmetic_long",
    letters="abcdefghijklmn",
    min_steps=5,
    # The rates fall here too, so that half of the responses are right, and most wrong ones are lost 60 tokens before the
    # reward. The best possible critic has an explained variance of 0.69.
    slip_rates=(0.3, 0.1, 0.05, 0.03, *(0.02,) * 10),
    short_pairs=(1, 4),
    long_pairs=(5, 14),
)
HABIT = Dial(
    name="arithmetic_habit",
    letters="abcdef",
    min_steps=1,
    # A fifth of all steps pass between 9 and 0, so 45 % of the problems have one. The best possible critic has an explained
    # variance of 0.71.
    slip_rates=(0.1, 0.04, 0.02, 0.02, 0.01, 0.01),
    short_pairs=(1, 2),
    long_pairs=(3, 6),
    habit_rate=0.65,
)
DIALS = {dial.name: dial for dial in (SHORT, LONG, HABIT)}

ANSWER_SLIP_RATE = 0.02
"""Chance that the answer of a demonstration does not repeat the last digit."""

STEP_SLIPS = ("jump", "jump", "skip")
"""Kinds of slips in a step, drawn evenly. The first step is never left out, so that every response has a step."""

MANY_SLIPS_RATE = 0.4
"""Chance of a slip at each place of the rejected side of a `many` pair (at least one is forced)."""

PAIR_KINDS = {"one": 0.5, "many": 0.3, "sloppy": 0.2}
"""Share of each kind of preference pair: one slip, several slips, or a false digit under the right answer."""

SHORT_PAIR_SHARE = 0.5
"""Share of preference pairs with few steps: the place of their slip is easy to find, so they teach first."""

SLIP_DISTANCES = (4, 5)
"""Number of places on the dial by which a slipped digit is off. They are few, so that there are few wrong pairs of digits
to learn: a reward model of this size learns 20 of them within its minute, and misses some of 50."""

HABIT_DISTANCE = 4
"""Number of places by which a slip by habit is off: a count writes 94 for 90, and 03 for 09. Only after five such slips is
the sum a multiple of 10, so they do not cancel each other."""

_PROMPT = re.compile(r"([0-9])((?: [a-z][+-][1-9])+)\?")
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
            f" {letter}{change:+d}" for letter, change in zip(ascii_lowercase, self.changes, strict=False)
        )
        return f"{self.start}{steps}?"


def demonstrations(*, seed: int, count: int, dial: Dial = SHORT) -> Iterator[dict[str, str]]:
    """Yield rows `{prompt, response}`; steps slip with the dial's `slip_rates`, answers with `ANSWER_SLIP_RATE`."""
    rng = random.Random(f"{dial.name}/demonstrations/{seed}")
    for _ in range(count):
        problem = _draw_problem(rng, num_steps=rng.randint(dial.min_steps, dial.max_steps))
        num_steps = len(problem.changes)
        slip_places = _draw_places(rng, rates=(*dial.slip_rates[:num_steps], ANSWER_SLIP_RATE))
        habit_places = None
        if dial.habit_rate is not None:
            habit_places = _draw_places(rng, rates=(dial.habit_rate,) * num_steps)
        response = _write_response(problem, rng, slip_places=slip_places, habit_places=habit_places)
        yield {"prompt": problem.prompt, "response": response}


def preferences(*, seed: int, count: int, dial: Dial = SHORT) -> Iterator[dict[str, str]]:
    """Yield rows `{prompt, chosen, rejected}`; the chosen side is clean, the rejected one has slips.

    On a dial with a habit, a step that passes between 9 and 0 slips by habit.
    """
    rng = random.Random(f"{dial.name}/preferences/{seed}")
    kinds, shares = list(PAIR_KINDS), list(PAIR_KINDS.values())
    for _ in range(count):
        short = rng.random() < SHORT_PAIR_SHARE
        problem = _draw_problem(rng, num_steps=rng.randint(*(dial.short_pairs if short else dial.long_pairs)))
        clean = _write_response(problem, rng, slip_places=frozenset())
        kind = rng.choices(kinds, shares)[0]
        places = range(len(problem.changes) + 1)
        if kind == "sloppy":
            rejected = _write_false_digit(clean, rng)
        else:
            slip_places = frozenset({rng.choice(places)})
            if kind == "many":
                slip_places |= _draw_places(rng, rates=(MANY_SLIPS_RATE,) * len(places))
            habit_places = slip_places if dial.habit_rate is not None else None
            rejected = _write_response(problem, rng, slip_places=slip_places, habit_places=habit_places)
        yield {"prompt": problem.prompt, "chosen": clean, "rejected": rejected}


def labelled_responses(*, seed: int, count: int, dial: Dial = SHORT) -> Iterator[dict[str, Any]]:
    """Yield rows `{prompt, response, label}`: of each pair of `preferences` one side, and whether it is the chosen one."""
    rng = random.Random(f"{dial.name}/labelled_responses/{seed}")
    for pair in preferences(seed=seed, count=count, dial=dial):
        is_desirable = rng.random() < 0.5
        response = pair["chosen" if is_desirable else "rejected"]
        yield {"prompt": pair["prompt"], "response": response, "label": is_desirable}


def prompts(
    *,
    seed: int,
    wanted: Mapping[str, int],
    shares: Mapping[str, float],
    side_of: Callable[[str], str],
    dial: Dial = SHORT,
) -> Iterator[dict[str, str]]:
    """Return rows `{prompt, answer}`: the given number of different prompts for each side, in the order drawn.

    Args:
        wanted: side of a split → number of prompts.
        shares: side → about its share of all problems.
        side_of: function from a prompt to its side.

    Raises:
        ValueError: more than half of a side's problems are asked for.
    """
    for side, number in wanted.items():
        if number > shares[side] * dial.num_problems / 2:
            raise ValueError(
                f"{side}={number} prompts are asked of the {dial.name} task, which has about "
                f"{round(shares[side] * dial.num_problems)} on this side; ask for half of them at most"
            )
    return _draw_prompts(random.Random(f"{dial.name}/prompts/{seed}"), dict(wanted), side_of, dial)


def verify(prompt: str, response: str, *, dial: Dial = SHORT) -> bool:
    """Return whether the response ends in `#` and the right answer. The steps are not checked (see `check_steps`).

    Raises ValueError for a prompt that is not one of the dial's.
    """
    problem = parse_prompt(prompt, dial=dial)
    answer = _ANSWER.fullmatch(response)
    return answer is not None and int(answer[1]) == problem.answer


def check_steps(prompt: str, response: str, *, dial: Dial = SHORT) -> bool:
    """Return whether every step is there, in order, copied and counted correctly, and the answer repeats the last digit."""
    return response == _clean_response(parse_prompt(prompt, dial=dial))


def parse_prompt(prompt: str, *, dial: Dial = SHORT) -> Problem:
    """Return the problem that a prompt states; ValueError for any other text."""
    match = _PROMPT.fullmatch(prompt)
    steps = match[2].split() if match else []
    if match is None or "".join(step[0] for step in steps) != dial.letters[: len(steps)]:
        raise ValueError(
            f"prompt={prompt!r} is not a problem of the {dial.name} task; it must look like '3 a+2 b-3?' "
            f"(one digit, then at most {dial.max_steps} one-digit changes lettered from a)"
        )
    return Problem(start=int(match[1]), changes=tuple(int(step[1:]) for step in steps))


def _draw_problem(rng: random.Random, *, num_steps: int) -> Problem:
    changes = tuple(rng.choice((-1, 1)) * rng.randint(1, MAX_CHANGE) for _ in range(num_steps))
    return Problem(start=rng.randint(0, 9), changes=changes)


def _draw_prompts(
    rng: random.Random, wanted: dict[str, int], side_of: Callable[[str], str], dial: Dial
) -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    while any(wanted.values()):
        problem = _draw_problem(rng, num_steps=rng.randint(dial.min_steps, dial.max_steps))
        prompt = problem.prompt
        if prompt in seen:
            continue
        seen.add(prompt)
        side = side_of(prompt)
        if wanted.get(side):
            wanted[side] -= 1
            yield {"prompt": prompt, "answer": str(problem.answer)}


def _draw_places(rng: random.Random, *, rates: tuple[float, ...]) -> frozenset[int]:
    """Return which places slip: 0 ... n-1 are the steps, n is the answer."""
    return frozenset(place for place, rate in enumerate(rates) if rng.random() < rate)


def _write_step(letter: str, before: int, change: int, *, jump: tuple[int, int] | None = None) -> str:
    """Return letter, change and the digits from `before` on; from the place `jump[0]` on they are `jump[1]` off."""
    direction = 1 if change > 0 else -1
    place, distance = jump or (0, 0)
    digits = ((before + direction * i + (distance if i >= place else 0)) % 10 for i in range(abs(change) + 1))
    return f"{letter}{change:+d}:" + "".join(map(str, digits))


def _clean_response(problem: Problem) -> str:
    befores = (problem.start, *problem.results)
    steps = [
        _write_step(letter, before, change)
        for letter, before, change in zip(ascii_lowercase, befores, problem.changes, strict=False)
    ]
    return " ".join([*steps, f"#{problem.answer}"])


def _write_response(
    problem: Problem,
    rng: random.Random,
    *,
    slip_places: frozenset[int],
    habit_places: frozenset[int] | None = None,
) -> str:
    """Return the counted-out response with a slip at each of the places.

    `offset` is the error of the running digit; a slip changes it, but never to 0.

    Args:
        habit_places: a step that passes between 9 and 0 slips by habit if its place is among these, whatever
            `slip_places` contains. None: there is no habit.
    """
    offset, parts = 0, []
    befores = (problem.start, *problem.results)
    for place, (letter, change) in enumerate(zip(ascii_lowercase, problem.changes, strict=False)):
        before = (befores[place] + offset) % 10
        jump = None
        passing = _passes_zero_at(before, change) if habit_places is not None else None
        if passing is not None and habit_places is not None:
            if place in habit_places and (offset + HABIT_DISTANCE) % 10:
                jump, offset = (passing, HABIT_DISTANCE), offset + HABIT_DISTANCE
        elif place in slip_places:
            skipped = place > 0 and rng.choice(STEP_SLIPS) == "skip" and (offset - change) % 10 != 0
            if skipped:
                offset -= change
                continue
            distance = _draw_distance(rng, offset)
            jump, offset = (rng.randint(1, abs(change)), distance), offset + distance
        parts.append(_write_step(letter, before, change, jump=jump))
    if len(problem.changes) in slip_places:
        offset += _draw_distance(rng, offset)
    return " ".join([*parts, f"#{(problem.answer + offset) % 10}"])


def _passes_zero_at(before: int, change: int) -> int | None:
    """Return how many steps it takes to count from `before` past 9 (or, downwards, past 0); None: `change` steps do not reach it."""
    at = 10 - before if change > 0 else before + 1
    return at if at <= abs(change) else None


def _draw_distance(rng: random.Random, offset: int) -> int:
    return rng.choice([distance for distance in SLIP_DISTANCES if (offset + distance) % 10])


def _write_false_digit(clean: str, rng: random.Random) -> str:
    """Return the clean response with one counted digit replaced; the count goes on from the right digit."""
    *steps, answer = clean.split(" ")
    place = rng.randrange(len(steps))
    step = steps[place]
    digit = rng.randrange(step.index(":") + 2, len(step))
    false_digit = (int(step[digit]) + rng.choice(SLIP_DISTANCES)) % 10
    steps[place] = f"{step[:digit]}{false_digit}{step[digit + 1 :]}"
    return " ".join([*steps, answer])
