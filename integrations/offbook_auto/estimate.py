"""What the stages will ask of other LLMs: questions, tokens and price, computed without asking anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbook.llms.llm import Llm
from offbook.llms.prices import UsedTokens, cost_of, price_of
from offbook.llms.provider import Tokens, load

CHARACTERS = 4
"""Characters of a token, about."""
FRAME = 400
"""Tokens that the words around a question take, with its JSON schema."""
OUTLINE, PROMPT, RUBRIC, INPUT = 500, 300, 350, 120
"""Tokens of what the LLM writes, about."""
VERDICT = 60
"""Tokens of a judge's score with its explanation."""
AGAIN = 1.2
"""Inputs asked for, for each that is kept."""


@dataclass(frozen=True)
class StagePlan:
    """What a stage will take. `done`: its file is there, so that it asks nothing. `cost`: USD; None: unknown price.
    `work`: what else it does, such as rollouts of an app."""

    stage: str
    done: bool
    questions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0
    work: str = ""

    def line(self) -> str:
        """The plan as one line, for people."""
        if self.done:
            return f"{self.stage}: done"
        begin = f"{self.stage}: {self.work}; " if self.work else f"{self.stage}: "
        if not self.questions:
            return f"{self.stage}: {self.work or 'asks no other LLM'}"
        price = "of unknown price" if self.cost is None else f"about {self.cost:.2f} USD"
        tokens = f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"
        return f"{begin}{self.questions:,} question{'s' * (self.questions != 1)}, {tokens}, {price}"


def tokens_of(text: str) -> int:
    """About how many tokens a text has."""
    return len(text) // CHARACTERS + 1


def planned(stage: str, llm: Llm | None, questions: int, prompt: float, completion: float) -> StagePlan:
    """The plan of a stage whose questions take so many tokens each. `llm` is None for a judge that is none."""
    if llm is None or not questions:
        return StagePlan(stage, False)
    price = price_of(llm.options, load().model_cost)
    tokens = Tokens(round(questions * prompt), round(questions * completion))
    cost = None if price is None else questions * cost_of(UsedTokens(round(prompt), round(completion)), price)
    return StagePlan(stage, False, questions, *tokens, cost)


def plan_lines(plans: Sequence[StagePlan], max_cost: float | None) -> list[str]:
    """A plan as lines for a terminal, with its sum."""
    costs = [plan.cost for plan in plans]
    known = sum(cost for cost in costs if cost is not None)
    total = f"in all about {known:.2f} USD" + (", and what has an unknown price" if None in costs else "")
    short = max_cost is not None and known > max_cost
    return [
        *(plan.line() for plan in plans),
        f"{total}; the tokens are estimates. Nothing was asked.",
        *([f"max_cost={max_cost:g} USD will end the run before it is through"] if short else []),
    ]
