"""Every provider keeps the promises of the seam: one suite, six ways, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treenail.providers.anthropic import Anthropic
from treenail.providers.base import Provider
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.testing.provider import ProviderBench, ProviderConformance, StepBench, StepProvider
from treenail.testing.wire import Step, WireServer


class TestOpenAIResponses(ProviderConformance):
    def make_provider(self, server: WireServer) -> Provider:
        return OpenAI("a-model", base_url=server.openai_url, api_key="a-key")


class TestOpenAIChat(ProviderConformance):
    def make_provider(self, server: WireServer) -> Provider:
        return OpenAI("a-model", api="chat", base_url=server.openai_url, api_key="a-key")


class TestAnthropic(ProviderConformance):
    def make_provider(self, server: WireServer) -> Provider:
        return Anthropic("a-model", base_url=server.anthropic_url, api_key="a-key")


class TestLiteLLM(ProviderConformance):
    def make_provider(self, server: WireServer) -> Provider:
        return LiteLLM("openai/a-model", base_url=server.openai_url, api_key="a-key")


class TestLiteLLMOnAnthropic(ProviderConformance):
    many_calls = 100  # LiteLLM takes its time, and the class above makes a thousand of them.

    def make_provider(self, server: WireServer) -> Provider:
        return LiteLLM("anthropic/a-model", base_url=server.anthropic_url, api_key="a-key")


class TestScripted(ProviderConformance):
    @contextmanager
    def open(self, steps: Sequence[Step]) -> Iterator[ProviderBench]:
        yield StepBench(StepProvider(steps))
