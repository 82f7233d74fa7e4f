"""Failures of model calls, in the same terms for every provider.

Theory of operation
-------------------
Each provider's adapter reads bare facts off the error that its SDK raised (a status, a code, a
text, headers) and `classify` turns them into a `Failure`: one of nine kinds, whether the
same call may succeed later, and how long the provider wants us to wait. It is a pure
function, so a new vendor's habits are one row in a table and one in a test.

Codes are trusted before texts, and texts before the status, because vendors reuse a status:
a 400 may be a full context, an empty account, a filter or a mistake, and a 429 may be a pause
of a second or an account without money. Errors that arrive in the middle of a stream have a
status of 200 or none; there the code alone decides.

No secret passes: keys and tokens are removed from texts, which are cut to a length, before they
become part of an error.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Literal

from treenail.errors import ModelCallError, ThrottleError

FailureKind = Literal[
    "throttled",
    "transient",
    "connection",
    "context_too_long",
    "content_filtered",
    "truncated",
    "refused",
    "broken_off",
    "authentication",
    "bad_request",
]
"""How a model call can fail."""

RETRYABLE: frozenset[FailureKind] = frozenset({"throttled", "transient", "connection"})
"""The kinds after which the same call may succeed later."""

MAX_ERROR_CHARS = 600
"""How much of a provider's own text an error carries."""

MAX_RETRY_AFTER_S = 24 * 3600.0
"""The longest wait that is accepted from a provider; a longer one counts as this."""

REDACTED = "[redacted]"
"""Replaces a secret."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about a failed call, in vendor-neutral terms."""

    status: int | None = None
    """The HTTP status; None if there was no answer, or if the failure came inside a stream."""
    code: str = ""
    """The provider's code or error type, several joined by spaces if it gives several."""
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timed_out: bool = False
    """Whether we gave up waiting."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The meaning of a failed call."""

    kind: FailureKind
    retryable: bool
    retry_after: timedelta | None = None
    quota_exhausted: bool = False
    """For a throttled call: waiting does not help; the account needs credit."""


# Each row: what to look for in the code, and what it means.
_CODES: tuple[tuple[re.Pattern[str], FailureKind], ...] = (
    (
        re.compile(r"context_length_exceeded|exceed_context_size|request_too_large|string_above_max"),
        "context_too_long",
    ),
    (
        re.compile(r"content_?filter|content_policy|_policy\b|policy_violation|invalid_prompt"),
        "content_filtered",
    ),
    (re.compile(r"rate_limit|too_many_requests|tokens_per|requests_per"), "throttled"),
    (re.compile(r"authentication|invalid_api_key|permission|unauthorized|invalid_token"), "authentication"),
    (re.compile(r"overloaded|server_error|api_error|timeout|unavailable|internal"), "transient"),
)
_QUOTA_CODE = re.compile(r"insufficient_quota|quota_exceeded|billing|credit|payment")
_CONTEXT_TEXT = re.compile(
    r"maximum context length|context (?:window|length|size|limit)|prompt is too long"
    r"|too many (?:input )?tokens|input is too long|exceeds? the (?:available )?context"
    r"|reduce the length of the (?:messages|prompt)",
    re.IGNORECASE,
)
_QUOTA_TEXT = re.compile(
    r"credit balance|exceeded your current quota|billing details|insufficient (?:balance|funds|credits)",
    re.IGNORECASE,
)
_FILTER_TEXT = re.compile(r"content (?:management )?(?:policy|filter)|flagged as potentially", re.IGNORECASE)


def classify(facts: Facts, *, now: datetime | None = None) -> Failure:
    """Classify a failed call. A Retry-After date is measured from `now`."""
    kind, quota = _kind(facts)
    headers = {name.lower(): value for name, value in facts.headers.items()}
    retryable = kind in RETRYABLE and not quota
    # Some providers say whether to retry; a "no" is respected.
    if headers.get("x-should-retry", "").strip().lower() == "false":
        retryable = False
    wait = retry_after(headers, now=now) if kind in ("throttled", "transient") else None
    return Failure(kind, retryable, wait, quota)


def _kind(facts: Facts) -> tuple[FailureKind, bool]:
    code, text, status = facts.code.lower(), facts.message, facts.status
    if _QUOTA_CODE.search(code) or status == 402 or (status in (400, 403, 429) and _QUOTA_TEXT.search(text)):
        return "throttled", True
    for pattern, kind in _CODES:
        if pattern.search(code):
            # A refused request is not transient, whatever word its code contains.
            if (
                kind == "transient"
                and status is not None
                and 400 <= status < 500
                and status not in (408, 409)
            ):
                break
            return kind, False
    if status == 429:
        return "throttled", False
    if status in (400, 413, 422, 500) and _CONTEXT_TEXT.search(text):
        return "context_too_long", False
    if status == 413:
        return "context_too_long", False
    if status in (400, 403, 422) and _FILTER_TEXT.search(text):
        return "content_filtered", False
    if status in (401, 403):
        return "authentication", False
    if status in (408, 409, 425) or (status is not None and status >= 500):
        return "transient", False
    if status is not None and 400 <= status < 500:
        return "bad_request", False
    if facts.timed_out or not code:
        return "connection", False
    # An unknown code inside a stream: the provider began to answer and failed.
    return ("context_too_long", False) if _CONTEXT_TEXT.search(text) else ("transient", False)


def retry_after(headers: Mapping[str, str], *, now: datetime | None = None) -> timedelta | None:
    """Read how long the provider wants us to wait (milliseconds, seconds or a date), if it says so."""
    lowered = {name.lower(): value for name, value in headers.items()}
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        seconds = _number(lowered.get(name))
        if seconds is not None:
            return timedelta(seconds=min(max(seconds * unit, 0.0), MAX_RETRY_AFTER_S))
    at = _date(lowered.get("retry-after"))
    if at is None:
        return None
    # The provider's own clock is the better one to measure its date by.
    begin = _date(lowered.get("date")) or now
    if begin is None:
        return None
    return timedelta(seconds=min(max((at - begin).total_seconds(), 0.0), MAX_RETRY_AFTER_S))


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _date(text: str | None) -> datetime | None:
    try:
        parsed = parsedate_to_datetime(text or "")
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)


# --- from a failure to an exception ----------------------------------------------------------------

_ADVICE: Mapping[FailureKind, str] = {
    "throttled": "wait and try again, or give the agent a RetryPolicy that waits longer",
    "transient": "try again, or give the agent a RetryPolicy with more attempts",
    "connection": "check the network and the base_url, then try again",
    "context_too_long": "shorten or compact the conversation, or use a model with a larger context",
    "content_filtered": "change what is asked; trying the same again gives the same answer",
    "truncated": "raise max_output_tokens, or ask for less at once",
    "refused": "change what is asked; trying the same again gives the same answer",
    "broken_off": "resume the run to ask again",
    "authentication": "check the API key, and what its account is allowed to use",
    "bad_request": "look at what the provider says about the request; trying the same again does not help",
}
_SAID: Mapping[FailureKind, str] = {
    "throttled": "asked us to slow down",
    "transient": "failed for the moment",
    "connection": "could not be reached, or the connection broke",
    "context_too_long": "says that the conversation is too long",
    "content_filtered": "withheld the answer (content filter)",
    "truncated": "stopped in the middle because the answer reached its length limit",
    "refused": "refused to answer",
    "broken_off": "stopped before the answer was finished",
    "authentication": "did not accept our credentials",
    "bad_request": "did not accept the request",
}

_SECRETS = re.compile(
    r"(?i:\b(?:bearer|basic)\s+[\w.~+/=-]{6,})"  # an authorization header's value
    r"|\b(?:sk|pk|rk|sess|gsk|xai|hf|ghp|AIza)[-_](?=[\w*-]*[\d*])[\w*…-]{6,}"  # keys, by how they begin
    r"|(?i:\b(?:api[-_ ]?key|x-api-key|token|secret|password)\b[\"']?\s*[:=]\s*[\"']?[\w.~+/=*-]{6,})"
    r"|(?<=://)[^/\s@]+@"  # a name and password in an address
)


_SHORT_SECRET = 8
"""A shorter key, such as one for a local server, is a word: it is replaced only as a whole word."""


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """Remove keys and tokens from a text: the given ones, and anything that looks like one."""
    for each in secrets:
        if len(each) >= _SHORT_SECRET:
            text = text.replace(each, REDACTED)
        elif each:
            text = re.sub(rf"(?<!\w){re.escape(each)}(?!\w)", REDACTED, text)
    return _SECRETS.sub(REDACTED, text)


_SECRET_NAME = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)


def environment_secrets(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the values of secret-looking names in an environment, where SDKs look for their keys."""
    return tuple(
        value
        for name, value in environment.items()
        if len(value) >= _SHORT_SECRET and _SECRET_NAME.search(name)
    )


def model_call_error(
    failure: Failure,
    *,
    provider: str,
    model: str,
    facts: Facts | None = None,
    partial: str = "",
    secrets: Iterable[str] = (),
) -> ModelCallError:
    """Make the exception of a failure. Its text says what happened, to what, and what to do next."""
    facts = facts or Facts()
    known = ", ".join(str(each) for each in (facts.status, facts.code.split(" ")[0]) if each)
    text = scrub(" ".join(facts.message.split()), secrets)
    if len(text) > MAX_ERROR_CHARS:
        text = text[:MAX_ERROR_CHARS] + "…"
    words = [f"{provider} ({model}) {_SAID[failure.kind]}"]
    if known:
        words.append(f" [{scrub(known, secrets)}]")
    if text:
        words.append(f": {text.rstrip('.')}")
    if failure.quota_exhausted:
        words.append("; the account has nothing left to spend: look at its plan and billing")
    else:
        words.append(f"; {_ADVICE[failure.kind]}")
    if failure.retry_after is not None:
        words.append(f" (it asked to wait {failure.retry_after.total_seconds():g} s)")
    message = "".join(words)
    if failure.kind == "throttled":
        return ThrottleError(
            message,
            kind="quota_exhausted" if failure.quota_exhausted else "rate_limit",
            retry_after=failure.retry_after,
            retry_safe=failure.retryable,
            status=facts.status,
            partial=partial,
        )
    return ModelCallError(
        message,
        phase="response" if partial else "request",
        kind=failure.kind,
        retryable=failure.retryable,
        retry_after=failure.retry_after,
        status=facts.status,
        partial=partial,
    )


_STOPS: Mapping[str, FailureKind] = {
    "length": "truncated",
    "filtered": "content_filtered",
    "refused": "refused",
    "broken_off": "broken_off",
}


_MAX_WORD_CHARS = 64
"""How much of a vendor's word for an end is told."""


def error_of_stop(
    reason: str, *, provider: str, model: str, partial: str = "", said: str = "", short_of: str = ""
) -> ModelCallError | None:
    """Return the error that an answer's end amounts to; None if the model is done or goes on.

    `said` is the vendor's own word for the end. `short_of` says why the answer had to be so short, if it was
    not the caller's wish.
    """
    kind = _STOPS.get(reason)
    if kind is None:
        return None
    word = re.sub(r"[^\w.:/-]+", "_", said)[:_MAX_WORD_CHARS] if kind == "broken_off" else ""
    facts = Facts(code=word, message=short_of)
    error = model_call_error(
        Failure(kind, False), provider=provider, model=model, partial=partial, facts=facts
    )
    error.phase = "response"
    return error
