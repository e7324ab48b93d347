"""What a scenario is called, and what is asked in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from textwrap import shorten
from typing import cast

from pydantic import BaseModel

from offbook.base.errors import ConfigError

TEXT_KEYS = ("input", "question", "prompt")
_NAMED = 40  # most characters of a scenario's words in its id


def scenario_fields(scenario: object) -> dict[str, object]:
    """The scenario's named values; a string has none. Raises ConfigError for another kind of object."""
    if isinstance(scenario, BaseModel):
        return scenario.model_dump()
    if dataclasses.is_dataclass(scenario) and not isinstance(scenario, type):
        return {field.name: getattr(scenario, field.name) for field in dataclasses.fields(scenario)}
    if isinstance(scenario, Mapping):
        return {str(key): value for key, value in cast(Mapping[object, object], scenario).items()}
    if isinstance(scenario, str):
        return {}
    kind = type(scenario).__name__
    raise ConfigError(f"scenario: a mapping, dataclass, pydantic object or string is needed, got {kind} {scenario!r}")


def scenario_id(scenario: object) -> str:
    """Its `id`, or else its first words and a hash of its content, the same from run to run.

    >>> scenario_id({"question": "Where is box 4821?", "answer": "A7"})
    'where-is-box-4821-972078f8a4'
    """
    own = scenario_fields(scenario).get("id")
    if own is not None and str(own):
        return str(own)
    content = (
        scenario if isinstance(scenario, str) else json.dumps(scenario_fields(scenario), sort_keys=True, default=repr)
    )
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    words = shorten(" ".join(re.findall(r"\w+", _first_words(scenario).lower())), _NAMED, placeholder="")
    return "-".join([*words.split(), digest])


def _first_words(scenario: object) -> str:
    named = scenario_fields(scenario)
    texts = [scenario, *map(named.get, TEXT_KEYS), *named.values()]
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def scenario_text(scenario: object) -> str:
    """What the user says in it: the string itself, or the first of `input`, `question`, `prompt`."""
    if isinstance(scenario, str):
        return scenario
    named = scenario_fields(scenario)
    for key in TEXT_KEYS:
        text = named.get(key)
        if isinstance(text, str):
            return text
    raise ConfigError(
        f"scenario {scenario_id(scenario)!r} has no text under {', '.join(TEXT_KEYS)}; its keys are "
        f"{', '.join(key for key, value in named.items() if value is not None) or '(none)'}: rename one, or pass to_input=(scenario) -> input"
    )
