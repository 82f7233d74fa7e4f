"""Tasks that outlive the tool call that started them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio


class BackgroundTasks:
    """A task group whose tasks run in the context in which the group was entered.

    A task normally inherits the context of the code that starts it. Inside a tool call that context says
    "this belongs to the call", and what the task records would be rolled back with the call.
    """

    async def __aenter__(self) -> Self:
        self._context = copy_context()
        self._group = await anyio.create_task_group().__aenter__()
        return self

    def start(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> None:
        """Start a task."""
        self._context.copy().run(partial(self._group.start_soon, work, *args))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._group.cancel_scope.cancel()
        # The block's own exception is not passed in: the group would wrap it in an exception group.
        await self._group.__aexit__(None, None, None)
