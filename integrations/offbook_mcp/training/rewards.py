"""The reward of a rollout on a server's tools, from the policy's calls, compared by meaning, and its answer. Pure functions.

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
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from offbook import RewardResult
from offbook.base.text import word_list
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ReferenceCall
from offbook_mcp.tools.result_values import digest_of
from offbook_mcp.tools.rollout_tools import RolloutTools, ToolResult
from offbook_mcp.tools.tool import Schema, ToolKind, properties_of, words_of_name
from offbook_mcp.tools.toolset import ModelTool, Toolset

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


_PATH_NAME = re.compile(r"(^|_|-)(path|paths|file|files|filename|dir|directory|folder|source|destination)s?$", re.I)
_TIME = re.compile(r"(\d):(\d\d(?::\d\d)?)")
_LITERAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_EXACT = 1e-9

WRONG_TYPE = 0.5
"""Score of an argument with the right value in the wrong type, such as `"3"` for 3: some servers reject it."""


def argument_score(expected: Mapping[str, object], actual: Mapping[str, object], parameters: Schema) -> float:
    """The share of equivalent arguments among all arguments of both sides, from 0 to 1.

    1 for equal calls, also without arguments. An argument that equals its default, or an optional one that is null, counts
    as absent.
    """
    expected, actual = spelled_out(expected, parameters), spelled_out(actual, parameters)
    names = expected.keys() | actual.keys()
    if not names:
        return 1.0
    schemas = properties_of(parameters)
    scores = [
        value_score(expected[name], actual[name], schemas.get(name, {}), name)
        for name in names
        if name in expected and name in actual
    ]
    return math.fsum(scores) / len(names)


def value_score(expected: object, actual: object, schema: Schema, name: str = "") -> float:
    """1 if both are equivalent, WRONG_TYPE if one is the other as text, else 0."""
    if same_value(expected, actual, schema, name):
        return 1.0
    return WRONG_TYPE if _same_as_text(expected, actual) else 0.0


def same_value(expected: object, actual: object, schema: Schema, name: str = "") -> bool:
    """Whether both values are equivalent.

    Numbers compare by value; text ignores white space; enumerated text ignores case; paths and times of day compare in
    normal form; lists by element, in any order if the schema has uniqueItems; objects by key.
    """
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=_EXACT, abs_tol=_EXACT)
    if isinstance(expected, str) and isinstance(actual, str):
        return _same_text(expected, actual, schema, name)
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        return _same_list(list(cast(list[object], expected)), list(cast(list[object], actual)), schema, name)
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        return argument_score(cast(Mapping[str, object], expected), cast(Mapping[str, object], actual), schema) == 1.0
    return expected is None and actual is None


def spelled_out(arguments: Mapping[str, object], parameters: Schema) -> dict[str, object]:
    """Remove arguments that have the same meaning as leaving them out: defaults, and null for optional ones."""
    schemas = properties_of(parameters)
    listed = parameters.get("required")
    required = cast(list[object], listed) if isinstance(listed, list) else []

    def is_default(value: object, schema: Schema, name: str) -> bool:
        return "default" in schema and same_value(schema["default"], value, {**schema, "default": None}, name)

    return {
        name: value
        for name, value in arguments.items()
        if name in required or not (value is None or is_default(value, schemas.get(name, {}), name))
    }


def _same_text(expected: str, actual: str, schema: Schema, name: str) -> bool:
    expected, actual = _squeezed(expected), _squeezed(actual)
    if "enum" in schema:
        expected, actual = expected.casefold(), actual.casefold()
    if expected == actual:
        return True
    if _is_path(name, expected):
        return normal_path(expected) == normal_path(actual)
    return _normal_time(expected) == _normal_time(actual)


def _same_list(expected: list[object], actual: list[object], schema: Schema, name: str) -> bool:
    if len(expected) != len(actual):
        return False
    items = schema.get("items")
    inner = cast(Schema, items) if isinstance(items, dict) else {}
    if not schema.get("uniqueItems"):
        return all(same_value(*pair, inner, name) for pair in zip(expected, actual, strict=True))
    left = list(actual)
    for value in expected:
        match = next((index for index, other in enumerate(left) if same_value(value, other, inner, name)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _squeezed(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _is_path(name: str, value: str) -> bool:
    return "://" not in value and (_PATH_NAME.search(name) is not None or value.startswith(("/", "./", "../")))


def normal_path(path: str) -> str:
    """Normalise a path: `/a//b/./c/` becomes `/a/b/c`, backslashes become `/`, and the empty path `.`."""
    return posixpath.normpath(path.replace("\\", "/")) if path else "."


def _normal_time(text: str) -> str:
    match = _TIME.fullmatch(text)
    return f"0{match[1]}:{match[2]}" if match else text


def _same_as_text(expected: object, actual: object) -> bool:
    """Whether one value is the text form of the other, a number or a boolean."""
    text, value = (expected, actual) if isinstance(expected, str) else (actual, expected)
    if not isinstance(text, str) or isinstance(value, str):
        return False
    if isinstance(value, bool):
        return text.strip().casefold() == str(value).casefold()
    spelled = _LITERAL.fullmatch(text.strip())
    return isinstance(value, int | float) and spelled is not None and same_value(float(text), value, {})


_LANGUAGES = frozenset(
    word_list(
        """code command cypher equation expression formula graphql jmespath jq jsonpath program query regex regexp script
    selector sparql sql statement where xpath"""
    )
)
_PLURALS = {"queries": "query", "statements": "statement", "expressions": "expression", "commands": "command"}
_TEXTS = frozenset(["string", "str", "text", "snippet", "clause", "body"])
"""Last words after the name of a language, as in `query_string`."""
_OF_CODE = frozenset(["python", "source", "shell", "javascript", "js", "r", "sql", "program", "script"])
"""Words before `code` that make it a program: a `currency_code` is none."""
_DESCRIBED = re.compile(
    r"\b(sql|cypher|sparql|graphql|jq|jmespath|jsonpath|xpath|regex|regular expression|python code|source code"
    r"|(?:math\w*|arithmetic|formula|boolean) expression|expression to evaluate)\b",
    re.IGNORECASE,
)
_TOKENS = re.compile(r"'[^']*'|\"[^\"]*\"|\w+|[^\w\s]")


def free_form_arguments(tool: ModelTool) -> frozenset[str]:
    """The names of the tool's arguments that are written in a language, by their names and descriptions."""
    return frozenset(name for name, schema in properties_of(tool.parameters).items() if _is_free_form(name, schema))


def result_digest(tools: RolloutTools, tool: ModelTool, result: ToolResult) -> str:
    """A hash of what a call returned; "" if it failed, may write, or has no arguments in a language.

    The text that a write returns, such as `1 row`, does not show what was written.
    """
    if result.is_error or tool.tool.kind is not ToolKind.READ or not free_form_arguments(tool):
        return ""
    return digest_of(tools.neutral(result.full_text))


def same_code(expected: str, actual: str) -> bool:
    """Whether two texts in a language differ only in white space, in the case of words, and in a final semicolon."""
    return _tokens(expected) == _tokens(actual)


def _is_free_form(name: str, schema: Schema) -> bool:
    items = schema.get("items")
    kind = cast(Schema, items).get("type") if isinstance(items, dict) else schema.get("type", "string")
    if kind != "string" or "enum" in schema or "format" in schema:
        return False
    words = [_PLURALS.get(word, word) for word in words_of_name(name)]
    if len(words) > 1 and words[-1] in _TEXTS:
        words.pop()
    if words and words[-1] in _LANGUAGES:
        return words[-1] != "code" or len(words) == 1 or words[-2] in _OF_CODE
    return _DESCRIBED.search(str(schema.get("description", ""))) is not None


def _tokens(text: str) -> list[str]:
    tokens = [token if token[0] in "'\"" else token.casefold() for token in _TOKENS.findall(text)]
    return tokens[:-1] if tokens[-1:] == [";"] else tokens


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
