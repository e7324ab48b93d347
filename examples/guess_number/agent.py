"""Guesses a number from 1 to 7. The game says after each guess whether the number is higher or lower."""

from __future__ import annotations

from openai import AsyncOpenAI
from textarena_env import Match

NUMBERS = 7
GUESSES = 3


async def play(client: AsyncOpenAI, model: str, scenario: dict[str, int]) -> float:
    """One match: 1 if it was found, else 0."""
    match = Match("GuessTheNumber-v0", scenario["match"], max_number=NUMBERS, max_turns=GUESSES)
    low, high = 1, NUMBERS
    for _ in range(GUESSES):
        possible = [str(number) for number in range(low, high + 1)]
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Guess my number. It is one of {' '.join(possible)}."}],
            extra_body={"structured_outputs": {"choice": possible}},
        )
        guess = int(answer.choices[0].message.content or "")
        match.play(f"[{guess}]")
        if match.over:
            return float(match.rewards[0] == 1)
        low, high = (guess + 1, high) if match.state["guess_history"][-1][1] == "higher" else (low, guess - 1)
    return 0.0
