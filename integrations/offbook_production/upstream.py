"""The paid model behind the gateway: its endpoint, key and price, from `--upstream`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from offbook.base.errors import ConfigError
from offbook.base.redaction import protect
from offbook.llms.options import LlmOptions, Price
from offbook.llms.prices import price_of
from offbook.llms.provider import installed_prices

AUTHORIZATION = "authorization"
PRICES = {
    "prompt_price": "prompt",
    "completion_price": "completion",
    "cached_price": "cached_prompt",
    "cache_write_price": "cache_write",
    "cache_write_1h_price": "cache_write_1h",
}
OPTIONS = ("api_base", "api_key_variable", *PRICES)


@dataclass(frozen=True)
class Provider:
    """Where a provider answers, the variable with its key, and the header that carries it."""

    root: str
    key_variable: str
    key_header: str
    root_variable: str


PROVIDERS = {
    "openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY", AUTHORIZATION, "OPENAI_BASE_URL"),
    "anthropic": Provider("https://api.anthropic.com", "ANTHROPIC_API_KEY", "x-api-key", "ANTHROPIC_BASE_URL"),
    "gemini": Provider(
        "https://generativelanguage.googleapis.com", "GEMINI_API_KEY", "x-goog-api-key", "GEMINI_BASE_URL"
    ),
}
"""OpenAI's own APIs, and every server that speaks them with `api_base`; Anthropic's; Google's."""


@dataclass(frozen=True)
class UpstreamModel:
    """A paid model. `name` is the one that clients send. `key=None`: each client sends its own. `price=None`: unknown."""

    text: str
    name: str
    root: str
    key_header: str
    key: str | None
    price: Price | None

    @property
    def secret(self) -> str | None:
        """The key without the scheme of its header."""
        return None if self.key is None else self.key.removeprefix("Bearer ")

    def url(self, path: str, query: str = "") -> str:
        """The URL for the path of a client, such as /v1/chat/completions. A root that ends in /v1 has that version already."""
        path = path.removeprefix("/v1") if self.root.endswith("/v1") else path
        return self.root + path + (f"?{query}" if query else "")


def upstream_model(text: str, environ: Mapping[str, str] = os.environ) -> UpstreamModel:
    """Parse `PROVIDER/MODEL` or `PROVIDER/MODEL?option=value&...`. Raises ConfigError, naming what is wrong.

    Prices are in USD per million tokens; without them, litellm's table has them if it is installed. The key is registered
    with `protect`.
    """
    model, _, query = text.partition("?")
    provider_name, _, name = model.partition("/")
    provider = PROVIDERS.get(provider_name)
    if provider is None or not name:
        raise ConfigError(
            f"--upstream {text!r}: write PROVIDER/MODEL with one of {', '.join(PROVIDERS)}, such as openai/gpt-4.1; for "
            "another server that speaks OpenAI's API, openai/NAME?api_base=https://HOST/v1"
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise ConfigError(f"--upstream: {unknown[0]!r} is no option of it: {', '.join(OPTIONS)}")
    root = (options.get("api_base") or environ.get(provider.root_variable) or provider.root).rstrip("/")
    if urlsplit(root).scheme not in ("http", "https") or not urlsplit(root).hostname:
        raise ConfigError(f"--upstream: api_base {root!r} is no http or https URL")
    if "@" in urlsplit(root).netloc:
        raise ConfigError("--upstream: api_base holds a user name or password; keys come from api_key_variable")
    variable = options.get("api_key_variable", provider.key_variable)
    key = environ.get(variable) or None
    if key is None and "api_key_variable" in options:
        raise ConfigError(f"--upstream: the environment variable {variable!r} is not set")
    protect([key] if key else [])
    sent = f"Bearer {key}" if key is not None and provider.key_header == AUTHORIZATION else key
    return UpstreamModel(model, name, root, provider.key_header, sent, _price(model, options))


def _price(model: str, options: Mapping[str, str]) -> Price | None:
    written = {field: options[name] for name, field in PRICES.items() if name in options}
    try:
        own = Price.model_validate(written) if written else None
    except ValidationError as error:
        raise ConfigError(
            "--upstream: prompt_price and completion_price are numbers in USD per million tokens, and needed together"
        ) from error
    return own or price_of(LlmOptions(model=model, cache=None), installed_prices())
