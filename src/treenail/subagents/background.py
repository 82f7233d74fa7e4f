"""Tasks that outlive the tool call that started them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from treenail.errors import UsageError

T = TypeVar("T")


class BackgroundTasks:
    """A task group whose tasks run in the context in which the group was entered.

    A task normally inherits the context of the code that starts it. Inside a tool call that context says
    "this belongs to the call", and what the task records would be rolled back with the call.
    """

    def __init__(self) -> None:
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._context = copy_context()
        self._group = await anyio.create_task_group().__aenter__()
        return self

    def start(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> None:
        """Start a task. Raises `UsageError` before the group is entered and after it is left."""
        if self._group is None:
            raise UsageError("background tasks run only inside `async with`; enter the block first")
        self._context.copy().run(partial(self._group.start_soon, work, *args))

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do some work in a task of the group, wait for it, and return its result or raise its error.

        If the wait is cancelled, the work is cancelled, and the wait ends when the work has.
        """
        scope, is_over = anyio.CancelScope(), anyio.Event()
        results: list[T] = []
        errors: list[Exception] = []

        async def serve() -> None:
            try:
                with scope:
                    results.append(await work())
            except Exception as error:  # noqa: BLE001  # it is raised where the work was asked for
                errors.append(error)
            finally:
                is_over.set()

        self.start(serve)
        try:
            await is_over.wait()
        except BaseException:
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await is_over.wait()
            raise
        if errors:
            raise errors[0]
        if not results:
            # The whole group is being stopped, this wait included: there is no result.
            await anyio.sleep_forever()
        return results[0]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        group, self._group = self._group, None
        assert group is not None
        group.cancel_scope.cancel()
        # The block's own exception is not passed in: the group would wrap it in an exception group.
        await group.__aexit__(None, None, None)
