"""Writes the prompts of the recipe ``rloo_sentiment``: ``python -m vantage.recipes.story_openings > recipes/story_openings.jsonl``.

Openings of children's stories in the words of TinyStories (arXiv 2305.07759), half of them cheerful and half of them sad.
"""

import json
from itertools import product

NAMES = {
    "Lily": "She",
    "Tom": "He",
    "Mia": "She",
    "Ben": "He",
    "Anna": "She",
    "Tim": "He",
    "Sue": "She",
    "Max": "He",
}
PLACES = ("in the park", "at home", "in the garden", "by the river", "in the forest", "at the beach")
EVENTS = (
    "saw a big dog",
    "found a red ball",
    "met a new friend",
    "had a picnic",
    "lost a toy",
    "fell and got hurt",
    "heard a loud noise",
    "was cold and alone",
)


def openings() -> list[str]:
    """All of them, in one order."""
    return [
        f"One day, {name} was {place}. {pronoun} {event}. {pronoun}"
        for (name, pronoun), place, event in product(NAMES.items(), PLACES, EVENTS)
    ]


if __name__ == "__main__":
    for opening in openings():
        print(json.dumps({"prompt": opening}))
