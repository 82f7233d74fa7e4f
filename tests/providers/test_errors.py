"""One classification of what can go wrong, for every vendor's way to say it."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.errors import ModelCallError, PromptEvaluationError, ThrottleError
from treenail.providers import error_of_stop
from treenail.providers.errors import (
    MAX_ERROR_CHARS,
    MAX_RETRY_AFTER_S,
    REDACTED,
    Facts,
    classify,
    environment_secrets,
    model_call_error,
    retry_after,
    scrub,
)

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)

# What vendors and compatible servers are known to say, and what it means.
SAYINGS = [
    (Facts(429, "rate_limit_exceeded requests", "Rate limit reached"), "throttled", True),
    (Facts(429, "rate_limit_error", "Number of request tokens has exceeded your limit"), "throttled", True),
    (Facts(429, "", "slow down"), "throttled", True),
    (Facts(429, "insufficient_quota", "You exceeded your current quota"), "throttled", False),
    (Facts(429, "", "You exceeded your current quota, check your billing details"), "throttled", False),
    (Facts(400, "invalid_request_error", "Your credit balance is too low"), "throttled", False),
    (Facts(402, "billing_error", "pay"), "throttled", False),
    (Facts(402, "", "Insufficient Balance"), "throttled", False),
    (Facts(400, "context_length_exceeded invalid_request_error", "too long"), "context_too_long", False),
    (
        Facts(400, "invalid_request_error", "prompt is too long: 210000 tokens > 200000"),
        "context_too_long",
        False,
    ),
    (
        Facts(
            400,
            "invalid_request_error",
            "input length and `max_tokens` exceed context limit: 1 + 2 > 2",
        ),
        "context_too_long",
        False,
    ),
    (Facts(400, "BadRequestError", "This model's maximum context length is 4096"), "context_too_long", False),
    (
        Facts(400, "exceed_context_size_error", "exceeds the available context size"),
        "context_too_long",
        False,
    ),
    (Facts(500, "", "the request exceeds the available context size"), "context_too_long", False),
    (Facts(413, "request_too_large", "Request exceeds the maximum size"), "context_too_long", False),
    (Facts(400, "content_filter", "triggered the content management policy"), "content_filtered", False),
    (Facts(None, "misalignment_policy_violation", ""), "content_filtered", False),
    (Facts(None, "bio_policy", ""), "content_filtered", False),
    (Facts(None, "invalid_prompt", "flagged"), "content_filtered", False),
    (
        Facts(400, "invalid_request_error", "Output blocked by content filtering policy"),
        "content_filtered",
        False,
    ),
    (Facts(401, "invalid_api_key", ""), "authentication", False),
    (Facts(401, "authentication_error", ""), "authentication", False),
    (Facts(403, "permission_error", ""), "authentication", False),
    (Facts(403, "", "country not supported"), "authentication", False),
    (Facts(400, "invalid_request_error", "messages.0: wrong"), "bad_request", False),
    (Facts(404, "model_not_found", "no such model"), "bad_request", False),
    (Facts(404, "not_found_error", ""), "bad_request", False),
    (Facts(422, "", ""), "bad_request", False),
    (Facts(400, "api_error", "odd"), "bad_request", False),
    (Facts(408, "", ""), "transient", True),
    (Facts(409, "", ""), "transient", True),
    (Facts(500, "server_error", ""), "transient", True),
    (Facts(502, "", "<html>Bad gateway</html>"), "transient", True),
    (Facts(503, "overloaded", ""), "transient", True),
    (Facts(504, "timeout_error", ""), "transient", True),
    (Facts(529, "overloaded_error", "Overloaded"), "transient", True),
    (Facts(None, "overloaded_error", "Overloaded"), "transient", True),
    (Facts(None, "server_error", ""), "transient", True),
    (Facts(None, "rate_limit_exceeded", ""), "throttled", True),
    (Facts(None, "something_new", "?"), "transient", True),
    (Facts(None, "", "Connection error."), "connection", True),
    (Facts(None, "", "Request timed out.", timed_out=True), "connection", True),
]


@pytest.mark.parametrize(("facts", "kind", "retryable"), SAYINGS, ids=lambda value: str(value)[:60])
def test_what_vendors_say_has_one_meaning(facts: Facts, kind: str, retryable: bool) -> None:
    failure = classify(facts)
    assert (failure.kind, failure.retryable) == (kind, retryable)


def test_a_provider_that_says_not_to_retry_is_believed() -> None:
    assert classify(Facts(500, "server_error", headers={"X-Should-Retry": "false"})).retryable is False


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"Retry-After-Ms": "250", "Retry-After": "9"}, 0.25),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "1e12"}, MAX_RETRY_AFTER_S),
        ({"retry-after": "Sun, 01 Nov 2026 12:00:20 GMT"}, 20.0),
        ({"retry-after": "Sun, 01 Nov 2026 11:00:00 GMT"}, 0.0),
        # The provider's own clock counts, if it tells it: ours may be wrong.
        ({"retry-after": "Sun, 01 Nov 2026 13:00:20 GMT", "date": "Sun, 01 Nov 2026 13:00:00 GMT"}, 20.0),
    ],
)
def test_how_long_to_wait_is_read_in_every_form(headers: dict[str, str], seconds: float) -> None:
    assert retry_after(headers, now=NOW) == timedelta(seconds=seconds)


@given(st.text(max_size=40) | st.sampled_from(["nan", "inf", "-inf", "soon", "", "1e400"]))
def test_a_wait_that_is_none_is_no_wait(text: str) -> None:
    """Whatever stands in the header, what comes out is None or a finite time that is not negative."""
    wait = retry_after({"retry-after": text}, now=NOW)
    assert wait is None or 0 <= wait.total_seconds() <= MAX_RETRY_AFTER_S


@given(
    st.builds(
        Facts,
        status=st.none() | st.integers(100, 999),
        code=st.text(max_size=30),
        message=st.text(max_size=2000),
        headers=st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=4),
        timed_out=st.booleans(),
    )
)
def test_every_failure_becomes_an_error_of_the_tree(facts: Facts) -> None:
    """Whatever a provider says: an error with a kind, whose text is not endless and names the model."""
    failure = classify(facts, now=NOW)
    error = model_call_error(failure, provider="p", model="the-model", facts=facts)
    assert isinstance(error, ModelCallError)
    assert isinstance(error, PromptEvaluationError)
    assert isinstance(error, ThrottleError) == (failure.kind == "throttled")
    assert error.retryable == failure.retryable
    assert "the-model" in str(error)
    assert len(str(error)) < MAX_ERROR_CHARS + 400


def test_an_error_says_what_happened_to_what_and_what_to_do() -> None:
    facts = Facts(429, "rate_limit_exceeded", "Rate limit reached.", {"retry-after": "20"})
    error = model_call_error(classify(facts), provider="openai.chat", model="m", facts=facts)
    assert str(error) == (
        "openai.chat (m) asked us to slow down [429, rate_limit_exceeded]: Rate limit reached; wait and try "
        "again, or give the agent a RetryPolicy that waits longer (it asked to wait 20 s)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Incorrect API key provided: sk-proj-abcdefgh12345678",
        "Incorrect API key provided: sk-proj-********************5678.",
        "header Authorization: Bearer abcdef.ghijkl-5678",
        "x-api-key: abcdefgh5678",
        '{"api_key": "abcdefgh5678"}',
        "connecting to http://user:pw5678@host/v1",
        "the key was my-very-own-5678",
    ],
)
def test_no_secret_stands_in_an_error(text: str) -> None:
    cleaned = scrub(text, ["my-very-own-5678"])
    assert "5678" not in cleaned
    assert REDACTED in cleaned


def test_ordinary_words_are_left_alone() -> None:
    text = "The token limit is 4096 tokens; the api took 3 s, the key point is api-level."
    assert scrub(text) == text


def test_a_key_that_is_a_short_word_is_taken_out_where_it_stands_alone() -> None:
    """A server of one's own is given any word for a key; the rest of the text stays readable."""
    assert scrub("check the key k: broken", ["k"]) == f"check the key {REDACTED}: broken"


@pytest.mark.parametrize("name", ["ANTHROPIC_API_KEY", "SOME_VENDORS_AUTH_TOKEN", "OUR_PASSWORD"])
def test_what_the_environment_calls_a_secret_is_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SDK finds keys there by itself, so that a provider is not told of them."""
    monkeypatch.setenv(name, "quite-ordinary-words")
    assert "quite-ordinary-words" in environment_secrets()


def test_short_values_of_the_environment_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "none")
    assert "none" not in environment_secrets()


@pytest.mark.parametrize(
    ("stop", "kind"), [("length", "truncated"), ("filtered", "content_filtered"), ("refused", "refused")]
)
def test_an_end_that_is_none_is_an_error_in_the_answer(stop: str, kind: str) -> None:
    error = error_of_stop(stop, provider="p", model="m", partial="so far")
    assert error is not None
    assert (error.kind, error.retryable, error.partial, error.phase) == (kind, False, "so far", "response")


def test_a_good_end_is_no_error() -> None:
    assert error_of_stop("end", provider="p", model="m") is None
    assert error_of_stop("tools", provider="p", model="m") is None


def test_an_exhausted_account_is_told_apart_by_its_error() -> None:
    failure = classify(Facts(402))
    error = model_call_error(failure, provider="p", model="m")
    assert isinstance(error, ThrottleError)
    assert (error.kind, error.retry_safe, math.isclose(error.attempts, 1)) == ("quota_exhausted", False, True)
