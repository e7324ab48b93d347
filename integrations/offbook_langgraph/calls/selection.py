"""Selections of an app's calls: by node, tag, model name, class, agent, or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias, cast

from langchain_core.language_models import BaseChatModel

from offbook.base.errors import ConfigError
from offbook.base.types import CallOrigin

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
