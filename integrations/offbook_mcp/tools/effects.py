"""Whether a call of a tool reads, writes or deletes: from annotations, else from the tool's name, description and arguments.

A tool counts as reading only where something says so. Words have a place: the verb of a name is its first known one, so
that `get_order` reads and `cancel_order` writes; `order`, `post` or `schedule` may be either, and the description decides.
What nothing tells is UNKNOWN: a person has to say so before it is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import cast

from mcp import types


class ToolKind(StrEnum):
    """The effect of a tool's call."""

    READ = "read"  # changes nothing
    WRITE = "write"  # adds or changes something
    DELETE = "delete"  # destroys or overwrites something
    UNKNOWN = "unknown"  # may do so: nothing tells


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DELETING = _words("clear delete destroy drop erase kill purge remove reset revoke rm truncate uninstall wipe")
_WRITING = _words(
    """accept acknowledge activate abort add adjust append apply approve assign attach authorize ban buy cancel checkout click
    configure connect copy create deactivate disable disconnect dismiss drag edit enable enqueue fill grant insert install
    invite join kick leave make manage mkdir modify move mute overwrite patch pause pay press provision publish purchase push
    put reassign rebase refund register rename reopen reorder replace reply reschedule reserve resize restart restore resume retry rollback
    rotate save send set sign stage start stop store submit subscribe suspend swap switch sync terminate toggle transition
    trigger unassign unblock undo unlock unpin unsubscribe update upgrade upload upsert withdraw write"""
)
_READING = _words(
    """aggregate analyse analyze browse calculate check classify compare compute convert count decode describe detect diff
    discover display distinguish divide echo encode enumerate estimate explain explore extract fetch filter find forecast get
    give grep help identify inspect is list locate look lookup ls measure multiply peek ping predict preview query rank read
    recall recommend retrieve return scrape search show stat subtract suggest sum summarise summarize tell tokenize translate
    validate verify view"""
)
_NOUNS = _words(
    """batch bid bill block branch bulk cache chart chat design email graph invoice issue label like link lock mail map mark
    message note pin plan queue record release report request review sample score snapshot star stream tag test ticket trace
    track trade type vote"""
)
_EITHER = _NOUNS | _words(
    """archive ask backup book build call capture change charge clone close comment commit compile crawl deploy download draw
    dump evaluate execute export follow fork format generate import load log merge monitor navigate open order play plot post
    print process render resolve run schedule select share ship simulate sort take transfer transform wait watch"""
)
"""Words that are nouns as well as verbs, and verbs that read in one tool and write in another."""
_ACTING = _words(
    """archive block book change charge close comment commit deploy email follow fork import invoice label link lock log mail
    mark merge note order pin post record release request schedule share ship star tag trade transfer vote"""
)
"""Those of _EITHER that change something where they are the verb of a sentence."""
_FACTS = _words(
    """age average balance count date details distance forecast history hours info information interest length list median
    metadata name names percentage population price prices rate rates schema size stats statistics status sum summary
    temperature time total version weather"""
)
"""Nouns that say what a tool returns, as in `stock_price`."""
_CODE = _words("code command cypher expression query script sql statement")
"""Arguments that may hold a program."""
_RUNNING = _words("aggregate evaluate execute query run")
_DETERMINERS = _words("a all an another any each existing multiple new one or several some specific the this your")
_INTERROGATIVES = _words("all current how latest number the total what when where whether which who whose why true")
_PREPOSITIONS = _words("about at between for in of on per")
_TOGETHER = _words("also and or then")
_LEAD = re.compile(
    r"(a |this |the )?(tool|function|endpoint|method|use (this|it)( tool)?|used|can be used)\b( (is|can be) used)?( that| which)?"
    r"( will| can)?( (allows?|lets|helps?) (you|users?|agents?|the model))?( to| for)? |(allows?|lets|helps?)( you| users?)?( to)? "
)
_READ_ONLY = re.compile(
    r"read[- ]only|does(n't| not) (change|modify|write|alter)|without (changing|modifying)|no side[- ]effects"
)
_NOT_READ_ONLY = re.compile(r"\bnot (a )?read[- ]only")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def tool_kind(
    name: str,
    hints: types.ToolAnnotations | None = None,
    description: str = "",
    properties: Mapping[str, object] | None = None,
) -> ToolKind:
    """Determine a tool's kind from its annotations, else from name, description and the schemas of its arguments.

    `readOnlyHint` separates READ from the rest, and `destructiveHint: true` then means DELETE. `destructiveHint: true`
    without `readOnlyHint` means DELETE too.
    """
    said = _of_name(words_of_name(name))
    if hints is not None and (hints.read_only_hint is not None or hints.destructive_hint):
        if hints.read_only_hint:
            return ToolKind.READ
        return ToolKind.DELETE if hints.destructive_hint or said is ToolKind.DELETE else ToolKind.WRITE
    return _combined(words_of_name(name), said, description.lower(), properties or {})


def is_verb(word: str) -> bool:
    """Whether a word of a tool's name is a known verb."""
    return word not in _NOUNS and _is_known(word)


def _is_known(word: str) -> bool:
    return word in _READING or word in _WRITING or word in _DELETING or word in _EITHER


def words_of_name(name: str) -> list[str]:
    """The lower-case words of a name in any of the usual spellings."""
    return re.findall(r"[a-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).lower())


def _combined(name: list[str], said: ToolKind | None, description: str, properties: Mapping[str, object]) -> ToolKind:
    described = _of_description(description, name)
    declared = bool(_READ_ONLY.search(description)) and not _NOT_READ_ONLY.search(description)
    if declared and said in (None, ToolKind.READ):
        return ToolKind.READ
    if name[:1] == ["add"] and len(name) == 1 and _only_numbers(properties):
        return ToolKind.READ  # a sum
    if any(set(words_of_name(argument)) & _CODE for argument in properties) and _runs(name, description):
        return ToolKind.UNKNOWN if said in (None, ToolKind.READ) else said
    if said is None:
        quantity = bool(name) and name[-1] in _FACTS and name[0] not in _EITHER
        does = _WORD.findall(description)[:2]
        named = bool(does) and any(form in name for form in _base_forms(does[0]))
        commanded = not does or (named and does[1:2] != [] and does[1] in _DETERMINERS)  # "Teleport the robot"
        pure = not commanded and _only_numbers(properties) and not _EITHER.intersection(name)
        return described or (ToolKind.READ if quantity or pure else ToolKind.UNKNOWN)
    if described is None or (said is ToolKind.READ) == (described is ToolKind.READ):
        return said
    return ToolKind.UNKNOWN


def _of_name(words: list[str]) -> ToolKind | None:
    """What the verb of a name says; None where it says nothing.

    The verb is the first known word. After a reading one, a writing one counts where it is joined on (`get_or_create`),
    or ends the name (`list_add`), which leaves it open.
    """
    first = next((place for place, word in enumerate(words) if _is_known(word)), None)
    if first is None:
        return None
    kind, rest = _of_verb(words[first]), words[first + 1 :]
    if kind is ToolKind.READ:
        joined = [word for before, word in pairwise(rest) if before in _TOGETHER]
        if (writes := next((_of_verb(word) for word in joined if _changes(word)), None)) is not None:
            return writes
        return None if rest and _changes(rest[-1]) else kind
    if kind is None and rest:
        noun = words[first] not in _ACTING or (
            len(rest) == 1 and rest[0] not in _FACTS
        )  # `order_search`, no `archive_list`
        last = _of_verb(rest[-1]) if noun else None
        return next((_of_verb(word) for word in rest if _changes(word)), last)
    return kind


def _of_verb(word: str) -> ToolKind | None:
    if word in _DELETING:
        return ToolKind.DELETE
    if word in _WRITING:
        return ToolKind.WRITE
    return ToolKind.READ if word in _READING else None


def _changes(word: str) -> bool:
    return word in _WRITING or word in _DELETING


def _of_description(description: str, name: list[str]) -> ToolKind | None:
    """What the first sentence says, by its verb, or as a noun phrase such as "the status of an order"; None for nothing."""
    text = re.sub(r"\s+", " ", description.strip())
    while (lead := _LEAD.match(text)) is not None:
        text = text[lead.end() :]
    words = _WORD.findall(re.split(r"[.:;!(\n]| - ", text, maxsplit=1)[0])
    while words and (words[0].endswith("ly") or words[0] == "to"):
        words = words[1:]
    if not words:
        return None
    verb = next((form for form in _base_forms(words[0]) if _is_known(form)), None)
    kind = None if verb is None else _of_verb(verb)
    if kind is None and verb in _ACTING and words[1:2] and words[1] in _DETERMINERS:
        return ToolKind.WRITE
    if kind is None and (verb is None or words[0] in name) and _is_noun_phrase(words, name):
        kind = ToolKind.READ
    if kind is not ToolKind.READ:
        return kind
    inflection = words[0][len(verb) :] if verb is not None and words[0].startswith(verb) else "s"
    joined = [after for before, after in pairwise(words) if before in _TOGETHER]
    changes = [form for word in joined for form in _base_forms(word) if _changes(form) and word == form + inflection]
    return next((_of_verb(form) for form in changes), kind)


def _is_noun_phrase(words: list[str], name: list[str]) -> bool:
    """Whether a sentence begins as what a tool returns: "how many ...", "the ...", or the tool's own noun, "weather for"."""
    if words[0] in _INTERROGATIVES or words[0] in _FACTS:
        return not any(_changes(form) for word in words for form in _base_forms(word) if form != word)
    own = next((place for place, word in enumerate(words) if word not in name), len(words))
    return 0 < own < len(words) and words[own] in _PREPOSITIONS and words[0] not in _EITHER


def _base_forms(word: str) -> Iterator[str]:
    """The possible base forms of a verb: `retrieving` -> retrieving, retriev, retrieve."""
    yield word
    if word.endswith("ies"):
        yield word[:-3] + "y"
    for ending in ("es", "s", "ing", "d", "ed"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            yield word[: -len(ending)]
            yield word[: -len(ending)] + "e"


def _runs(name: list[str], description: str) -> bool:
    """Whether a tool runs what it is given."""
    begin = _WORD.findall(description)[:3]
    return not _RUNNING.isdisjoint(name) or any(form in _RUNNING for word in begin for form in _base_forms(word))


def _only_numbers(properties: Mapping[str, object]) -> bool:
    """Whether all arguments are quantities, so that nothing is named that could be changed."""
    kinds = [
        cast(dict[str, object], schema).get("type") if isinstance(schema, dict) else None
        for schema in properties.values()
    ]
    named = any(words_of_name(argument)[-1:] in (["id"], ["number"], ["index"]) for argument in properties)
    return len(kinds) > 1 and not named and all(kind in ("number", "integer") for kind in kinds)
