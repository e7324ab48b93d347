"""Success on held-out scenarios before and after training; and without a gain, why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from pydantic import BaseModel, ConfigDict

from offbook import Trajectory, TrajectoryGroup
from offbook.base.json_files import parse_json
from offbook.base.text import counted, one_line
from offbook.trainer.messages import SOLVED
from offbook_mcp.rollouts.argument_score import same_value
from offbook_mcp.scenarios.scenario import McpScenario
from offbook_mcp.tools.tool import Schema

_BY_TOOL = "success."


class Measured(BaseModel):
    """Means over held-out scenarios at one step: `success`, `success.TOOL`, and the parts of the reward. `scored`: number of
    scenarios with a score; None: kept by a version that did not count them."""

    model_config = ConfigDict(frozen=True)

    step: int
    rates: dict[str, float]
    scored: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Measurements before and after training. `scenarios` is the scenario file's hash, `held_out` the number measured.

    no_gain: after a run without gain, why, in lines.
    """

    scenarios: str
    held_out: int
    before: Measured | None = None
    after: Measured | None = None
    no_gain: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """The table as lines, or one line if nothing was measured; then why there was no gain."""
        yield from self._table()
        yield from self.no_gain

    def _table(self) -> Iterator[str]:
        if self.before is None or self.after is None:
            yield "success was not measured: no scenario is held out"
            return
        if "success" not in self.after.rates:
            yield "success was not measured: a judge scores the held-out scenarios. Compare steps with `offbook mcp"
            yield "compare TARGET --with step:0 --with step:newest --judge MODEL`"
            return
        yield f"success on {self.held_out} held-out scenarios (greedy), scenarios {self.scenarios[:16]}"
        names = [name for name in self.after.rates if name.startswith(_BY_TOOL)]
        rows = [("all", "success"), *((one_line(name.removeprefix(_BY_TOOL), 64), name) for name in names)]
        width = max(len(label) for label, _ in rows)
        yield f"{'':{width}}  {f'step {self.before.step}':>9}  {f'step {self.after.step}':>9}"
        for label, name in rows:
            yield f"{label:{width}}  {_percent(self.before.rates.get(name)):>9}  {_percent(self.after.rates.get(name)):>9}"
        counts = [self.held_out if one.scored is None else one.scored for one in (self.before, self.after)]
        if min(counts) < self.held_out:
            yield (
                f"Rollouts failed, so step {self.before.step} was scored on {counts[0]} of the {self.held_out} scenarios and step "
                f"{self.after.step} on {counts[1]}: the columns do not compare the same ones."
            )
        if self.before.rates.get("success", 0.0) >= SOLVED:
            yield "The model solved most of these before training: harder ones leave more to learn (--scenarios FILE)."


def tool_lines(metrics: Mapping[str, float]) -> Iterator[str]:
    """The success per tool as lines, from the metrics of an evaluation."""
    names = sorted(name for name in metrics if name.startswith(_BY_TOOL))
    labels = [one_line(name.removeprefix(_BY_TOOL), 64) for name in names]
    width = max((len(label) for label in labels), default=0)
    for label, name in zip(labels, names, strict=True):
        yield f"  {label:{width}}  {_percent(metrics[name]):>4}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


_LISTED = 4


@dataclass
class _Tried:
    rollouts: int = 0
    solved: int = 0


@dataclass
class _Written:
    """One argument of a tool: whether a rollout wrote a reference's value, the scenarios that want it, and an example of
    what was written for which value."""

    right: bool = False
    scenarios: set[str] = field(default_factory=set[str])
    example: tuple[object, object] | None = None


class RunRecord:
    """The results of a run's training rollouts by scenario, tool and argument, and when difficulties opened."""

    def __init__(self, scenarios: Sequence[McpScenario]) -> None:
        self._scenarios = {scenario.id: scenario for scenario in scenarios}
        self._iterations = 0
        self._tried: dict[str, _Tried] = {}
        self._called: set[str] = set()
        self._written: dict[tuple[str, str], _Written] = {}
        self._openings: list[str] = []

    def add(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Add the rollouts of one iteration. Those without a `success` (failed, or scored by a judge alone) do not count."""
        self._iterations += 1
        for rollout in (rollout for group in groups for rollout in group):
            scenario = self._scenarios.get(str(rollout.metadata.get("scenario_id")))
            if scenario is None or rollout.reward is None or "success" not in rollout.metrics:
                continue
            tried = self._tried.setdefault(scenario.id, _Tried())
            tried.rollouts += 1
            tried.solved += rollout.metrics["success"] == 1.0
            self._add_calls(scenario, rollout)

    def opened(self, level: int, success: str) -> None:
        """Note that a difficulty opened after the newest iteration. `success`: that of the one before, in words."""
        self._openings.append(f"difficulty {level} opened after {counted(self._iterations, 'iteration')}{success}")

    def lines(self) -> Iterator[str]:
        """The reasons, as a block of lines; nothing if no rollout had a `success`."""
        if not self._tried:
            return
        never = [name for name, tried in self._tried.items() if not tried.solved]
        always = [name for name, tried in self._tried.items() if tried.solved == tried.rollouts]
        yield f"No gain: of {counted(len(self._tried), 'scenario')} trained on,"
        if never:
            yield f"  never solved: {self._by_tool(never)}, such as {one_line(self._scenarios[never[0]].task, 100)!r}"
        if always:
            yield f"  always solved, which teaches nothing: {self._by_tool(always)}"
        if others := len(self._tried) - len(never) - len(always):
            yield f"  sometimes solved: {others}"
        wanted = Counter(name for scenario in never for name in self._scenarios[scenario].tools)
        if uncalled := [f"{name} (in {number})" for name, number in wanted.most_common() if name not in self._called]:
            yield f"  never called: {_some(uncalled)}"
        if unwritten := [_example(*key, written) for key, written in self._written.items() if not written.right]:
            yield f"  never written right: {_some(unwritten)}"
        if self._openings:
            yield f"  {'; '.join(self._openings)}"
        if waiting := [scenario.difficulty for name, scenario in self._scenarios.items() if name not in self._tried]:
            yield f"  not tried: {len(waiting)} of difficulty {', '.join(str(level) for level in sorted(set(waiting)))}"
        if len(never) > len(self._tried) / 2:
            yield "Easier scenarios may help (`offbook mcp scenarios TARGET --max-difficulty 1`), or a larger --base-model."

    def _by_tool(self, scenarios: Sequence[str]) -> str:
        counts = Counter(name for scenario in scenarios for name in self._scenarios[scenario].tools)
        return (
            f"{len(scenarios)} ({_some([f'{one_line(name, 64)} {number}' for name, number in counts.most_common()])})"
        )

    def _add_calls(self, scenario: McpScenario, rollout: Trajectory) -> None:
        """Compare what the rollout's calls have for each argument of the reference calls that the model sees."""
        calls = list(_calls_of(rollout))
        self._called.update(tool for tool, _ in calls)
        schemas = _schemas_of(rollout)
        for reference in scenario.calls:
            made = [arguments for tool, arguments in calls if tool == reference.tool]
            for name, wanted in reference.arguments.items():
                if not made or name not in schemas.get(reference.tool, {}):
                    continue
                written = self._written.setdefault((reference.tool, name), _Written())
                written.scenarios.add(scenario.id)
                schema = schemas[reference.tool][name]
                right = rollout.metrics.get("argument_match") == 1.0  # other code may have the same meaning
                values = [arguments[name] for arguments in made if name in arguments]
                written.right |= right or any(same_value(wanted, value, schema, name) for value in values)
                if values and written.example is None:
                    written.example = (values[0], wanted)


def _example(tool: str, argument: str, written: _Written) -> str:
    number = counted(len(written.scenarios), "scenario")
    shown = f"{one_line(tool, 64)}.{one_line(argument, 64)} (in {number}"
    if written.example is None:
        return f"{shown}, always left out)"
    value, wanted = (one_line(json.dumps(part, ensure_ascii=False), 40) for part in written.example)
    return f"{shown}, such as {value} for {wanted})"


def _calls_of(rollout: Trajectory) -> Iterator[tuple[str, dict[str, object]]]:
    """The tools and arguments of the rollout's calls; no arguments for those that are not a JSON object."""
    for message in rollout.messages():
        for call in cast(Iterable[Mapping[str, dict[str, str]]], message.get("tool_calls") or ()):
            function = call["function"]
            try:
                arguments = parse_json(function["arguments"])
            except ValueError:
                arguments = {}
            yield function["name"], cast(dict[str, object], arguments) if isinstance(arguments, dict) else {}


def _schemas_of(rollout: Trajectory) -> dict[str, dict[str, Schema]]:
    """The schemas of the arguments that the model sees, by tool and argument."""
    functions = [cast(dict[str, object], tool["function"]) for tool in rollout.tools or ()]
    parameters = {str(each["name"]): cast(Schema, each.get("parameters") or {}) for each in functions}
    return {name: cast(dict[str, Schema], schema.get("properties") or {}) for name, schema in parameters.items()}


def _some(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more
