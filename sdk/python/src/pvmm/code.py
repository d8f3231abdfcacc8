"""Code sessions: interpreters in a sandbox that keep their variables between calls."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Optional, Type

from . import calls
from .client import AsyncClient, Client
from .errors import NotFound
from .results import Execution


class CodeContext:
    """One session of an interpreter, for blocking programs.

    A fork of the sandbox has a copy of the session under the same id.
    """

    def __init__(self, client: Client, sandbox_id: str, session: str, language: str) -> None:
        self._client = client
        self._sandbox_id = sandbox_id
        self.id = session
        self.language = language

    def run_code(self, code: str, timeout_seconds: Optional[float] = None) -> Execution:
        """Runs code in this session and returns what it printed, displayed and raised."""
        call = calls.run_in_session(self._sandbox_id, self.id, code, timeout_seconds)
        return self._client.send(call)

    def close(self) -> None:
        """Ends the session."""
        with contextlib.suppress(NotFound):
            self._client.send(calls.close_session(self._sandbox_id, self.id))

    def __enter__(self) -> CodeContext:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


class AsyncCodeContext:
    """One session of an interpreter, for asyncio programs."""

    def __init__(self, client: AsyncClient, sandbox_id: str, session: str, language: str) -> None:
        self._client = client
        self._sandbox_id = sandbox_id
        self.id = session
        self.language = language

    async def run_code(self, code: str, timeout_seconds: Optional[float] = None) -> Execution:
        """Runs code in this session and returns what it printed, displayed and raised."""
        call = calls.run_in_session(self._sandbox_id, self.id, code, timeout_seconds)
        return await self._client.send(call)

    async def close(self) -> None:
        """Ends the session."""
        with contextlib.suppress(NotFound):
            await self._client.send(calls.close_session(self._sandbox_id, self.id))

    async def __aenter__(self) -> AsyncCodeContext:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        await self.close()
