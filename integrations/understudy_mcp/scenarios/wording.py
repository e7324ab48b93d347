"""Words a plan as a user's task, which names the actions by the tools' names and contains all values.

A value that comes from an earlier result is described instead.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import cast

from ..tools.effects import ToolKind, is_verb
from ..tools.toolset import ModelTool
from .harvest import singular, strings_of
from .plans import Plan
from .sampler import DraftCall

MOST_WORDS = 59
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
_ROLES = {
    "source": "from",
    "from": "from",
    "start": "from",
    "target": "to",
    "to": "to",
    "destination": "to",
    "end": "to",
}
_JOINS = ("with", "for", "using")
_PLAIN = re.compile(r"[\w./:@+~^-]+")
_SAFE = re.compile(r"[A-Za-z][A-Za-z0-9 ,'/-]*")


def task_of(plan: Plan, asks: Sequence[str], rng: random.Random) -> str:
    """Word a plan as a task. `asks` has the names of the values to report; "" asks for the whole result."""
    clauses = [
        _clause(draft, rng, _linked(plan) if plan.link is not None and number == len(plan.drafts) - 1 else None)
        for number, draft in enumerate(plan.drafts)
    ]
    frames = {1: _FRAMES, 2: _PAIRS, 3: _TRIPLES}[len(clauses)]
    words = {f"c{number}": clause for number, clause in enumerate(clauses, 1)}
    words |= {name.upper(): _capital(clause) for name, clause in words.items()}
    text = rng.choice(frames).format(c=clauses[0], C=_capital(clauses[0]), **words)
    names = list(dict.fromkeys(name for name in asks if name))
    if names:
        return f"{text} {rng.choice(_ASKS).format(key=' and the '.join(names))}"
    return f"{text} {rng.choice(_RESULTS)}" if asks else text


def tells_its_calls(task: str, plan: Plan) -> bool:
    """Whether the task contains every string argument, except the one that comes from an earlier result."""
    hidden = str(plan.link.pick.value) if plan.link is not None else None
    texts = (text for draft in plan.drafts for text in strings_of(draft.arguments) if text != hidden)
    return all(text in task for text in texts) and (hidden is None or hidden not in task)


def actions(tool: ModelTool) -> list[str]:
    """Imperative phrases for the tool's action, from its name and, if it contains the name's words, its description."""
    words = spaced(tool.name).split()
    reads = tool.tool.kind is ToolKind.READ
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


def spaced(name: str) -> str:
    """A name as lower-case words: `entityNames`, `source_timezone` -> "entity names", "source timezone"."""
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return " ".join(re.findall(r"[A-Za-z0-9]+", text)).lower() or "tool"


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


def _clause(draft: DraftCall, rng: random.Random, linked: tuple[str, str] | None) -> str:
    action = rng.choice(actions(draft.tool))
    arguments = dict(draft.arguments)
    parts = _parts(arguments, rng, linked)
    return f"{action} {parts}".strip()


def _parts(arguments: Mapping[str, object], rng: random.Random, linked: tuple[str, str] | None) -> str:
    """The arguments as text: `with time 16:30 and zone UTC`, or with roles: `from A to B with time 16:30`."""
    values = {name: f"{spaced(name)} {shown(value)}" for name, value in arguments.items()}
    if linked is not None:
        values[linked[0]] = linked[1]
    roles = {name: role for name in arguments if (role := _ROLES.get(spaced(name).split()[0]))}
    by_role = len(roles) > 1 and len(set(roles.values())) == len(roles) and linked is None and rng.random() < 0.5
    front = [f"{roles[name]} {shown(arguments[name])}" for name in roles] if by_role else []
    rest = [text for name, text in values.items() if not (by_role and name in roles)]
    listed = rest[0] if len(rest) == 1 else f"{', '.join(rest[:-1])} and {rest[-1]}" if rest else ""
    return " ".join([*front, *([rng.choice(_JOINS), listed] if listed else [])])


def _linked(plan: Plan) -> tuple[str, str]:
    """The name of the argument that comes from an earlier result, and its description."""
    link = plan.link
    assert link is not None
    one = " one" if link.words[-1].endswith("ed") else ""
    which = f"{'first ' if link.first else ''}{' '.join(dict.fromkeys(link.words))}{one}"
    return link.pick.slot.argument, f"the {which} from the answer as {spaced(link.pick.slot.path.rpartition('.')[2])}"


def _described(tool: ModelTool, words: list[str]) -> str | None:
    """The first clause of the description as an imperative, if it is plain text and has all words of the name."""
    first = re.split(r"[.:;(\n]|, | such as ", tool.tool.description.strip(), maxsplit=1)[0].strip()
    spoken = first.split()
    if not 2 <= len(spoken) <= 12 or not _SAFE.fullmatch(first):
        return None
    singular_words = {singular(word.lower()) for word in spoken}
    own = words if is_verb(words[0]) or len(words) == 1 else words[1:]  # `git_log`: the server's name is not needed
    needed = {singular(word) for word in own if word not in ("get", "the")}
    stems = singular_words | {re.sub(r"(e?s|ing)$", "", word) for word in singular_words}
    if not needed <= stems | {f"{stem}e" for stem in stems}:
        return None
    verb = spoken[0].lower()
    base = next((form for form in (verb, verb.removesuffix("s"), verb.removesuffix("es")) if is_verb(form)), None)
    return None if base is None else " ".join([base, *spoken[1:]])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def is_short(task: str) -> bool:
    """Whether a task has at most MOST_WORDS words, which a small policy can read."""
    return len(task.split()) <= MOST_WORDS
