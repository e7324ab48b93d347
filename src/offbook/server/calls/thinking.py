"""Whether a model thinks: the spellings of the APIs, as variables of the base's chat template.

Where the template has no variable for thinking, the options are dropped and said once: a program that was written for a model
that thinks must not end on them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import cast

from offbook.base.types import Json

logger = logging.getLogger(__name__)

EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
"""The values of `reasoning_effort` that vLLM takes."""
SPELLINGS = ("reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_budget")
"""Fields of a request: OpenAI's, OpenRouter's, Anthropic's and DeepSeek's, and two of DashScope's."""
_SWITCHES = ("enable_thinking", "thinking")
"""The template's variables for thinking or not, by family."""
_EFFORT = "reasoning_effort"
"""The template's variable for how much, and vLLM's field."""
_BUDGET = "thinking_token_budget"
_VARIABLES = "chat_template_kwargs"


def in_template(payload: dict[str, Json], template: frozenset[str] | None, *, budgets: bool) -> dict[str, Json]:
    """The payload with its thinking options as far as the template has variables for them.

    `template`: the words of the base's chat templates; None if they are not known, so that all variables are sent.
    `budgets`: whether the engine ends a thought after `thinking_token_budget` tokens.
    """
    own = cast(dict[str, Json], payload.get(_VARIABLES) or {})
    options = {name: payload[name] for name in SPELLINGS if payload.get(name) is not None}
    dropped = [_BUDGET] if payload.get(_BUDGET) is not None and not budgets else []
    switched = [name for name in _SWITCHES if name in own]
    if not (options or dropped or switched):
        return payload
    sent = {name: value for name, value in payload.items() if name not in SPELLINGS and name not in dropped}
    known = {name: value for name, value in _variables(options, own).items() if template is None or name in template}
    if not known:
        dropped += [*options, *switched]
    for name in dropped:
        _tell(name)
    if known | own:
        sent[_VARIABLES] = known | own
    if known.get(_EFFORT) is not None:
        sent[_EFFORT] = known[_EFFORT]
    if _fields(options, "reasoning").get("exclude") is True:
        sent.setdefault("include_reasoning", False)
    return sent


def _variables(options: Mapping[str, Json], own: Mapping[str, Json]) -> dict[str, Json]:
    """The template's variables that the options mean. The client's own variables go first."""
    effort = options.get("reasoning_effort") or _fields(options, "reasoning").get("effort")
    effort = effort if isinstance(effort, str) and effort in EFFORTS else None
    kind, budget = _fields(options, "thinking").get("type"), options.get("thinking_budget")
    spoken: list[Json] = [
        *(own.get(name) for name in _SWITCHES),
        options.get("enable_thinking"),
        options.get("thinking") if kind is None else kind != "disabled",
        None if budget is None else budget != 0,
        _fields(options, "reasoning").get("enabled"),
        None if effort is None else effort != "none",
    ]
    on = next((value for value in spoken if isinstance(value, bool)), None)
    return (dict.fromkeys(_SWITCHES, on) if on is not None else {}) | ({_EFFORT: effort} if effort else {})


def _fields(options: Mapping[str, Json], name: str) -> dict[str, Json]:
    value = options.get(name)
    return cast(dict[str, Json], value) if isinstance(value, dict) else {}


@cache
def _tell(name: str) -> None:
    logger.warning("%s has no effect: neither the base's chat template nor its engine has such an option", name)
