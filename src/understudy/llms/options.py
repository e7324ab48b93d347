"""The options of an `Llm`."""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, SecretStr

from understudy.config import Options, default_dir
from understudy.errors import ConfigError

Structured = Literal["auto", "schema", "prompt"]


class Price(Options):
    """USD per million tokens."""

    prompt: float = Field(ge=0)
    completion: float = Field(ge=0)
    cached_prompt: float | None = Field(default=None, ge=0, description="of cached prompt tokens; None: as `prompt`")


class LlmOptions(Options):
    """The model, its endpoint, and the limits of requests."""

    model: str = Field(min_length=1, description="a model as litellm names it, such as openai/o3 or hosted_vllm/name")
    api_base: str | None = Field(
        default=None, min_length=1, description="URL of the endpoint; None: the provider's own"
    )
    api_key: SecretStr | None = Field(default=None, description="None: the provider's environment variable")
    timeout: float = Field(default=120.0, gt=0, description="seconds of one request")
    deadline: float = Field(
        default=600.0, gt=0, description="seconds of a question with all its retries, from its first request on"
    )
    concurrency: int = Field(default=8, ge=1, description="requests in flight to one endpoint")
    retries: int = Field(
        default=8, ge=0, description="how often a request that failed for a passing reason is repeated"
    )
    structured: Structured = Field(
        default="auto",
        description="how JSON is asked for: schema sends it as response_format, prompt writes it into the messages, auto "
        "begins with schema and goes on with prompt where the provider rejects it",
    )
    cache: Path | None = Field(
        default_factory=lambda: default_dir() / "llms.sqlite", description="file of the answers; None: none is kept"
    )
    prices: Price | None = Field(default=None, description="USD per million tokens; None: litellm's table, by `model`")
    parameters: str = Field(default="{}", repr=False, description="parameters of litellm, as canonical JSON")

    @classmethod
    def of(cls, model: str, options: dict[str, Any]) -> LlmOptions:
        """Build options by name. Any other name is a parameter of litellm, such as temperature. Raises ConfigError."""
        own = set(cls.model_fields) - {"model", "parameters"}
        parameters = {name: value for name, value in options.items() if name not in own}
        for name in parameters:
            _check_parameter(name, own)
        known = {name: value for name, value in options.items() if name in own}
        return cls.parse(model=model, parameters=_canonical(parameters), **known)

    @property
    def endpoint(self) -> str:
        """The endpoint of requests: `api_base`, else the URL in the environment, else the provider's name."""
        provider = self.model.partition("/")[0] if "/" in self.model else "openai"
        names = (f"{provider.upper()}_API_BASE", f"{provider.upper()}_BASE_URL")
        return self.api_base or next((os.environ[name] for name in names if os.environ.get(name)), provider)

    @property
    def litellm_parameters(self) -> dict[str, Any]:
        """`parameters` as a new dict."""
        return cast(dict[str, Any], json.loads(self.parameters))


ELSEWHERE = {
    "base_url": "api_base=",
    "cache_responses": "cache=",
    "caching": "cache=",
    "max_cost": "`with llms.budget(max_cost):`, or Trainer(max_cost=)",
    "max_retries": "retries=",
    "num_retries": "retries=",
    "price": "prices=",
    "request_timeout": "timeout=",
    "response_format": "ask(messages, schema)",
    "messages": "ask(messages, ...)",
    "n": "ask(..., sample=0), ask(..., sample=1), ...",
    "no-log": "nothing: prompts are not logged",
    "stream": "nothing: answers are read whole",
    "fallbacks": "an Llm for each model",
    "drop_params": "only parameters that the model takes",
    "mock_response": "understudy.testing",
    "input_cost_per_token": "prices=",
    "output_cost_per_token": "prices=",
}
"""Parameters of litellm that are not passed on, with the replacement."""


def _check_parameter(name: str, own: set[str]) -> None:
    if name in ELSEWHERE:
        raise ConfigError(f"Llm: no parameter {name!r} here: use {ELSEWHERE[name]}")
    close = get_close_matches(name, own, n=1, cutoff=0.8)
    if close:
        raise ConfigError(f"Llm: there is no option {name!r}: did you mean {close[0]!r}?")


def _canonical(parameters: dict[str, Any]) -> str:
    try:
        return json.dumps(parameters, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Llm: parameters of litellm must be JSON values: {error}") from error
