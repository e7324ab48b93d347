"""Candidates of a comparison: steps of the trained model (`step:12`, `step:newest`), other LLMs by litellm's names, or the
app's own models (`as-is`)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qsl

from offbook.base.errors import ConfigError
from offbook.base.types import Json
from offbook.base.user_values import as_list
from offbook.client.model import Model, TrainableModel
from offbook.llms.llm import Llm
from offbook.llms.options import Price

STEP = re.compile(r"step:(\d+|newest)")
NEWEST = "newest"
AS_IS = "as-is"
PRICES = ("prompt_price", "completion_price")

CandidateLike: TypeAlias = "str | Model[Any] | Llm | Candidate"
"""`step:0`, `step:newest`, `as-is`, `openai/gpt-4.1`, `openai/name?api_base=http://...`, a `offbook.Model`, an `Llm`, or a Candidate."""


@dataclass(frozen=True)
class Candidate:
    """A model that answers the app's calls: `llm`, a step of the trained model (None: the newest), or `as_is`, the models
    that the app calls by itself. `prices`: of these; None: by litellm's table.

    `settings` are those that influence its rollouts.
    """

    name: str
    llm: Llm | None = None
    step: int | None = None
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])
    as_is: bool = False
    prices: Price | None = None

    @property
    def trained(self) -> bool:
        """Whether it is a step of the app's own model."""
        return self.llm is None and not self.as_is

    @property
    def fingerprint(self) -> str:
        """Hash of everything that its rollouts depend on, without API keys: 16 hex digits."""
        text = json.dumps({"name": self.name, "step": self.step, **self.settings}, sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def record_name(self) -> str:
        """The name under which a server stores its rollouts: letters, digits, dots, dashes and underscores."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-._")[:128] or "candidate"


def as_candidates(values: Sequence[CandidateLike]) -> list[Candidate]:
    """Convert a list of candidates. Raises ConfigError, also for names that are not unique."""
    candidates = [as_candidate(candidate) for candidate in as_list(values, "candidates", "candidate")]
    if not candidates:
        raise ConfigError('candidates: a list of at least one is needed, such as ["step:newest", "openai/gpt-4.1"]')
    for kind in ("name", "record_name"):
        names = [getattr(candidate, kind) for candidate in candidates]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"candidates: {repeated[0]!r} appears twice; give one another name, as in openai/name?name=other"
            )
    return candidates


def as_candidate(value: object) -> Candidate:
    """Convert one candidate. Raises ConfigError."""
    if isinstance(value, Candidate):
        return value
    if isinstance(value, Llm):
        return of_llm(value.options.model, value)
    if isinstance(value, TrainableModel):
        raise ConfigError(
            f"candidates: {value.name!r} is trained here: name its steps, step:0, step:12 or step:newest, of the model of "
            "the app that is compared"
        )
    if isinstance(value, Model):
        return _of_model(cast("Model[Any]", value))
    if not isinstance(value, str):
        raise ConfigError(
            f"candidates: a text, offbook.Model or Llm is needed, got {type(value).__name__} {value!r:.100}"
        )
    if value.startswith("step:"):
        match = STEP.fullmatch(value)
        if match is None:
            raise ConfigError(f"candidates: {value!r} is not a step; write step:0, step:12 or step:newest")
        return Candidate(value, step=None if match[1] == NEWEST else int(match[1]))
    return _of_text(value)


def of_llm(name: str, llm: Llm) -> Candidate:
    """A candidate for another LLM, under a name."""
    options = llm.options
    prices = None if options.prices is None else options.prices.model_dump()
    settings = {
        "model": options.model,
        "api_base": options.api_base,
        "parameters": {name: value for name, value in options.litellm_parameters.items() if name != "extra_headers"},
        "prices": prices,
    }
    return Candidate(name, llm, settings=settings)


def _of_model(model: Model[Any]) -> Candidate:
    """A candidate for a `offbook.Model`: at its OpenAI-compatible endpoint; without one, by its name in litellm."""
    name = model.inference_name()
    options: dict[str, Any] = {} if model.inference_api_key is None else {"api_key": model.inference_api_key}
    if model.inference_base_url is not None:
        return of_llm(model.name, Llm(f"openai/{name}", api_base=model.inference_base_url, **options))
    return of_llm(model.name, Llm(name, **options))


def _of_text(text: str) -> Candidate:
    """Parse `MODEL` or `MODEL?option=value&...`. Raises ConfigError.

    Options are `name`, `api_base`, `api_key_variable`, prices in USD per million tokens, limits of the endpoint, and
    litellm's parameters.
    """
    model, mark, query = text.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=False)
    if (mark and not pairs) or len(dict(pairs)) < len(pairs):
        raise ConfigError(f"candidates: {text!r} is not of the form MODEL?option=value&option=value, each option once")
    options: dict[str, Any] = {name: _value(value) for name, value in pairs}
    name = str(options.pop("name", model))
    if "api_key" in options:
        raise ConfigError(
            f"candidates: {model}: write no key there, because it would be recorded: name the variable that has it, api_key_variable=MY_KEY"
        )
    if (variable := options.pop("api_key_variable", None)) is not None:
        if not os.environ.get(str(variable)):
            raise ConfigError(f"candidates: {model}: the environment variable {variable!r} is not set")
        options["api_key"] = os.environ[str(variable)]
    prices = {price.removesuffix("_price"): options.pop(price) for price in PRICES if price in options}
    if len(prices) == 1:
        raise ConfigError(f"candidates: {model}: prompt_price and completion_price are needed together")
    if model == AS_IS:
        if options:
            raise ConfigError(
                f"candidates: as-is takes name and prices only, since the app sets the rest; got {', '.join(options)}"
            )
        return Candidate(name, settings={"model": AS_IS}, as_is=True, prices=Price(**prices) if prices else None)
    if prices:
        options["prices"] = prices
    return of_llm(name, Llm(model, **options))


def _value(text: str) -> Json:
    """Parse numbers, true, false and null; keep any other text."""
    try:
        value: Json = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value
