"""Words a plan as a user's task, which names the actions by the tools' names and contains all values.

A value that comes from an earlier result is described instead.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from anyascii import anyascii

from offbook.base.text import word_list
from offbook_mcp.tools.tool import ToolKind, is_verb, properties_of
from offbook_mcp.tools.toolset import ModelTool

from .harvest import singular, strings_of
from .sampler import DraftCall, Plan

MAX_WORDS = 59
"""Tasks stay below 60 words."""

_FRAMES = (
    "{C}.",
    "Please {c}.",
    "Can you {c}?",
    "Could you {c} for me?",
    "I need you to {c}.",
    "{C}, please.",
    "I want to {c}.",
    "Help me: {c}.",
    "Your task is to {c}.",
    "Next, {c}.",
    "I would like you to {c}.",
    "For my notes, {c}.",
)
_PAIRS = (
    "{C1}. Then {c2}.",
    "First {c1}, then {c2}.",
    "{C1}, and after that {c2}.",
    "Please {c1}. Once that is done, {c2}.",
    "I need two things: {c1}; then {c2}.",
    "Can you {c1}, and then {c2}?",
)
_TRIPLES = (
    "{C1}. Then {c2}. Finally, {c3}.",
    "First {c1}, second {c2}, third {c3}.",
    "Three things: {c1}; {c2}; {c3}.",
)
_ASKS = ("Tell me the {key}.", "What is the {key}?", "Report the {key}.", "I want to know the {key}.")
_RESULTS = (
    "Tell me the result.",
    "What is the result?",
    "Report the result.",
    "Show me the answer.",
    "What do you get?",
)
_ALL_RESULTS = ("Tell me the results.", "What are the results?", "Report all results.", "Show me the answers.")
_ORDINALS = ("first", "second", "third")
_JOINS = ("with", "for", "using")
_PLAIN = re.compile(r"[\w./:@+~^-]+")
_SAFE = re.compile(r"[^\W\d_][\w ,'/-]*")
_EMPTY_WORDS = frozenset(
    word_list(
        """action api arg argument call cmd command data endpoint execute field func function handler input method obj operation
        option param parameter run thing tool value var"""
    )
)
"""Words in the names of tools and arguments that say nothing of what they do."""
_ARTICLES = frozenset(["a", "an", "the"])


def task_of(plan: Plan, asks: Mapping[int, str], rng: random.Random, phrases: Mapping[str, Sequence[str]]) -> str:
    """Word a plan as a task.

    asks: by the number of a call, the name of the value to report of it; "" asks for the whole result. phrases: the tools'
    actions, see `phrases_of`.
    """
    clauses = [
        _clause(
            draft,
            rng.choice(phrases[draft.tool.name]),
            rng,
            _linked(plan) if plan.link is not None and number == len(plan.drafts) - 1 else None,
        )
        for number, draft in enumerate(plan.drafts)
    ]
    frames = {1: _FRAMES, 2: _PAIRS, 3: _TRIPLES}[len(clauses)]
    words = {f"c{number}": clause for number, clause in enumerate(clauses, 1)}
    words |= {name.upper(): _capital(clause) for name, clause in words.items()}
    text = rng.choice(frames).format(c=clauses[0], C=_capital(clauses[0]), **words)
    if key := _requested(plan, {number: name for number, name in asks.items() if name}):
        return f"{text} {rng.choice(_ASKS).format(key=key)}"
    return f"{text} {rng.choice(_ALL_RESULTS if len(asks) > 1 else _RESULTS)}" if asks else text


def _requested(plan: Plan, names: Mapping[int, str]) -> str:
    """The values to report, and of which calls they are if there are several: `name from each answer`."""
    if not names or len(plan.drafts) == 1:
        return "".join(names.values())
    if plan.link is not None:
        return f"{names[max(names)]} from the last answer"
    if len(names) == len(plan.drafts) and len(set(names.values())) == 1:
        return f"{names[0]} from each answer"
    return " and the ".join(f"{name} from the {_ORDINALS[number]} answer" for number, name in names.items())


def tells_its_calls(task: str, plan: Plan) -> bool:
    """Whether the task contains every string argument, except the one that comes from an earlier result."""
    hidden = str(plan.link.pick.value) if plan.link is not None else None
    texts = [text for draft in plan.drafts for text in strings_of(draft.arguments) if text != hidden]
    return all(text in task for text in texts) and (hidden is None or hidden not in task)


def phrases_of(tools: Sequence[ModelTool]) -> dict[str, list[str]]:
    """Imperative phrases for each tool, by its name, of which none means another tool too."""
    phrases = {tool.name: actions(tool) for tool in tools}
    counts = Counter(key for own in phrases.values() for key in {_meaning(phrase) for phrase in own})
    unique: dict[str, list[str]] = {}
    for tool in tools:
        own = [phrase for phrase in phrases[tool.name] if counts[_meaning(phrase)] == 1]
        alike = [other for other in tools if other is not tool and other.tool.name == tool.tool.name]
        if alike and tool.tool.server not in {other.tool.server for other in alike}:
            own = [f"{phrase} on the server {tool.tool.server}" for phrase in phrases[tool.name]]
        unique[tool.name] = own or [f"use the tool {tool.name}"]
    return unique


def _meaning(phrase: str) -> frozenset[str]:
    return frozenset(singular(word) for word in phrase.lower().split() if word not in _ARTICLES)


def actions(tool: ModelTool) -> list[str]:
    """Imperative phrases for the tool's action, from its name and, if it contains the name's words, its description.

    If the name says nothing, or is in an alphabet that other words are not in, from the description alone.
    """
    words = spaced(tool.tool.name).split()
    reads = tool.tool.kind is ToolKind.READ
    if says_nothing(tool.tool.name) and (described := _described(tool, [])):
        return [described]
    if is_verb(words[0]):
        phrases = [" ".join(words)]
    elif len(words) > 2 and is_verb(words[1]) and not reads:
        phrases = [f"{' '.join(words[1:])} in {words[0]}"]
    elif len(words) > 1 and is_verb(words[1]):
        phrases = [f"run {' '.join(words)}"]
    else:
        phrases = [f"{verb} the {' '.join(words)}" for verb in (["show", "get"] if reads else ["run"])]
    described = _described(tool, words)
    return [*phrases, described] if described else phrases


def says_nothing(name: str) -> bool:
    """Whether a name has only words such as `tool`, `arg1` or `x`, or is not in Latin letters."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name))
    return all(word.lower() in _EMPTY_WORDS or len(word) < 3 or anyascii(word[0]) != word[0] for word in words)


def spaced(name: str) -> str:
    """A name as lower-case words: `entityNames`, `source_timezone` -> "entity names", "source timezone"."""
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return " ".join(re.findall(r"[^\W_]+", text)).lower() or "tool"


def shown(value: object) -> str:
    """A value as it is written in a task: strings verbatim, quoted if they have more than one word."""
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value[-1] not in ".:" else _quoted(value)
    if isinstance(value, list | tuple):
        items = [shown(item) for item in cast(Sequence[object], value)]
        return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"
    if isinstance(value, Mapping):
        named = cast(Mapping[str, object], value)
        return ", ".join(f"{spaced(name)} {shown(item)}" for name, item in named.items()) or "none"
    return json.dumps(value)


def _quoted(text: str) -> str:
    return f'"{text}"' if '"' not in text else f"'{text}'"


def _clause(draft: DraftCall, action: str, rng: random.Random, linked: tuple[str, str] | None) -> str:
    return f"{action} {_parts(draft, rng, linked)}".strip()


def _label(name: str, tool: ModelTool) -> str:
    """An argument's name as words; if it says nothing, the begin of its description."""
    about = str(properties_of(tool.parameters).get(name, {}).get("description", ""))
    words = re.split(r"[.:;(,\n]| such as ", about.strip(), maxsplit=1)[0].split()
    words = words[1:] if words and words[0].lower() in _ARTICLES else words
    words = [words[0].lower() if words[0].istitle() else words[0], *words[1:]] if words else []
    usable = 0 < len(words) <= 8 and _SAFE.fullmatch(" ".join(words)) is not None
    return " ".join(words) if usable and says_nothing(name) else spaced(name)


def _parts(draft: DraftCall, rng: random.Random, linked: tuple[str, str] | None) -> str:
    """The arguments as text: `with time 16:30 and zone UTC`."""
    values = {name: f"{_label(name, draft.tool)} {shown(value)}" for name, value in draft.arguments.items()}
    if linked is not None:
        values[linked[0]] = linked[1]
    *others, last = list(values.values()) or [""]
    return f"{rng.choice(_JOINS)} {', '.join(others)} and {last}" if others else last and f"{rng.choice(_JOINS)} {last}"


def _linked(plan: Plan) -> tuple[str, str]:
    """The name of the argument that comes from an earlier result, and its description."""
    link = plan.link
    assert link is not None
    one = " one" if link.words[-1].endswith("ed") else ""
    which = f"{'first ' if link.first else ''}{' '.join(dict.fromkeys(link.words))}{one}"
    return link.pick.slot.argument, f"the {which} from the answer as {spaced(link.pick.slot.path.rpartition('.')[2])}"


def _described(tool: ModelTool, words: list[str]) -> str | None:
    """The first clause of the description as an imperative, if it is plain text and has all these words of the name."""
    first = re.split(r"[.:;(。\n]|, | such as ", tool.tool.description.strip(), maxsplit=1)[0].strip()
    spoken = first.split()
    if not words and first and not first.isascii() and len(first) <= 60 and first.isprintable():
        return first
    if not 2 <= len(spoken) <= 12 or not _SAFE.fullmatch(first):
        return None
    singular_words = {singular(word.lower()) for word in spoken}
    own = (
        words if not words or is_verb(words[0]) or len(words) == 1 else words[1:]
    )  # `git_log`: the server's name is not needed
    needed = {singular(word) for word in own if word not in ("get", "the")}
    stems = singular_words | {re.sub(r"(e?s|ing)$", "", word) for word in singular_words}
    if not needed <= stems | {f"{stem}e" for stem in stems}:
        return None
    verb = spoken[0].lower()
    base = next((form for form in (verb, verb.removesuffix("s"), verb.removesuffix("es")) if is_verb(form)), None)
    if base is None and not words and spoken[0].lower() in _ARTICLES:  # "The price of a product."
        return f"get {spoken[0].lower()} {' '.join(spoken[1:])}"
    return None if base is None else " ".join([base, *spoken[1:]])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def is_short(task: str) -> bool:
    """Whether a task has at most MAX_WORDS words, which a small policy can read."""
    return len(task.split()) <= MAX_WORDS
