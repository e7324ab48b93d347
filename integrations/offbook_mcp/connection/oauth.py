"""OAuth with client credentials, for a client registered in advance. For interactive sign-in, use the SDK's
`OAuthClientProvider`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import httpx2
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
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


class _WithinTwoOrigins(ClientCredentialsOAuthProvider):
    """The SDK's flow, which reads metadata wherever the server's answer says, such as an address of the local network.

    Here it reads them from the MCP server and the issuer only. The token goes where the issuer's own metadata say.
    """

    def __init__(self, url: str, client_id: str, client_secret: str, scope: str | None, issuer: str) -> None:
        super().__init__(url, MemoryTokens(), client_id, client_secret, scope=scope, issuer=issuer)
        self._origins = {_origin(url), _origin(issuer)}

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Raises OAuthFlowError in place of a request for metadata elsewhere."""
        flow = super().async_auth_flow(request)
        try:
            outgoing = await anext(flow)
            while True:
                if outgoing.method == "GET" and outgoing is not request and _origin(outgoing.url) not in self._origins:
                    raise OAuthFlowError(
                        f"the server's answer names {str(outgoing.url)!r}, which is neither its own origin nor the "
                        f"issuer's ({', '.join(sorted(self._origins))}): nothing was sent there"
                    )
                outgoing = await flow.asend((yield outgoing))
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()


def _origin(url: str | httpx2.URL) -> str:
    parts = httpx2.URL(url)
    return f"{parts.scheme}://{parts.netloc.decode().rpartition('@')[2]}"


def client_credentials(
    url: str, client_id: str, client_secret: str, *, issuer: str, scopes: Sequence[str] = ()
) -> httpx2.Auth:
    """Authenticate at `url` with a client's id and secret, which are sent to the authorization server `issuer` only.

    Metadata are read from these two origins only. All arguments may contain references such as `${env:SECRET}`. Raises ConfigError for a variable that is not set.
    """
    resolve = References(url).resolve
    scope = " ".join(scopes) or None
    return _WithinTwoOrigins(resolve(url), resolve(client_id), resolve(client_secret), scope, resolve(issuer))


def secrets_of(auth: httpx2.Auth | None) -> tuple[str, ...]:
    """The client's secret and the tokens that an authentication of the SDK has now; none for any other."""
    if not isinstance(auth, OAuthClientProvider):
        return ()
    client, tokens = auth.context.client_info, auth.context.current_tokens
    known = [client.client_secret if client else None]
    known += [tokens.access_token, tokens.refresh_token] if tokens else []
    return tuple(secret for secret in known if secret)
