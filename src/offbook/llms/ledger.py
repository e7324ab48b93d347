"""Counts the requests, tokens and cost of other LLMs by purpose, and enforces budgets."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from math import inf, isfinite
from pathlib import Path

from offbook.base.errors import BudgetExceeded, ConfigError, StoreError
from offbook.base.text import counted

logger = logging.getLogger("offbook")


@dataclass(frozen=True)
class SpendingTotals:
    """Sums over the questions of one purpose.

    `cost` (USD) covers the requests with a known price; `unpriced` counts the others. `uncounted` counts answers without
    reported tokens.
    """

    questions: int = 0
    requests: int = 0
    cached: int = 0  # questions answered from the cache
    failed: int = 0  # questions without a usable answer
    repairs: int = 0  # answers read out of other text, or requested again
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    cost: float = 0.0
    unpriced: int = 0

    def __add__(self, other: SpendingTotals) -> SpendingTotals:
        return SpendingTotals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: SpendingTotals) -> SpendingTotals:
        return SpendingTotals(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def metrics(self, purpose: str) -> dict[str, float]:
        """The totals as metrics such as `costs/judge`. Without any known price there is no cost metric, only `unpriced`."""
        metrics = {
            f"tokens/{purpose}/prompt": float(self.prompt_tokens),
            f"tokens/{purpose}/completion": float(self.completion_tokens),
            f"llms/{purpose}/questions": float(self.questions),
            f"llms/{purpose}/requests": float(self.requests),
            f"llms/{purpose}/cached": float(self.cached),
            f"llms/{purpose}/failed": float(self.failed),
            f"llms/{purpose}/repairs": float(self.repairs),
        }
        if self.unpriced:
            metrics[f"llms/{purpose}/unpriced"] = float(self.unpriced)
        if self.cost or not self.unpriced:
            metrics[f"costs/{purpose}"] = self.cost
        if self.uncounted:
            metrics[f"llms/{purpose}/uncounted"] = float(self.uncounted)
        return metrics

    def line(self, purpose: str) -> str:
        """A line such as `judge: 12 questions (3 from the cache), 9 requests, 8,123 + 456 tokens, 0.0214 USD`."""
        cached = f" ({self.cached} from the cache)" if self.cached else ""
        failed = f", {self.failed} without a usable answer" if self.failed else ""
        unpriced = f"{counted(self.unpriced, 'request')} of unknown price" if self.unpriced else ""
        known = f"{self.cost:.4f} USD" if self.cost or not self.unpriced else ""
        return (
            f"{purpose}: {counted(self.questions, 'question')}{cached}, {counted(self.requests, 'request')}{failed}, "
            f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens, {' and '.join(filter(None, (known, unpriced)))}"
        )


class SpendingFile:
    """Totals as JSON lines, one for each `Spending.record`: what was paid is known after a kill."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn = False  # the last line has no newline: a kill cut it

    def totals(self) -> dict[str, SpendingTotals]:
        """The sums by purpose; damaged lines are left out with a warning. Raises StoreError."""
        try:
            content = self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error.strerror or error}") from error
        self._torn = not content.endswith(b"\n") and bool(content)
        sums: dict[str, SpendingTotals] = {}
        for number, line in enumerate(content.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                purpose, totals = str(row.pop("purpose")), SpendingTotals(**row)
                if not all(0 <= value < inf for value in asdict(totals).values()):
                    raise ValueError("a number of it is negative, or none")
                sums[purpose] = sums.get(purpose, SpendingTotals()) + totals
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("%s:%d: a damaged line was skipped: %r", self._path, number, error)
        return sums

    def add(self, purpose: str, totals: SpendingTotals) -> None:
        """Append totals. Raises StoreError: what cannot be kept must not be spent."""
        known = {name: value for name, value in asdict(totals).items() if value}
        line = json.dumps({"purpose": purpose, **known}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + line if self._torn else line)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self._torn = False


class Reservation:
    """A request in flight, with the estimate of its cost in USD until the cost is known."""

    def __init__(self, estimate: float) -> None:
        self.estimate = estimate
        self.cost = 0.0

    def charge(self, cost: float | None) -> None:
        """Set the cost of the request in USD; what is unknown, or no amount, counts as the estimate."""
        known = None if cost is None or not 0 <= cost < inf else cost
        self.cost = self.estimate if known is None else known


class Spending:
    """The totals of a `budget` block, or of the process. Enclosing blocks count everything too."""

    def __init__(
        self, max_cost: float | None = None, around: Spending | None = None, file: SpendingFile | None = None
    ) -> None:
        self.max_cost = max_cost
        self._around = around
        self._file = file
        self._lock = threading.Lock()
        self._purposes: dict[str, SpendingTotals] = {} if file is None else file.totals()
        # compared with `max_cost`; includes estimates for requests of unknown cost
        self._spent = sum(totals.cost for totals in self._purposes.values())
        self._in_flight: set[Reservation] = set()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def by_purpose(self) -> dict[str, SpendingTotals]:
        """The totals so far; purposes in the order of their first question."""
        with self._lock:
            return dict(self._purposes)

    @property
    def total(self) -> SpendingTotals:
        """The sum over purposes."""
        return sum(self.by_purpose().values(), SpendingTotals())

    def metrics(self, since: dict[str, SpendingTotals] | None = None) -> dict[str, float]:
        """The metrics of every purpose with questions, since an earlier `by_purpose()`."""
        metrics: dict[str, float] = {}
        for purpose, totals in self.by_purpose().items():
            gained = totals - (since or {}).get(purpose, SpendingTotals())
            metrics |= gained.metrics(purpose) if gained != SpendingTotals() else {}
        return metrics

    def lines(self) -> list[str]:
        """One line per purpose, for people."""
        return [totals.line(purpose) for purpose, totals in self.by_purpose().items()]

    @property
    def limited(self) -> bool:
        """Whether this block or an enclosing one has a `max_cost`."""
        return self.max_cost is not None or (self._around is not None and self._around.limited)

    def record(self, purpose: str, totals: SpendingTotals) -> None:
        """Add to the totals of a purpose."""
        with self._lock:
            self._purposes[purpose] = self._purposes.get(purpose, SpendingTotals()) + totals
            if self._file is not None:
                self._file.add(purpose, totals)
        if self._around is not None:
            self._around.record(purpose, totals)

    @asynccontextmanager
    async def reserved(self, estimate: float) -> AsyncGenerator[Reservation]:
        """Reserve `estimate` (USD) for a request. Waits while requests in flight may spend the rest of the budget.

        Raises BudgetExceeded when the budget is spent. If estimates hold, at most one request exceeds `max_cost`.
        """
        request = Reservation(estimate)
        blocks = [spending_block for spending_block in self._outwards() if spending_block.max_cost is not None]
        held: list[Spending] = []
        try:
            for block in blocks:
                await block._hold(request)
                held.append(block)
            yield request
        finally:
            for block in held:
                block._settle(request)

    def _outwards(self) -> Generator[Spending]:
        yield self
        if self._around is not None:
            yield from self._around._outwards()

    async def _hold(self, request: Reservation) -> None:
        assert self.max_cost is not None
        while True:
            turn = (asyncio.get_running_loop(), asyncio.Event())
            with self._lock:
                if self._spent >= self.max_cost:
                    raise BudgetExceeded(
                        f"max_cost={self.max_cost:g} USD for other LLMs is spent ({self._spent:.4f} USD): raise it to "
                        "continue",
                        max_cost=self.max_cost,
                        spent=self._spent,
                    )
                if not self._in_flight or self._spent + sum(r.estimate for r in self._in_flight) < self.max_cost:
                    self._in_flight.add(request)
                    return
                self._waiting.add(turn)
            try:
                await turn[1].wait()
            finally:
                with self._lock:
                    self._waiting.discard(turn)

    def _settle(self, request: Reservation) -> None:
        with self._lock:
            self._in_flight.discard(request)
            self._spent += request.cost
            for loop, turn in self._waiting:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(turn.set)


_PROCESS = Spending()
_CURRENT: ContextVar[Spending] = ContextVar("offbook_llm_spending", default=_PROCESS)


def spending() -> Spending:
    """The Spending of the innermost `budget` block, else that of the process."""
    return _CURRENT.get()


@contextmanager
def budget(max_cost: float | None = None, *, file: Path | None = None) -> Generator[Spending]:
    """Count the questions inside the block, also in tasks started there, and spend at most about `max_cost` USD.

    None means no limit. Questions beyond it raise BudgetExceeded. `file` keeps the totals: what earlier blocks wrote there
    counts too, also towards `max_cost`. Raises ConfigError for an invalid amount, StoreError for a file that cannot be used.
    """
    if max_cost is not None:
        check_max_cost(max_cost)
    block = Spending(max_cost, _CURRENT.get(), None if file is None else SpendingFile(file))
    token = _CURRENT.set(block)
    try:
        yield block
    finally:
        _CURRENT.reset(token)


def check_max_cost(value: object) -> None:
    """Raise ConfigError unless the value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ConfigError(f"max_cost: USD above 0 are needed, or None for no limit, got {value!r}")
