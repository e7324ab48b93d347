"""Client for other LLMs: judges, scenario writers, comparison models. The first question imports litellm (extra `judge`)."""

from offbook.base.errors import BudgetExceeded, LlmError

from .ledger import Spending, SpendingTotals, budget, spending
from .llm import Llm
from .options import LlmOptions, Price
from .provider import Answer, Tokens

__all__ = [
    "Answer",
    "BudgetExceeded",
    "Llm",
    "LlmError",
    "LlmOptions",
    "Price",
    "Spending",
    "SpendingTotals",
    "Tokens",
    "budget",
    "spending",
]
