"""What can be known before a run is made: is there a key, a server, and the model?

Theory of operation
-------------------
A run that cannot begin should not be in the store, and its reason should be one line. What the settings alone
tell is checked first, before an SDK is imported. Then the server is asked for the model, with one small GET
on a thread of its own, while the SDK is imported. Only an answer that leaves no doubt refuses the run: nobody
listens, the host is not known, the key is not accepted, the model is not there. Anything else (a proxy, a
certificate, a server without such a list, one that is slow) is for the real request to find out.
"""

from __future__ import annotations

import difflib
import http.client
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit

from treenail.errors import UsageError

_MOST_S = 2.0
"""How long the server may take for its answer before the run begins without it."""

_AT_ONCE_S = 0.1
"""How long a server on this machine is waited for before the SDK is imported."""

_MAX_ANSWER_BYTES = 5_000_000

_VENDORS = {
    "openai": ("OPENAI_API_KEY", "OPENAI_BASE_URL", "https://api.openai.com/v1", ""),
    "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "https://api.anthropic.com", "/v1"),
}
"""For each vendor: the variables with its key and its address, the address, where its interface begins."""

_OTHER_KEYS = {
    "anthropic": (
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_PROFILE",
        "ANTHROPIC_FEDERATION_RULE_ID",
        "ANTHROPIC_CONFIG_DIR",
    )
}
"""Other variables by which a vendor's SDK finds credentials."""

_LITELLM_KEYS = {
    "anthropic": ("ANTHROPIC_API_KEY",),
    "openai": ("OPENAI_API_KEY",),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "mistral": ("MISTRAL_API_KEY",),
    "groq": ("GROQ_API_KEY",),
    "deepseek": ("DEEPSEEK_API_KEY",),
    "openrouter": ("OPENROUTER_API_KEY",),
    "xai": ("XAI_API_KEY",),
    "cohere": ("COHERE_API_KEY", "CO_API_KEY"),
    "together_ai": ("TOGETHERAI_API_KEY", "TOGETHER_API_KEY"),
    "fireworks_ai": ("FIREWORKS_API_KEY", "FIREWORKS_AI_API_KEY"),
    "perplexity": ("PERPLEXITYAI_API_KEY", "PERPLEXITY_API_KEY"),
}
"""The variables in which LiteLLM looks for the keys of vendors: one of them is needed."""


_RETIRED = (
    (r"claude-sonnet-4-5(-\d+)?", "30 November 2026", "anthropic/claude-sonnet-5-5"),
    (r"claude-sonnet-4(-0|-\d+)", "15 June 2026", "anthropic/claude-sonnet-5-5"),
    (r"claude-opus-4(-0|-\d{8})", "15 June 2026", "anthropic/claude-opus-5-5"),
    (r"claude-([123]|instant).*", "19 February 2026", "anthropic/claude-sonnet-5-5"),
    (r"gpt-5(-mini|-nano)?(-\d{4}-\d\d-\d\d)?", "11 December 2026", "openai/gpt-6.1-terra"),
    (r"gpt-4(o|\.1).*", "14 January 2027", "openai/gpt-6.1-terra"),
    (r"(gpt-3\.5|gpt-4|o1|o3-mini|o4-mini)(-.*)?", "23 October 2026", "openai/gpt-6.1-terra"),
)
"""Models that their vendors retire: by when all of them are gone, and what to use instead.

It only explains what a server says: a model that the server still has is used."""


def retired(model: str) -> str:
    """Say when a model was retired and what to use instead; empty if that is not known."""
    for names, day, instead in _RETIRED:
        if re.fullmatch(names, model):
            return f"it was announced to be gone by {day}; use another one: --model {instead}"
    return ""


def check_settings(kind: str, model: str, base_url: str | None, environ: Mapping[str, str]) -> None:
    """Check what needs no server: the form of the address, and the key. Raises `UsageError`."""
    if base_url is not None:
        _check_url(base_url)
        return
    if kind in _VENDORS:
        variable, _, _, _ = _VENDORS[kind]
        known = (variable, *_OTHER_KEYS.get(kind, ()))
        if not any(environ.get(each) for each in known) and not _has_profile(kind, environ):
            raise UsageError(
                f"the model {kind}/{model} needs a key: set {variable}; for a server of your own, add "
                "--base-url URL"
            )
    if kind == "litellm":
        needed = _LITELLM_KEYS.get(model.partition("/")[0])
        if needed and not any(environ.get(each) for each in needed):
            raise UsageError(f"the model {kind}/{model} needs a key: set {needed[0]}")


def _has_profile(kind: str, environ: Mapping[str, str]) -> bool:
    """Whether Anthropic's SDK may find a login of its own tools."""
    home = environ.get("HOME")
    return kind == "anthropic" and home is not None and Path(home, ".config", "anthropic").is_dir()


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        # Without a scheme, `localhost:8701` is read as one: the scheme `localhost`.
        raise UsageError(
            f"the server's address {url!r} has no http:// or https://; write --base-url http://{url}"
        )
    try:
        is_whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
    if not is_whole:
        raise UsageError(
            f"the server's address {url!r} has no host, or no valid port; write --base-url http://HOST:PORT"
        )


class Inquiry:
    """Asks a model's server whether a run can begin, on a thread of its own."""

    def __init__(self, kind: str, model: str, base_url: str | None, environ: Mapping[str, str]) -> None:
        self._problem = ""
        self._asks = (kind, model, base_url, dict(environ))
        self._thread = threading.Thread(target=self._ask, name="treenail-preflight", daemon=True)
        self._thread.start()
        if base_url is not None and urlsplit(base_url).hostname in ("localhost", "127.0.0.1", "::1"):
            self.check(_AT_ONCE_S)

    def _ask(self) -> None:
        self._problem = problem_of(*self._asks)

    def check(self, timeout_s: float = _MOST_S) -> None:
        """Raise `UsageError` if the run cannot begin, as far as is known by then."""
        self._thread.join(timeout_s)
        if self._problem:
            raise UsageError(self._problem)


def problem_of(kind: str, model: str, base_url: str | None, environ: Mapping[str, str]) -> str:
    """Ask a model's server, and say why a run cannot begin there; empty if it can, or nobody knows."""
    if kind not in _VENDORS:
        return "" if base_url is None else _asked(_Server(base_url, {}), "")[1]
    variable, address, default, prefix = _VENDORS[kind]
    key = environ.get(variable, "")
    url = (base_url or environ.get(address) or default).rstrip("/")
    if not key and url == default:
        return ""  # It has another kind of login.
    if not key:
        headers = {}
    elif kind == "anthropic":
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    else:
        headers = {"authorization": f"Bearer {key}"}
    server = _Server(url + prefix, headers)
    answer, problem = _asked(server, f"/models/{quote(model, safe='')}")
    if answer is None:
        return problem
    status, body = answer
    if status == 401 and "scope" not in str(body):  # A key may be for the model, and not for the list.
        if key:
            return f"the server at {url} does not accept the key in {variable} [401]; set it to a valid key"
        return f"the server at {url} wants a key [401]; set {variable}"
    return _problem_of_name(server, url, model, is_vendor=base_url is None) if status == 404 else ""


def _problem_of_name(server: _Server, url: str, model: str, *, is_vendor: bool) -> str:
    """Look for a model in the list of its server, which does not have it by its name."""
    names = _names(server)
    if any(each in (model, f"{model}:latest") for each in names):
        return ""
    if is_vendor and (known := retired(model)):
        return f"the server at {url} has no model {model!r}: {known}"
    if names:
        close = difflib.get_close_matches(model, names, n=3)
        shown = ", ".join(repr(each) for each in close or names[:8])
        near = f"did you mean {shown}?" if close else f"it has {shown}{' ...' if len(names) > 8 else ''}"
        return f"the server at {url} has no model {model!r}; {near} (--trust-model if you know better)"
    if not server.path and _names(_Server(f"{url}/v1", server.headers)):
        return f"the server at {url} has its interface below /v1; write --base-url {url}/v1"
    return ""


class _Server:
    """The beginning of a server's addresses, and what is sent along."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url, self.headers = url, headers
        parts = urlsplit(url)
        self.host, self.scheme, self.path = parts.hostname or "", parts.scheme, parts.path.rstrip("/")
        self.port = parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def has_proxy(self) -> bool:
        names = (f"{self.scheme}_proxy", "all_proxy")
        return any(os.environ.get(each) or os.environ.get(each.upper()) for each in names)

    def get(self, path: str) -> tuple[int, object]:
        """Return the status and the JSON of an answer. Nothing is followed: a key stays with its server."""
        connect = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        connection = connect(self.host, self.port, timeout=_MOST_S)
        try:
            connection.connect()
            try:
                connection.request("GET", self.path + path, headers=dict(self.headers))
                answer = connection.getresponse()
                text = answer.read(_MAX_ANSWER_BYTES)
            except OSError:
                return 0, None  # It listens, and that is all that is known.
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except (ValueError, RecursionError):
            return answer.status, None


def _asked(server: _Server, path: str) -> tuple[tuple[int, object] | None, str]:
    """Ask a server; return its answer if there is one, and why nobody can be asked there."""
    if server.has_proxy and server.host not in ("localhost", "127.0.0.1", "::1"):
        return None, ""
    place = f"{server.host}:{server.port}"
    advice = "check the network, and --base-url if you use it"
    try:
        return server.get(path), ""
    except (ssl.SSLError, http.client.HTTPException, ValueError):
        return None, ""
    except socket.gaierror:
        return None, f"the host {server.host!r} is not known; {advice}"
    except TimeoutError:
        return None, f"nothing answers at {place} within {_MOST_S:g} s; {advice}"
    except OSError as error:
        reason = error.strerror or error
        return None, f"nothing answers at {place} ({reason}); start the server, or check --base-url"


def _names(server: _Server) -> list[str]:
    """Return the names of a server's models; empty if it has no list of them."""
    answer, _ = _asked(server, "/models")
    body = answer[1] if answer is not None and answer[0] == 200 else None
    listed = body.get("data") if isinstance(body, dict) else None
    if not isinstance(listed, list):
        return []
    return [str(each["id"]) for each in listed if isinstance(each, dict) and "id" in each]
