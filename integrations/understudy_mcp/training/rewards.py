"""The reward of a rollout on a server's tools, from what the policy called and answered. Pure functions.

The parts, each from 0 to 1:
- tool_match: of the tools that the solution calls, how many the policy called
- argument_match: how well the reference calls were made, see `argument_score`
- answer_match: of the values that the answer must contain, how many it contains

A rollout is worth TOOLS x tool_match + ARGUMENTS x argument_match + ANSWER x argument_match x answer_match: an answer counts
as far as its calls were made, so that a guess is worth nothing; where a scenario names no calls, they count as made. A
needless call costs NEEDLESS, at most MOST_NEEDLESS in all.

Whatever a server says, in a result, an error or a description, is no part of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from understudy import RewardResult

from ..scenarios.scenario import CheckKind, McpScenario, ReferenceCall
from ..tools.tool import ToolKind
from ..tools.toolset import Toolset
from .answers import answer_score
from .episode import EpisodeEnd, MadeCall, ToolEpisode
from .equivalence import argument_score

TOOLS, ARGUMENTS, ANSWER = 0.2, 0.4, 0.4
NEEDLESS, MOST_NEEDLESS = 0.05, 0.2


def score(scenario: McpScenario, episode: ToolEpisode, toolset: Toolset) -> RewardResult:
    """The reward and its parts as metrics. A scenario of CheckKind.JUDGE has no reference: its reward, 0 less the needless
    calls, is for its judge to replace."""
    made = [call for call in episode.calls if call.arguments is not None]
    malformed = len(episode.calls) - len(made)
    matches = matched(scenario.calls, made, toolset)
    answered = float(episode.end is EpisodeEnd.ANSWERED and bool(episode.answer.strip()))
    tools = tool_match(scenario, made)
    arguments = _mean(list(matches.scores)) if scenario.calls else 1.0
    answer = answered * (answer_score(scenario.answer, episode.answer) if scenario.check is CheckKind.ANSWER else 1.0)
    needless = malformed + (len(made) - matches.used if scenario.calls else 0)
    cost = min(NEEDLESS * needless, MOST_NEEDLESS)
    done = arguments == 1.0 and answer == 1.0 and not matches.wrote_more
    gained = TOOLS * tools + ARGUMENTS * arguments + ANSWER * arguments * answer
    metrics = {
        "tool_match": tools,
        "argument_match": arguments,
        "answer_match": answer,
        "needless_calls": float(needless),
        "errors": float(malformed + sum(call.failed for call in made)),
        "turns": float(episode.turns),
        "answered": answered,
    }
    if scenario.check is CheckKind.JUDGE:
        return RewardResult(-cost, {name: metrics[name] for name in ("errors", "turns", "answered", "needless_calls")})
    by_tool = {f"success.{tool}": float(done) for tool in scenario.tools}
    return RewardResult(gained - cost, {"success": float(done), **metrics, **by_tool})


class CallMatches:
    """Which made call stands for which reference call. `scores`: of each reference call; `used`: made calls that stand for
    one; `wrote_more`: whether another made call may have changed something."""

    def __init__(self, scores: Sequence[float], used: int, wrote_more: bool) -> None:
        self.scores = tuple(scores)
        self.used = used
        self.wrote_more = wrote_more


def matched(references: Sequence[ReferenceCall], made: Sequence[MadeCall], toolset: Toolset) -> CallMatches:
    """Each reference call with the made call of the same tool that is most like it, each made call used once; the best pairs
    first, so that the order of calls does not matter."""
    pairs = [
        (_likeness(reference, call, toolset), -at, -index)
        for at, reference in enumerate(references)
        for index, call in enumerate(made)
        if call.tool == reference.tool
    ]
    scores = [0.0] * len(references)
    taken: set[int] = set()
    settled: set[int] = set()
    for likeness, at, index in sorted(pairs, reverse=True):
        if -at in settled or -index in taken:
            continue
        settled.add(-at)
        taken.add(-index)
        scores[-at] = likeness
    others = [call for index, call in enumerate(made) if index not in taken]
    return CallMatches(scores, len(taken), any(_may_write(call, toolset) for call in others))


def tool_match(scenario: McpScenario, made: Sequence[MadeCall]) -> float:
    """Of the calls of the solution, the share whose tool was called, as often as the solution calls it; without a solution
    that of the expected tools."""
    wanted = Counter(call.tool for call in scenario.calls) or Counter(scenario.tools)
    called = Counter(call.tool for call in made)
    return (wanted & called).total() / wanted.total() if wanted else 1.0


def _likeness(reference: ReferenceCall, call: MadeCall, toolset: Toolset) -> float:
    tool = toolset.find(reference.tool)
    expected, actual = dict(reference.arguments), dict(call.arguments or {})
    if tool is None:
        return argument_score(expected, actual, {})
    for name in tool.bound:  # fixed, whatever is written
        expected.pop(name, None)
        actual.pop(name, None)
    return argument_score(expected, actual, tool.parameters)


def _may_write(call: MadeCall, toolset: Toolset) -> bool:
    tool = toolset.find(call.tool)
    return tool is not None and tool.tool.kind is not ToolKind.READ


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
