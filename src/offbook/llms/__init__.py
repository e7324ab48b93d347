"""Client for other LLMs: judges, scenario writers, comparison models.

Importing this package loads nothing. The first question imports litellm (extra `judge`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULE_OF = {
    "Answer": ".provider",
    "BudgetExceeded": "offbook.base.errors",
    "Llm": ".llm",
    "LlmError": "offbook.base.errors",
    "LlmOptions": ".options",
    "Price": ".options",
    "Spending": ".ledger",
    "SpendingTotals": ".ledger",
    "Tokens": ".provider",
    "budget": ".ledger",
    "spending": ".ledger",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
