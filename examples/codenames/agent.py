"""Two players of Codenames who do not see each other: one knows the secret word and gives a clue, one reads the clue
and names the word. Two forms: a code of a few words, and a board of real words."""

from __future__ import annotations

import random
from dataclasses import dataclass

from openai import AsyncOpenAI

CODE_WORDS, CODE_CLUES = ("river", "candle"), ("north", "south")
_NOUNS = """
anchor apple bank bell bridge button camera castle cloud clock coin crown desert doctor dragon drum eagle engine
feather fire flag forest garden ghost glass gold hammer honey horse island jungle key king knife ladder lemon lion
mirror moon mountain needle ocean orange paper piano pirate plane queen rabbit ring robot rocket rope saddle school
shadow ship snow soldier spider spring star storm sugar table tiger tower train turtle violin wall watch whale wheel
window winter witch wolf
"""
BOARD_WORDS: tuple[str, ...] = tuple(_NOUNS.split())


@dataclass(frozen=True)
class Player:
    """A model, and how it is asked."""

    client: AsyncOpenAI
    model: str

    async def say(self, prompt: str, choices: list[str] | None = None) -> str:
        answer = await self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt}],
            extra_body={"structured_outputs": {"choice": choices}} if choices else None,
        )
        return (answer.choices[0].message.content or "").strip()


async def code(spymaster: Player, operative: Player, seed: int) -> float:
    """All words, one after the other; the share that was understood. A constant answer earns one in `CODE_WORDS`, so
    only an agreement between the two is rewarded."""
    numbers = random.Random(seed)
    right = 0
    for word in numbers.sample(CODE_WORDS, len(CODE_WORDS)):
        clues = numbers.sample(CODE_CLUES, len(CODE_CLUES))
        clue = await spymaster.say(f"The secret word is {word}. Which clue do you give?", clues)
        words = numbers.sample(CODE_WORDS, len(CODE_WORDS))
        right += await operative.say(f"The clue is {clue}. Which word is it?", words) == word
    return right / len(CODE_WORDS)


async def board(spymaster: Player, operative: Player, seed: int) -> float:
    """One clue for three of nine words: the share of them that is found. A clue that is on the board, or is no single
    word, earns nothing; naming the assassin ends the turn."""
    numbers = random.Random(seed)
    words = numbers.sample(BOARD_WORDS, 9)
    ours, assassin = words[:3], words[3]
    shown = numbers.sample(words, len(words))
    clue = await spymaster.say(
        f"Codenames. The board: {', '.join(shown)}. Your words: {', '.join(ours)}. The assassin: {assassin}. Answer with "
        "one word that is not on the board and that leads your partner to your words."
    )
    if not clue.isalpha() or clue.lower() in words:
        return 0.0
    found = 0
    left = list(shown)
    for _ in ours:
        guess = await operative.say(
            f"Codenames. The board: {', '.join(left)}. The clue: {clue}, for {len(ours) - found} words. Answer with one "
            "word of the board.",
            left,
        )
        if guess not in ours:
            return 0.0 if guess == assassin else found / len(ours)
        found += 1
        left.remove(guess)
    return found / len(ours)
