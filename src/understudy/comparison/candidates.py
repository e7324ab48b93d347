"""Candidates: what answers the app's calls. `step:12`, `step:newest`, or another LLM as litellm names it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qsl

from understudy.client.model import Model, TrainableModel
from understudy.errors import ConfigError
from understudy.llms.llm import Llm
from understudy.types import Json

STEP = re.compile(r"step:(\d+|newest)")
NEWEST = "newest"
PRICES = ("prompt_price", "completion_price")

CandidateLike: TypeAlias = "str | Model[Any] | Llm | Candidate"
"""`step:0`, `step:newest`, `openai/gpt-4.1`, `openai/name?api_base=http://...`, a `us.Model`, an `Llm`, or a Candidate."""


@dataclass(frozen=True)
class Candidate:
    """What answers the app: a step of the trained model (None: the newest), or `llm`. `settings` are those that its
    rollouts depend on."""

    name: str
    llm: Llm | None = None
    step: int | None = None
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def trained(self) -> bool:
        """Whether it is a step of the app's own model."""
        return self.llm is None

    @property
    def fingerprint(self) -> str:
        """Of what its rollouts depend on, keys left out."""
        text = json.dumps({"name": self.name, "step": self.step, **self.settings}, sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def record_name(self) -> str:
        """The name under which a server keeps its rollouts: letters, digits, dots, dashes and underscores."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-._")[:128] or "candidate"


def as_candidates(given: Sequence[CandidateLike]) -> list[Candidate]:
    """The candidates, each with a name of its own. Raises ConfigError."""
    if isinstance(given, str) or not given:
        raise ConfigError('candidates: a list of at least one is needed, such as ["step:newest", "openai/gpt-4.1"]')
    found = [as_candidate(each) for each in given]
    for kind in ("name", "record_name"):
        names = [getattr(each, kind) for each in found]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"candidates: {twice[0]!r} comes twice; name one of them, as in openai/name?name=other")
    return found


def as_candidate(given: object) -> Candidate:
    """One candidate. Raises ConfigError."""
    if isinstance(given, Candidate):
        return given
    if isinstance(given, Llm):
        return of_llm(given.options.model, given)
    if isinstance(given, TrainableModel):
        raise ConfigError(
            f"candidates: {given.name!r} is trained here: name its steps, step:0, step:12 or step:newest, of the model of "
            "the app that is compared"
        )
    if isinstance(given, Model):
        return _of_model(cast("Model[Any]", given))
    if not isinstance(given, str):
        raise ConfigError(f"candidates: a text, us.Model or Llm is needed, got {type(given).__name__} {given!r:.100}")
    if given.startswith("step:"):
        found = STEP.fullmatch(given)
        if found is None:
            raise ConfigError(f"candidates: {given!r} is no step; write step:0, step:12 or step:newest")
        return Candidate(given, step=None if found[1] == NEWEST else int(found[1]))
    return _of_text(given)


def of_llm(name: str, llm: Llm) -> Candidate:
    """Another LLM under a name."""
    options = llm.options
    prices = None if options.prices is None else options.prices.model_dump()
    settings = {
        "model": options.model,
        "api_base": options.api_base,
        "parameters": _public(options.litellm_parameters),
        "prices": prices,
    }
    return Candidate(name, llm, settings=settings)


def _public(parameters: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in parameters.items() if name != "extra_headers"}


def _of_model(model: Model[Any]) -> Candidate:
    """A `us.Model`: at its endpoint, which speaks OpenAI's API; without one, its name is litellm's."""
    name = model.inference_name()
    options: dict[str, Any] = {} if model.inference_api_key is None else {"api_key": model.inference_api_key}
    if model.inference_base_url is not None:
        return of_llm(model.name, Llm(f"openai/{name}", api_base=model.inference_base_url, **options))
    return of_llm(model.name, Llm(name, **options))


def _of_text(text: str) -> Candidate:
    """`MODEL` or `MODEL?option=value&...`: `name`, `api_base`, `api_key_variable`, prices in USD per million tokens, limits of
    the endpoint, or parameters of litellm."""
    model, mark, query = text.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=False)
    if (mark and not pairs) or len(dict(pairs)) < len(pairs):
        raise ConfigError(f"candidates: {text!r} is not of the form MODEL?option=value&option=value, each option once")
    options: dict[str, Any] = {name: _value(value) for name, value in pairs}
    name = str(options.pop("name", model))
    if "api_key" in options:
        raise ConfigError(f"candidates: {model}: a key does not belong there: name a variable, api_key_variable=MY_KEY")
    if (variable := options.pop("api_key_variable", None)) is not None:
        if not os.environ.get(str(variable)):
            raise ConfigError(f"candidates: {model}: the environment variable {variable!r} is not set")
        options["api_key"] = os.environ[str(variable)]
    prices = {each.removesuffix("_price"): options.pop(each) for each in PRICES if each in options}
    if len(prices) == 1:
        raise ConfigError(f"candidates: {model}: prompt_price and completion_price are needed together")
    if prices:
        options["prices"] = prices
    return of_llm(name, Llm(model, **options))


def _value(text: str) -> Json:
    """Numbers, true, false and null as such; all else is the text that it is."""
    try:
        value: Json = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value
