"""The origin of a chat model call in the app (node, agent, model, tags): counts of calls by origin, selections by it, and warnings of
calls that may be a judge's."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias, cast

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables.config import var_child_runnable_config

from offbook.base.errors import ConfigError
from offbook.base.types import CallOrigin

from .run_tree import AGENT_NAME, UNKNOWN_LINE

OWN_MODEL = "the app's own model"
"""Target of a call that no selection matches."""
EXCLUDED = "the app's own model, by exclude="
"""Target of a call that `exclude=` names."""
JUDGED = "the app's own model, as a judge"
"""Target of a call that an evaluation package makes."""
SHOWN = 20
"""The most distinct origins that a message lists."""
_counting = threading.Lock()
"""Of all counts, since those of a rollout are pickled."""


class OriginCounts:
    """Counts calls by target and origin. Thread-safe: an app calls its models from several threads."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, target: str, origin: CallOrigin) -> None:
        """Count a call that goes to `target`: a model's name, OWN_MODEL or EXCLUDED."""
        with _counting:
            self._counts[target, described(origin)] += 1

    def merge(self, other: OriginCounts) -> None:
        """Add the counts of `other`."""
        with _counting:
            self._counts += other._counts

    def to(self, target: str) -> int:
        """Number of calls that went to `target`."""
        with _counting:
            return sum(count for (name, _), count in self._counts.items() if name == target)

    @property
    def total(self) -> int:
        """Number of all calls."""
        with _counting:
            return self._counts.total()

    def lines(self, target: str | None = None) -> str:
        """Distinct origins with their counts, one per line, the most frequent first. `target` limits them to its calls."""
        with _counting:
            counts = self._counts.most_common()
        lines = [
            f"  {count} x {origin}" + (f" -> {name}" if target is None else "")
            for (name, origin), count in counts
            if target in (None, name)
        ]
        more = [f"  and {len(lines) - SHOWN} more origins"] if len(lines) > SHOWN else []
        return "\n".join([*lines[:SHOWN], *more])


def described(origin: CallOrigin) -> str:
    """Describe an origin by a selection's keys: `agent 'planner', node 'model', model 'gpt-4.1', kind 'ChatOpenAI'`."""
    parts = {"agent": origin.agent, "node": origin.node, "model": origin.model, "kind": origin.kind}
    known = [f"{name} {value!r}" for name, value in parts.items() if value is not None]
    return ", ".join([*known, *(f"tag {tag!r}" for tag in origin.tags)]) or "nothing known of it"


class CallLabels(NamedTuple):
    """Tags, metadata and callbacks that an app gives with a call."""

    tags: list[str] | None = None
    metadata: Mapping[str, Any] | None = None
    callbacks: object = None


def call_origin(original: BaseChatModel, labels: CallLabels, agent: str | None) -> CallOrigin:
    """The origin of a call, from the config, the callbacks and the call's own metadata.

    All three are needed, since metadata passed with the call hides the inherited metadata. `agent` is the name in the run
    tree.
    """
    config = var_child_runnable_config.get() or {}
    callbacks = labels.callbacks
    inherited = callbacks.inheritable_metadata if isinstance(callbacks, BaseCallbackManager) else {}
    facts: dict[str, Any] = {**(config.get("metadata") or {}), **inherited, **(labels.metadata or {})}
    return origin_of(original, facts, config.get("configurable") or {}, labels.tags, agent)


def origin_of(
    original: BaseChatModel | None,
    facts: Mapping[str, Any],
    configurable: Mapping[str, Any],
    tags: list[str] | None,
    agent: str | None,
) -> CallOrigin:
    """The origin from a call's metadata, completed by LangGraph's `configurable` keys.

    `agent`, the name in the run tree, overrides the metadata's: an agent without LangChain's key inherits its parent's.
    """
    namespace = facts.get("langgraph_checkpoint_ns") or configurable.get("checkpoint_ns") or None
    node = facts.get("langgraph_node") or (str(namespace).rsplit("|", 1)[-1].split(":")[0] if namespace else None)
    thread = facts.get("thread_id") or configurable.get("thread_id")
    step: object = facts.get("langgraph_step")
    own: list[str] = (original.tags or []) if original is not None else []
    return CallOrigin(
        node=as_text(node),
        step=step if isinstance(step, int) else None,
        namespace=as_text(namespace),
        agent=agent or as_text(facts.get(AGENT_NAME)),
        thread=as_text(thread),
        model=model_name(original) or as_text(facts.get("ls_model_name")),
        kind=None if original is None else type(original).__name__,
        source=as_text(facts.get("lc_source")),
        tags=tuple(dict.fromkeys(str(tag) for tag in [*(tags or []), *own])),
    )


def as_text(value: object) -> str | None:
    """Convert a metadata value to text: users also store other types under these keys."""
    return None if value is None else str(value)


def model_name(original: BaseChatModel | None) -> str | None:
    """The provider's name of the app's model; None if the class has no such field."""
    name = getattr(original, "model_name", None) or getattr(original, "model", None)
    return None if name is None else str(name)


logger = logging.getLogger("offbook")


@dataclass(frozen=True)
class CapturedCall:
    """A call that the trained model answers without a `select=`, and the line that made it."""

    origin: CallOrigin
    line: str | None

    @property
    def model(self) -> str | None:
        """What the app calls its model."""
        return self.origin.model or self.origin.kind


def unlike_the_others(calls: Sequence[CapturedCall]) -> list[str]:
    """Describes the calls that may be a judge's: outside every node beside calls inside one, or of another model than most."""
    inside = [call for call in calls if call.origin.node is not None]
    usual = Counter(call.model for call in inside or calls).most_common(1)
    described_calls: list[str] = []
    for call in calls:
        alone = bool(inside) and call.origin.node is None
        if alone or call.model != usual[0][0]:
            place = "outside every graph node, " if alone else ""
            described_calls.append(f"{place}{described(call.origin)}, made at {call.line or UNKNOWN_LINE}")
    return described_calls


def warn_unlike(calls: Sequence[CapturedCall]) -> None:
    """Warn of calls of a rollout that may be a judge's, once a process for equal ones."""
    for what, count in Counter(unlike_the_others(calls)).items():
        _warn(what, count)


@functools.cache
def warn_judge(package: str) -> None:
    """Log, once a package, that its calls are not the policy's."""
    logger.warning("calls of %s are a judge's: they stay on the app's own models, and are not captured", package)


_warned: set[str] = set()


def _warn(what: str, count: int) -> None:
    if what not in _warned:
        _warned.add(what)
        logger.warning(
            "the trained model answers %d call%s unlike the app's others in this rollout: %s. If it is a judge's or a simulated "
            "user's, the policy would judge itself: put the call under `with offbook.outside():`, or name it in exclude=, and "
            "its own model answers. If it is the app's, select= says so",
            count,
            "" if count == 1 else "s",
            what,
        )


Selection: TypeAlias = (
    "Callable[[CallOrigin], bool] | type[BaseChatModel] | Mapping[str, str | Sequence[str]] | Sequence[Selection]"
)
"""Selects calls. One of: a function of a call's origin; a chat model class; a mapping such as
`{"node": "plan*", "tag": ["a", "b"]}`, of which every key must match (`*` matches anything); a list of these, of which at
least one must match."""

Predicate = Callable[[CallOrigin, BaseChatModel], bool]
"""Whether a call from this origin, on this chat model of the app, is selected."""

FIELDS = ("node", "tag", "model", "kind", "agent", "source", "namespace", "thread")
"""Keys of a mapping. `kind` is the class name of the chat model; `source` is LangChain's `lc_source`, such as
"summarization"."""


def as_predicate(selection: Selection | None, option: str) -> Predicate | None:
    """Convert a selection to one function; None stays None. Raises ConfigError naming `option`."""
    if selection is None:
        return None
    if isinstance(selection, type):
        if not issubclass(selection, BaseChatModel):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"{option}: {selection.__name__} is not a chat model class")
        wanted = selection
        return lambda origin, original: isinstance(original, wanted)
    if isinstance(selection, Mapping):
        return _by_fields(cast(Mapping[object, object], selection), option)
    if isinstance(selection, Sequence) and not isinstance(selection, str):
        parts = cast("Sequence[Selection]", selection)
        predicates = [as_predicate(part, f"{option}[{index}]") for index, part in enumerate(parts)]
        if not predicates:
            raise ConfigError(f"{option}: the list is empty, so no call is selected; leave it out to select all")
        return lambda origin, original: any(part is not None and part(origin, original) for part in predicates)
    if callable(selection):
        return lambda origin, original: bool(selection(origin))
    raise ConfigError(
        f"{option}: a function of a call's origin, a chat model class, a mapping such as {{'node': 'agent'}}, or a list of "
        f"these is needed, got {selection!r}"
    )


def _by_fields(mapping: Mapping[object, object], option: str) -> Predicate:
    if not mapping:
        raise ConfigError(f"{option}: the mapping is empty; it may name {', '.join(FIELDS)}")
    patterns: dict[str, tuple[str, ...]] = {}
    for name, value in mapping.items():
        if name not in FIELDS:
            raise ConfigError(f"{option}: there is no key {name!r}; it may name {', '.join(FIELDS)}")
        patterns[str(name)] = _patterns(value, f"{option}[{name!r}]")

    def fits(origin: CallOrigin, original: BaseChatModel) -> bool:
        return all(_fits(origin, name, wanted) for name, wanted in patterns.items())

    return fits


def _patterns(value: object, option: str) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else tuple(cast(Sequence[object], value)) if _is_list(value) else ()
    texts = tuple(text for text in values if isinstance(text, str) and text)
    if not texts or len(texts) != len(values):
        raise ConfigError(f"{option}: a text or a list of texts is needed, got {value!r}")
    return texts


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | frozenset | set)


def _fits(origin: CallOrigin, name: str, wanted: tuple[str, ...]) -> bool:
    values = origin.tags if name == "tag" else (getattr(origin, name),)
    return any(value is not None and fnmatchcase(value, pattern) for value in values for pattern in wanted)
