"""Tokens for a server that asks for a login: where they are kept, and how they are got.

The flow is the SDK's. Ours is the place of the tokens: a file of the user's own, outside of every project,
that nobody else can read, and that commands of agents do not see. No token is part of a log or a message.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import anyio.to_thread
import httpx2
from mcp.client.auth import OAuthClientProvider, OAuthFlowError, OAuthRegistrationError, OAuthTokenError
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.auth.oauth2 import OAuthContext
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
)
from pydantic import AnyUrl, ValidationError

from treenail.errors import McpError, UsageError
from treenail.mcp.server import McpServer, OAuth

REDIRECT = "http://127.0.0.1:33418/callback"
"""Where a person is sent back to after a login."""

_TIMEOUT = httpx2.Timeout(30.0, read=None)
"""Reading has no limit here: a call has its own, which waits for a person."""


def token_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of all tokens."""
    home = environ.get("HOME") or str(Path.home())
    base = environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
    return Path(base) / "treenail" / "mcp"


class TokenFile:
    """The tokens of one server, in a file that only its owner can read."""

    def __init__(self, server: McpServer) -> None:
        client_id = "" if server.oauth is None else server.oauth.client_id
        # By its name too: two servers at one address may be two accounts.
        whole = "\n".join((server.name, server.url, client_id))
        self.path = token_directory() / f"{hashlib.sha256(whole.encode()).hexdigest()[:32]}.json"
        self._flow: OAuthContext | None = None

    def read(self) -> dict[str, Any]:
        """Return what is stored; nothing if it cannot be read."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, **parts: Any) -> None:
        """Store parts beside the others, all or nothing."""
        whole = json.dumps({**self.read(), **parts})
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A temporary file is for its owner alone from its beginning.
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".tokens-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def remind(self, flow: OAuthContext) -> None:
        """Tell a flow what the last one has found out: when the tokens expire, and where to renew them.

        Else a token that has expired since would mean another login, though it can be renewed.
        """
        self._flow = flow
        stored = self.read()
        try:
            known = OAuthMetadata.model_validate(stored["metadata"])
            expires_at = float(stored["expires_at"])
        except (KeyError, TypeError, ValueError):
            return
        flow.oauth_metadata, flow.token_expiry_time = known, expires_at

    # .. as the SDK wants it ..

    async def get_tokens(self) -> OAuthToken | None:
        """Return the stored tokens."""
        return cast("OAuthToken | None", await self._get("tokens", OAuthToken))

    async def set_tokens(self, tokens: OAuthToken) -> None:
        """Store tokens."""
        parts: dict[str, Any] = {"tokens": tokens.model_dump(mode="json"), "expires_at": None}
        if tokens.expires_in is not None:
            parts["expires_at"] = time.time() + tokens.expires_in
        if self._flow is not None and self._flow.oauth_metadata is not None:
            parts["metadata"] = self._flow.oauth_metadata.model_dump(mode="json")
        await anyio.to_thread.run_sync(lambda: self.write(**parts))

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        """Return what the authorization server knows this client as."""
        found = await self._get("client", OAuthClientInformationFull)
        return cast("OAuthClientInformationFull | None", found)

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        """Store what the authorization server knows this client as."""
        await anyio.to_thread.run_sync(lambda: self.write(client=client_info.model_dump(mode="json")))

    async def _get(self, part: str, kind: Any) -> Any:
        found = (await anyio.to_thread.run_sync(self.read)).get(part)
        try:
            return None if found is None else kind.model_validate(found)
        except ValidationError:
            return None


class _KnownClient(TokenFile):
    """The tokens of a client that was registered by hand."""

    def __init__(self, server: McpServer, oauth: OAuth) -> None:
        super().__init__(server)
        self._oauth = oauth

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        """Return the client as the operator describes it."""
        oauth = self._oauth
        return OAuthClientInformationFull(
            client_id=oauth.client_id,
            client_secret=oauth.client_secret or None,
            redirect_uris=[AnyUrl(REDIRECT)],
            token_endpoint_auth_method="client_secret_basic" if oauth.client_secret else "none",
            issuer=oauth.issuer or None,
        )


def _flow(server: McpServer) -> OAuthClientProvider | None:
    """Return what logs in when a server asks for it; None if its headers do that already."""
    if any(name.lower() == "authorization" for name in server.headers):
        return None
    oauth = server.oauth or OAuth()
    if oauth.grant == "client_credentials":
        return _by_itself(server, oauth)
    came_back: list[str] = []

    async def send(url: str) -> None:
        if server.login is None:
            raise McpError(
                f"the MCP server {server.name} asks for a login; log in with: treenail mcp test {server.name}"
            )
        came_back.append(await server.login(url))

    async def receive() -> AuthorizationCodeResult:
        found = parse_qs(urlsplit(came_back.pop()).query)
        if "error" in found:
            raise McpError(
                f"the login for the MCP server {server.name} was refused: {found['error'][0][:200]}"
            )
        one = {name: values[0] for name, values in found.items()}
        return AuthorizationCodeResult(code=one.get("code", ""), state=one.get("state"), iss=one.get("iss"))

    metadata = OAuthClientMetadata(
        client_name="Treenail", redirect_uris=[AnyUrl(REDIRECT)], scope=oauth.scope or None
    )
    storage = _KnownClient(server, oauth) if oauth.client_id else TokenFile(server)
    flow = OAuthClientProvider(
        server.url,
        metadata,
        storage,
        redirect_handler=send,
        callback_handler=receive,
        client_metadata_url=oauth.client_metadata_url or None,
    )
    storage.remind(flow.context)
    return flow


def _by_itself(server: McpServer, oauth: OAuth) -> OAuthClientProvider:
    """Return the login of a client without a person."""
    if not oauth.client_id or not (oauth.client_secret or oauth.private_key):
        raise UsageError(
            f"the MCP server {server.name} is to be reached with client_credentials; name client_id, and "
            "client_secret or private_key"
        )
    common: dict[str, Any] = {
        "server_url": server.url,
        "storage": TokenFile(server),
        "client_id": oauth.client_id,
        "scope": oauth.scope or None,
        "issuer": oauth.issuer or None,
    }
    with warnings.catch_warnings():
        # The SDK wants to know the issuer beforehand; where nobody named one, discovery finds it.
        warnings.simplefilter("ignore")
        if oauth.client_secret:
            return ClientCredentialsOAuthProvider(client_secret=oauth.client_secret, **common)
        signed = SignedJWTParameters(
            issuer=oauth.client_id,
            subject=oauth.client_id,
            signing_key=oauth.private_key,
            signing_algorithm="ES256"
            if "EC PRIVATE" in oauth.private_key or len(oauth.private_key) < 500
            else "RS256",
        )
        return PrivateKeyJWTOAuthProvider(assertion_provider=signed.create_assertion_provider(), **common)


class _WhenAsked(httpx2.Auth):
    """The SDK's flow, begun when a server asks for a login.

    The flow lets one request through at a time, until its answer begins: a call that takes long would hold up
    its own cancellation, and a stream that stays silent every call.
    """

    def __init__(self, flow: OAuthClientProvider) -> None:
        self._flow = flow

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send a request with the token that is known, if there is one; log in if that does not do."""
        known = self._flow.context
        if known.current_tokens is not None and known.is_token_valid():
            request.headers["Authorization"] = f"Bearer {known.current_tokens.access_token}"
        response = yield request
        if response.status_code not in (401, 403):
            return
        steps = self._flow.async_auth_flow(request)
        try:
            step = await anext(steps)
            while True:
                step = await steps.asend((yield step))
        except StopAsyncIteration:
            return
        finally:
            await steps.aclose()


@asynccontextmanager
async def http_client(server: McpServer, forgotten: Callable[[], None]) -> AsyncIterator[httpx2.AsyncClient]:
    """Make the client for a server that is reached by HTTP. `forgotten` hears that our session is gone."""

    async def heard(response: httpx2.Response) -> None:
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            forgotten()

    flow = _flow(server)
    async with httpx2.AsyncClient(
        headers=server.request_headers(),
        auth=None if flow is None else _WhenAsked(flow),
        timeout=_TIMEOUT,
        event_hooks={"response": [heard]},
    ) as client:
        yield client


def login_problem(server: McpServer, error: BaseException) -> str | None:
    """Say what went wrong with a login; None if the error is about something else."""
    if isinstance(error, OAuthTokenError):
        # Its text holds what the authorization server answered.
        return f"the MCP server {server.name} asks for a login, and the authorization server gave no token"
    if isinstance(error, OAuthRegistrationError):
        return f"the MCP server {server.name} asks for a login, and refuses to register this client"
    if isinstance(error, OAuthFlowError):
        return f"the login for the MCP server {server.name} failed: {str(error)[:300]}"
    return None
