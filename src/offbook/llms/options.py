"""The options of an `Llm`."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, SecretStr

from offbook.base.config import Options
from offbook.base.errors import ConfigError
from offbook.base.numbers import MAX_USD
from offbook.base.option_names import FOREIGN, unknown_option
from offbook.base.server_options import default_dir

Usd = Annotated[float, Field(ge=0, le=MAX_USD)]


class Price(Options):
    """USD per million tokens."""

    prompt: Usd
    completion: Usd
    cached_prompt: Usd | None = Field(default=None, description="of cached prompt tokens; None: as `prompt`")
    cache_write: Usd | None = Field(
        default=None, description="of prompt tokens that are written to the provider's cache; None: as `prompt`"
    )
    cache_write_1h: Usd | None = Field(
        default=None, description="of those that it keeps for an hour; None: as `cache_write`"
    )


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
        check_parameters("Llm", parameters, own)
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


def check_parameters(where: str, names: Iterable[str], own: Collection[str]) -> None:
    """Raise ConfigError for a parameter that is not passed on to litellm, or that is one of `own`, misspelt."""
    for name in names:
        near = f"{where}.{name}" in FOREIGN or get_close_matches(name, own, n=1, cutoff=0.8)
        if near and name not in own:
            raise ConfigError(unknown_option(where, name, own))


def _canonical(parameters: dict[str, Any]) -> str:
    try:
        return json.dumps(parameters, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Llm: parameters of litellm must be JSON values: {error}") from error
