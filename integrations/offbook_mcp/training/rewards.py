"""The reward of a rollout on a server's tools, from the policy's calls and its answer. Pure functions.

The parts, all from 0 to 1:
- tool_match: the share of the solution's tools that the policy called
- argument_match: how well the policy's calls match the reference calls, see `argument_score`
- answer_match: the share of the required values that the answer contains

reward = TOOLS x tool_match + ARGUMENTS x argument_match + ANSWER x argument_match x answer_match. The answer is weighted by
argument_match, so that a guess without calls is worth nothing; a scenario without reference calls has argument_match 1. A
needless call costs NEEDLESS, at most MAX_NEEDLESS in total.

Arguments in a language, such as SQL and code, are compared by what the calls returned (`ReferenceCall.returned`): the same
values are the same arguments, and a call that fails has none right. Apart from that, no text of a server (result, error or
description) enters the reward.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from offbook import RewardResult
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ReferenceCall
from offbook_mcp.tools.tool import ToolKind
from offbook_mcp.tools.toolset import Toolset
from offbook_mcp.training.argument_score import free_form_arguments, same_code

from .argument_score import argument_score

Arguments = dict[str, object]


class EpisodeEnd(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"  # a message without a tool call
    TURN_LIMIT = "turn_limit"  # it still called tools at its last turn
    CONTEXT_FULL = "context_full"  # the conversation fills the model's context


@dataclass(frozen=True)
class PolicyCall:
    """One tool call of the policy.

    `arguments` is None if they were not a JSON object or the tool was not offered, so that nothing was called. `failed`
    means that the tool reported an error, which is counted, and scored only for arguments in a language such as SQL. `returned`
    is a hash of the result of a call with such arguments.
    """

    tool: str
    arguments: Arguments | None = field(hash=False)
    turn: int = 0
    failed: bool = False
    returned: str = ""


@dataclass(frozen=True)
class ToolEpisode:
    """The tool calls in the order in which the model wrote them, and the final answer."""

    calls: tuple[PolicyCall, ...] = ()
    answer: str = ""
    end: EpisodeEnd = EpisodeEnd.ANSWERED
    turns: int = 0
    cut_off: bool = False  # the answer ended at the limit of tokens


LONGEST_ANSWER = 2_000
"""Only this many characters of an answer count: a model must not score by repeating everything it read."""
_NUMBER = re.compile(r"(?<![\w.,])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")
_TOLERANCE = 1e-6


def answer_score(expected: Sequence[str], answer: str) -> float:
    """The share of the values that the answer contains, from 0 to 1; 1 if no value is required."""
    if not expected:
        return 1.0
    read = answer[:LONGEST_ANSWER]
    return sum(contains(read, value) for value in expected) / len(expected)


def contains(answer: str, value: str) -> bool:
    """Whether the answer contains the value.

    A number matches a number of equal value. A text matches as whole words, ignoring case, white space, quotes and
    backticks.
    """
    wanted = _plain(value)
    if not wanted:
        return True
    number = _as_number(wanted)
    written = (float(match.replace(",", "")) for match in _NUMBER.findall(answer))
    if number is not None and any(
        math.isclose(number, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) for other in written
    ):
        return True
    begin = r"(?<!\w)" if wanted[0].isalnum() else ""
    end = r"(?!\w)" if wanted[-1].isalnum() else ""
    if number is not None:  # 5 is not in 0.5, 5.25 or -5
        begin, end = r"(?<![\w.,+-])", r"(?![\w]|[.,]\d)"
    return re.search(begin + re.escape(wanted) + end, _plain(answer)) is not None


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFC", text).casefold()
    return " ".join(re.sub(r"[`\"'*\u2018\u2019\u201c\u201d]", "", text).split())


def _as_number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    return float(match[0].replace(",", "")) if match else None


TOOLS, ARGUMENTS, ANSWER = 0.2, 0.4, 0.4
NEEDLESS, MAX_NEEDLESS = 0.05, 0.2
_DIFFERENT = object()
"""In place of an argument in a language that has another meaning than the reference: equal to nothing."""


def score(scenario: McpScenario, episode: ToolEpisode, toolset: Toolset) -> RewardResult:
    """Compute the reward, with its parts as metrics.

    A scenario of CheckKind.JUDGE has no reference: its reward is minus the cost of malformed calls, and the judge adds its
    score.
    """
    calls = [call for call in episode.calls if call.arguments is not None]
    malformed = len(episode.calls) - len(calls)
    matches = matched(scenario.calls, calls, toolset)
    answered = float(episode.end is EpisodeEnd.ANSWERED and bool(episode.answer.strip()))
    tools = tool_match(scenario, calls)
    arguments = math.fsum(matches.scores) / len(matches.scores) if scenario.calls else 1.0
    answer = answered * (answer_score(scenario.answer, episode.answer) if scenario.check is CheckKind.ANSWER else 1.0)
    needless = malformed + (len(calls) - matches.used if scenario.calls else 0)
    cost = min(NEEDLESS * needless, MAX_NEEDLESS)
    done = arguments == 1.0 and answer == 1.0 and not matches.wrote_more
    gained = TOOLS * tools + ARGUMENTS * arguments + ANSWER * arguments * answer
    metrics = {
        "tool_match": tools,
        "argument_match": arguments,
        "answer_match": answer,
        "needless_calls": float(needless),
        "errors": float(malformed + sum(call.failed for call in calls)),
        "turns": float(episode.turns),
        "answered": answered,
    }
    if scenario.check is CheckKind.JUDGE:
        return RewardResult(-cost, {name: metrics[name] for name in ("errors", "turns", "answered", "needless_calls")})
    by_tool = {f"success.{tool}": float(done) for tool in scenario.tools}
    return RewardResult(gained - cost, {"success": float(done), **metrics, **by_tool})


@dataclass(frozen=True)
class CallMatches:
    """The matching of the policy's calls to the reference calls.

    scores: per reference call. used: the number of matched calls. wrote_more: whether an unmatched call may have changed
    something.
    """

    scores: tuple[float, ...]
    used: int
    wrote_more: bool


def matched(references: Sequence[ReferenceCall], calls: Sequence[PolicyCall], toolset: Toolset) -> CallMatches:
    """Match every reference call to the most similar call of the same tool; a call is used once.

    The best pairs are matched first, so the order of calls does not matter.
    """
    pairs = [
        (_likeness(reference, call, toolset), -reference_index, -index)
        for reference_index, reference in enumerate(references)
        for index, call in enumerate(calls)
        if call.tool == reference.tool
    ]
    scores = [0.0] * len(references)
    taken: set[int] = set()
    settled: set[int] = set()
    for likeness, reference_index, index in sorted(pairs, reverse=True):
        if -reference_index in settled or -index in taken:
            continue
        settled.add(-reference_index)
        taken.add(-index)
        scores[-reference_index] = likeness
    others = [toolset.find(call.tool) for index, call in enumerate(calls) if index not in taken]
    wrote_more = any(tool is not None and tool.tool.kind is not ToolKind.READ for tool in others)
    return CallMatches(tuple(scores), len(taken), wrote_more)


def tool_match(scenario: McpScenario, calls: Sequence[PolicyCall]) -> float:
    """The share of the solution's calls whose tool was called, as often as in the solution.

    Without reference calls, the share of the scenario's tools that were called.
    """
    wanted = Counter(call.tool for call in scenario.calls) or Counter(scenario.tools)
    called = Counter(call.tool for call in calls)
    return (wanted & called).total() / wanted.total() if wanted else 1.0


def _likeness(reference: ReferenceCall, call: PolicyCall, toolset: Toolset) -> float:
    tool = toolset.find(reference.tool)
    expected, actual = dict(reference.arguments), dict(call.arguments or {})
    if tool is None:
        return argument_score(expected, actual, {})
    for name in tool.bound:  # bound arguments do not depend on the policy
        expected.pop(name, None)
        actual.pop(name, None)
    for name in free_form_arguments(tool) & expected.keys() & actual.keys():
        actual[name] = expected[name] if _means_the_same(reference, call, name) else _DIFFERENT
    return argument_score(expected, actual, tool.parameters)


def _means_the_same(reference: ReferenceCall, call: PolicyCall, name: str) -> bool:
    """Whether an argument in a language has the reference's meaning: by the results; by the spelling if none is known."""
    if call.failed or reference.returned:
        return not call.failed and call.returned == reference.returned
    wanted, written = reference.arguments[name], (call.arguments or {}).get(name)
    return same_code(wanted, written) if isinstance(wanted, str) and isinstance(written, str) else wanted == written
