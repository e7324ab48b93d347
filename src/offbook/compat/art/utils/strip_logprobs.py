"""Stands for `art.utils.strip_logprobs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pydantic import BaseModel

KEY = "logprobs"


def strip_logprobs(value: object) -> object:
    """A copy without `logprobs` anywhere inside, to be stored; what is no dict, list, tuple or pydantic model is kept as
    it is. A model keeps its class, with None for its own logprobs."""
    if isinstance(value, BaseModel):
        fields = {name: None if name == KEY else strip_logprobs(field) for name, field in value}
        return value.model_copy(update=fields)
    if isinstance(value, Mapping):
        return {
            name: strip_logprobs(item) for name, item in cast(Mapping[object, object], value).items() if name != KEY
        }
    if isinstance(value, list | tuple):
        items = [strip_logprobs(item) for item in cast("list[object] | tuple[object, ...]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
