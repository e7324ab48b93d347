"""OAuth with client credentials, for a client registered in advance. For interactive sign-in, use the SDK's
`OAuthClientProvider`."""

from __future__ import annotations

from collections.abc import Sequence

import httpx2
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from .environment_references import References


class MemoryTokens:
    """The SDK's `TokenStorage` in memory: nothing is written to disk."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None
        self._client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info


def client_credentials(
    url: str, client_id: str, client_secret: str, *, issuer: str, scopes: Sequence[str] = ()
) -> httpx2.Auth:
    """Authenticate at `url` with a client's id and secret, which are sent to the authorization server `issuer` only.

    All arguments may contain references such as `${env:SECRET}`. Raises ConfigError for a variable that is not set.
    """
    resolve = References(url).resolve
    return ClientCredentialsOAuthProvider(
        resolve(url),
        MemoryTokens(),
        resolve(client_id),
        resolve(client_secret),
        scope=" ".join(scopes) or None,
        issuer=resolve(issuer),
    )


def secrets_of(auth: httpx2.Auth | None) -> tuple[str, ...]:
    """The client's secret and the tokens that an authentication of the SDK has now; none for any other."""
    if not isinstance(auth, OAuthClientProvider):
        return ()
    client, tokens = auth.context.client_info, auth.context.current_tokens
    known = [client.client_secret if client else None]
    known += [tokens.access_token, tokens.refresh_token] if tokens else []
    return tuple(secret for secret in known if secret)
