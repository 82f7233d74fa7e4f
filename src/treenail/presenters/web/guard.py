"""Who may speak with the inspector: its own page, with the token, under the server's own name.

Theory of operation
-------------------
Every user of the machine can reach a port on loopback, and every web page that the person has open can send
requests to it. So each request must pass four checks, in this order:

- **Host** is a name of this server. A page that has pointed its own name at this address (DNS rebinding) is
  refused before anything else is looked at.
- **Origin**, where a browser sends one, is this server's. What changes something must have one.
- **The cookie** holds the proof of the token. The token itself comes in the fragment of the URL, which no
  browser sends anywhere; the page hands it over once, and gets the cookie, which no script can read and no
  other site's request carries (`HttpOnly`, `SameSite=Strict`).
- **--read-only** refuses whatever acts.

Only the page's own files need no cookie: they are the same for everybody, and hold no data.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGIN = "/api/login"
"""Where the token is exchanged for a cookie."""

MAX_BODY_BYTES = 256 * 1024
"""The longest body of a request."""

_SAFE = ("GET", "HEAD")
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text can become markup, not even by a mistake in the page.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class Guard:
    """Lets the requests of the page pass, and no others."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str], read_only: bool) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = {each.lower() for each in hosts}
        self._read_only = read_only
        # Not the token itself: one from a file outlives this server, and a browser's store is not the place.
        self._proof = hmac.new(self._token, b"treenail inspector cookie", sha256).hexdigest()
        # Cookies know no ports: two inspectors on one machine must not overwrite each other's.
        self._cookie = f"treenail-{sha256(','.join(sorted(self._hosts)).encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app = self._refusal(scope) or (self._login if scope["path"] == LOGIN else self._app)
        await app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        host = headers.get("host", "").lower()
        if host not in self._hosts:
            return _refused(421, "this is not the address of the inspector; open the one that it printed")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            return _refused(403, "another site's page cannot use the inspector")
        if method not in _SAFE and origin is None:
            return _refused(403, "only the inspector's own page can change something")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return _refused(403, "another site's page cannot use the inspector")
        if int(headers.get("content-length") or 0) > MAX_BODY_BYTES or "transfer-encoding" in headers:
            return _refused(413, "the request is too long")
        if path == LOGIN or not path.startswith("/api/"):
            return None
        if not self._is_known(headers.get("cookie", "")):
            return _refused(401, "open the address that `treenail view` printed: it has the token")
        if method not in _SAFE and self._read_only:
            return _refused(403, "the inspector was started with --read-only")
        return None

    def _is_known(self, given: str) -> bool:
        try:
            morsel = SimpleCookie(given).get(self._cookie)
        except CookieError:
            return False
        proof = "" if morsel is None else morsel.value
        return hmac.compare_digest(proof.encode("utf-8", "replace"), self._proof.encode())

    async def _login(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _refused(405, "the token is sent with POST")(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            data = json.loads(await request.body())
        except ValueError:
            data = None
        token = data.get("token") if isinstance(data, dict) else None
        given = token.encode("utf-8", "replace") if isinstance(token, str) else b""
        if not hmac.compare_digest(given, self._token):
            answer = _refused(401, "this is not the token; open the address that `treenail view` printed")
        else:
            answer = JSONResponse({"ok": True})
            is_tls = (request.headers.get("origin") or "").startswith("https:")
            answer.set_cookie(self._cookie, self._proof, httponly=True, samesite="strict", secure=is_tls)
        await answer(scope, receive, send)


def _refused(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)


def _with_headers(send: Send) -> Send:
    """Add the headers that every answer has."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
