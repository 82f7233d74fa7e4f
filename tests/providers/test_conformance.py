"""Every provider keeps the promises of the seam: one suite, six ways, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio

from treenail.errors import ModelCallError
from treenail.providers import ModelEvent, ModelRequest, Provider, TextDelta
from treenail.providers.anthropic import Anthropic
from treenail.providers.errors import Facts, classify, model_call_error
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.testing.provider import ProviderBench, ProviderConformance
from treenail.testing.wire import Broken, Fault, Step, WireServer, fault_response


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


class StepProvider(ScriptedProvider):
    """The scripted provider, playing a wire server's steps: one per call, faults and breaks included."""

    def __init__(self, steps: Sequence[Step], *, model: str = "scripted") -> None:
        super().__init__((), model=model)
        self._steps = tuple(steps)
        self.requests: list[ModelRequest] = []
        self.was_closed = False

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Play the next step."""
        self.requests.append(request)
        self.was_closed = True
        step = self._steps[len(self.requests) - 1]
        if isinstance(step, Fault):
            raise self._fault(step)
        if isinstance(step, str):
            step = Answer(step)
        broken = step if isinstance(step, Broken) else None
        answer = step.answer if isinstance(step, Broken) else step
        if broken is not None:
            lines = answer.text.splitlines(keepends=True)[: broken.after]
            answer = replace(answer, text="".join(lines), error=None)
        inner = ScriptedProvider([lambda _: answer], model=self.model, repeat=True)
        said = ""
        async with aclosing(inner.stream(request)) as events:
            async for each in events:
                if broken is not None and not isinstance(each, TextDelta):
                    break
                if isinstance(each, TextDelta):
                    said += each.text
                yield each
        if broken is None:
            self.was_closed = False
        elif broken.how == "hang":
            await anyio.sleep_forever()
        else:
            raise self._cut(broken, said)

    def _fault(self, fault: Fault) -> ModelCallError:
        if fault.kind == "drop":
            facts = Facts(message="the connection was closed")
        else:
            status, body, headers = fault_response("openai.chat", fault)
            error: dict[str, Any] = body["error"]
            code = " ".join(str(error[each]) for each in ("code", "type") if error[each])
            facts = Facts(status, code, error["message"], headers)
        return model_call_error(classify(facts), provider=self.name, model=self.model, facts=facts)

    def _cut(self, broken: Broken, said: str) -> ModelCallError:
        facts = Facts(code="server_error" if broken.how == "error" else "", message="the stream broke")
        return model_call_error(
            classify(facts), provider=self.name, model=self.model, facts=facts, partial=said
        )


@dataclass
class StepBench(ProviderBench):
    """A provider that plays the steps itself."""

    provider: StepProvider

    @property
    def calls(self) -> int:
        """How many calls were made."""
        return len(self.provider.requests)

    def saw(self, text: str) -> bool:
        """Whether the newest request holds a text."""
        return text in repr(self.provider.requests[-1])

    def wait_closed(self) -> bool:
        """Whether the newest call was left before its end."""
        return self.provider.was_closed


class TestScripted(ProviderConformance):
    @contextmanager
    def open(self, steps: Sequence[Step]) -> Iterator[ProviderBench]:
        yield StepBench(StepProvider(steps))
