"""Seeded text for tests: equal everywhere, with structure beyond neighbouring words."""

import random

NAMES = ("Ada", "Emil", "Grete", "Otto", "Paula")
THINGS = ("apples", "boats", "candles", "drums", "engines", "flutes")
PLACES = ("harbour", "market", "orchard", "station", "tower")


def seeded_text(num_sentences: int, seed: int = 0) -> str:
    """Returns sentences, each about 75 characters, in which a name and a thing recur."""
    chance = random.Random(seed)
    lines: list[str] = []
    for _ in range(num_sentences):
        name, thing, place = (chance.choice(words) for words in (NAMES, THINGS, PLACES))
        count = chance.randrange(2, 90)
        lines.append(
            f"{name} has {count} {thing} at the {place}; the {thing} of {name} are {count} in all."
        )
    return "\n".join(lines) + "\n"
