"""The output of `offbook mcp explore` and `offbook mcp scenarios`. Every text of a server is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from offbook.base.text import counted, one_line
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.scenarios.coverage import few_held_out, variable_hints
from offbook_mcp.scenarios.explore import Exploration
from offbook_mcp.scenarios.files import ScenarioSet
from offbook_mcp.scenarios.harvest import SHORT

_EXAMPLES = 3
_MOST_PLACES = 20


def explored(pool: ServerPool, exploration: Exploration) -> Iterator[str]:
    """The lines of `explore`: calls and results per tool, values by place, resources, and what is left out."""
    yield f"fingerprint {pool.fingerprint}; {counted(len(exploration.observations), 'call')}"
    for tool in pool.toolset.tools:
        seen = exploration.of(tool.name)
        if not seen:
            continue
        errors, empty = (
            sum(observation.is_error for observation in seen),
            sum(observation.empty and not observation.is_error for observation in seen),
        )
        yield ""
        yield f"{tool.name}: {len(seen) - errors - empty} answered, {empty} empty, {errors} refused"
        for observation in [observation for observation in seen if observation.worked][:_EXAMPLES]:
            yield f"  {one_line(repr(dict(observation.arguments)), 100)} -> {one_line(observation.text, 100)}"
        if error := exploration.first_error(tool.name):
            yield f"  {'refused' if errors else 'empty'}, such as {error}"
    yield from variable_hints(pool, exploration)
    places = [(place, values) for place, values in exploration.sampler.places.items() if not place.endswith(SHORT)]
    if places:
        yield ""
        yield "Values that other calls can use:"
        for place, values in places[:_MOST_PLACES]:
            some = ", ".join(one_line(str(value), 40) for value in list(values)[:_EXAMPLES])
            yield f"  {one_line(place, 60)}: {len(values)}, such as {some}"
        if len(places) > _MOST_PLACES:
            yield f"  and {len(places) - _MOST_PLACES} more places"
    for uri, text in exploration.resources.items():
        yield f"resource {one_line(uri, 80)}: {one_line(text, 80)}"
    if exploration.left_out:
        yield ""
        yield "Left out:"
        yield from (f"  {one_line(name, 80)}: {one_line(why)}" for name, why in exploration.left_out.items())


def made(scenarios: ScenarioSet, wanted: int, output: Path) -> Iterator[str]:
    """The lines of `scenarios`: counts, a few tasks, and why candidates were dropped. `wanted`: how many were asked for."""
    total = len(scenarios.scenarios)
    fewer = f" ({wanted} were asked for)" if total < wanted else ""
    yield f"{counted(total, 'scenario')}{fewer}: {len(scenarios.train)} to train, {len(scenarios.eval)} held out"
    if few := few_held_out(scenarios, wanted, one_line(str(output))):
        yield few
    difficulties = Counter(scenario.difficulty for scenario in scenarios.scenarios)
    checks = Counter(scenario.check.value for scenario in scenarios.scenarios)
    yield "difficulty " + ", ".join(f"{level}: {number}" for level, number in sorted(difficulties.items()))
    yield "checked by " + ", ".join(f"{kind}: {number}" for kind, number in sorted(checks.items()))
    train = Counter(tool for scenario in scenarios.train for tool in scenario.tools)
    held_out = Counter(tool for scenario in scenarios.eval for tool in scenario.tools)
    for tool in sorted(train | held_out):
        yield f"  {one_line(tool, 64)}: {train[tool]} to train, {held_out[tool]} held out"
    for scenario in scenarios.scenarios[:_EXAMPLES]:
        yield f"  {one_line(scenario.task, 160)}"
    if scenarios.dropped:
        ranked = sorted(scenarios.dropped.items(), key=lambda item: (-item[1], item[0]))
        yield "dropped: " + "; ".join(f"{number} {one_line(reason)}" for reason, number in ranked)
        yield from (f"  {one_line(reason)}, such as {one_line(text)}" for reason, text in scenarios.examples.items())


def planned(pool: ServerPool, count: int, questions: int, output: str) -> Iterator[str]:
    """The lines of `scenarios --dry-run`."""
    used = [tool.name for tool in pool.toolset.tools]
    yield f"fingerprint {pool.fingerprint}; nothing is called, nothing is written"
    yield f"would explore and use: {', '.join(used) or 'nothing'}"
    yield from (f"would leave out {name}: {one_line(why)}" for name, why in pool.toolset.left_out.items())
    if questions:
        yield f"would ask the writer about {counted(questions, 'question')}, half of them for scenarios and half for their answers"
    yield f"would write up to {counted(count, 'scenario')} to {one_line(output)}"
