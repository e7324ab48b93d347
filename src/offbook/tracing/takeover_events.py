"""Shows a takeover's decisions to trace sinks. Events have fixed ids, so a decision that a sink has lands on itself."""

from __future__ import annotations

from collections.abc import Sequence

from offbook.base.redaction import error_text
from offbook.base.takeovers import Decision, Numbers, TakeoverState
from offbook.contracts import TakeoverDecided, TraceSink

from .export import ExportError
from .fanout import show, sink_name


def takeover_events(state: TakeoverState) -> list[TakeoverDecided]:
    """The decisions of a route's takeovers, oldest first."""
    return [_event(state.route, number, decision) for number, decision in enumerate(state.decisions)]


def _event(route: str, number: int, decision: Decision) -> TakeoverDecided:
    metrics = {"share": decision.share, **_metrics(decision.numbers)}
    return TakeoverDecided(
        run=f"route/{route}",
        model=decision.model,
        number=number,
        at=decision.decided_at,
        verdict=decision.verdict,
        reason=decision.reason,
        metrics=metrics,
    )


def _metrics(numbers: Numbers) -> dict[str, float]:
    """The numbers of a decision that are known, by their names."""
    fields = numbers.model_dump(exclude={"failed"}) | {"failed": sum(numbers.failed.values())}
    return {name: float(value) for name, value in fields.items() if value is not None}


class TakeoverEvents:
    """Shows the decisions that a sink was not shown yet. `check` first, `close` at the end."""

    def __init__(self, sinks: Sequence[TraceSink]) -> None:
        self._sinks = sinks
        self._shown: dict[int, set[str]] = {number: set() for number in range(len(sinks))}

    def check(self) -> None:
        """Raises ConfigError for wrong credentials, ConnectionError for a tool that does not answer."""
        for sink in self._sinks:
            sink.check()

    def show(self, state: TakeoverState) -> int:
        """Show the new decisions; returns their number. Raises ExportError if a sink did not take one: it is shown again the next
        time."""
        events, faults, new = takeover_events(state), list[str](), set[str]()
        for sink, shown in zip(self._sinks, self._shown.values(), strict=True):
            for event in events:
                if event.id in shown:
                    continue
                try:
                    show(sink, event)
                except Exception as error:  # noqa: BLE001  # a sink is foreign code; the other sinks are still shown
                    faults.append(f"{sink_name(sink)}: {event.id}: {error_text(error)}")
                    break  # later decisions after it, in their order
                shown.add(event.id)
                new.add(event.id)
        if faults:
            raise ExportError("; ".join(faults) + ". The same command again delivers the rest")
        return len(new)

    def close(self) -> None:
        """Let the sinks write what they hold."""
        for sink in self._sinks:
            sink.closed()
