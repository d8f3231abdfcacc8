"""The connection to a service: sends calls, follows streams, waits when there is no room.

There is one class for blocking programs and one for asyncio. Most programs need neither by name,
because sandboxes use a shared client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
import weakref
from typing import Any, AsyncIterator, Dict, Iterator, Optional, TypeVar

import httpx

from . import service
from .calls import Call
from .errors import ConnectionLost, PvmmError, ServiceError, from_answer
from .sse import Decoder, Event

T = TypeVar("T")

TIMEOUT_SECONDS = 60.0
RETRY_SECONDS = 60.0
_MAX_PAUSE_SECONDS = 15.0


def pause_before_retry(
    error: PvmmError, attempt: int, elapsed: float, budget: float
) -> Optional[float]:
    """Returns the seconds to wait before a create is sent again, or None to give up.

    Only refusals that the service sends before it has made anything are worth a retry: too many
    requests or no room, each with a Retry-After, and a host that is full.
    """
    if error.status not in (429, 503, 507):
        return None
    if error.retry_after is None and error.status != 507:
        return None
    most = min(_MAX_PAUSE_SECONDS, 2.0**attempt)
    pause = (error.retry_after or 0.5) + random.uniform(0, most)
    return pause if elapsed + pause <= budget else None


class _Base:
    """What both clients share: the address, the headers and the meaning of answers."""

    def __init__(self, address: service.Address, timeout: float, retry_seconds: float) -> None:
        self.address = address
        self.timeout = timeout
        self.retry_seconds = retry_seconds

    def _options(self) -> Dict[str, Any]:
        headers = {"User-Agent": "pvmm-python", "Accept": "application/json"}
        if self.address.token:
            headers["Authorization"] = f"Bearer {self.address.token}"
        return {
            "base_url": self.address.base_url,
            "headers": headers,
            # Proxies of the environment are for other hosts than a service on this one.
            "trust_env": self.address.socket_path is None and not _is_local(self.address.url),
            # Reading the host's certificates takes longer than a fork, and plain HTTP needs none.
            "verify": self.address.base_url.startswith("https:"),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=32),
        }

    def _request(self, call: Call[Any]) -> Dict[str, Any]:
        silence = self.timeout if call.timeout is None else call.timeout
        return {
            "method": call.method,
            "url": call.path,
            "json": call.json,
            "params": call.params,
            "content": call.content,
            "timeout": httpx.Timeout(self.timeout, read=silence),
        }

    def _lost(self, error: Exception) -> ConnectionLost:
        what = str(error) or type(error).__name__
        return ConnectionLost(f"no answer from the service at {self.address.url}: {what}")


def _is_local(url: str) -> bool:
    return httpx.URL(url).host in ("127.0.0.1", "::1", "localhost")


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.status_code >= 400:
        raise from_answer(answer.status_code, answer.headers, answer.content)
    return answer


def _read(call: Call[T], answer: httpx.Response) -> T:
    try:
        return call.read(answer)
    except (KeyError, TypeError, ValueError) as e:
        what = f"{call.method} {call.path}"
        message = f"the answer to {what} is not as expected ({e!r}); is the service a pvmm?"
        raise ServiceError(message, status=answer.status_code) from e


class Client(_Base):
    """A connection for blocking programs; safe to share between threads."""

    def __init__(
        self,
        url: Optional[str] = None,
        token: Optional[str] = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        super().__init__(service.find(url, token), timeout, retry_seconds)
        path = self.address.socket_path
        transport = httpx.HTTPTransport(uds=path, verify=False) if path else None
        self._http = httpx.Client(transport=transport, **self._options())

    def send(self, call: Call[T]) -> T:
        """Sends a call and returns what its answer says."""
        start, attempt = time.monotonic(), 0
        while True:
            try:
                return _read(call, _checked(self._http.request(**self._request(call))))
            except httpx.HTTPError as e:
                raise self._lost(e) from e
            except PvmmError as e:
                elapsed = time.monotonic() - start
                pause = pause_before_retry(e, attempt, elapsed, self.retry_seconds)
                if not call.again or pause is None:
                    raise
            time.sleep(pause)
            attempt += 1

    def stream(self, call: Call[Any]) -> Iterator[Event]:
        """Sends a call and yields the events of its answer."""
        decoder = Decoder()
        try:
            with self._http.stream(**self._request(call)) as answer:
                if answer.status_code >= 400:
                    answer.read()
                _checked(answer)
                for chunk in answer.iter_bytes():
                    yield from decoder.feed(chunk)
        except httpx.HTTPError as e:
            raise self._lost(e) from e

    def close(self) -> None:
        """Closes the connections; the sandboxes stay."""
        self._http.close()


class AsyncClient(_Base):
    """A connection for asyncio programs; belongs to the event loop in which it is first used."""

    def __init__(
        self,
        address: service.Address,
        *,
        timeout: float = TIMEOUT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        super().__init__(address, timeout, retry_seconds)
        path = self.address.socket_path
        transport = httpx.AsyncHTTPTransport(uds=path, verify=False) if path else None
        self._http = httpx.AsyncClient(transport=transport, **self._options())

    @classmethod
    async def connect(cls, url: Optional[str] = None, token: Optional[str] = None) -> AsyncClient:
        """Finds a service, or starts one, without holding up the event loop."""
        return cls(await asyncio.to_thread(service.find, url, token))

    async def send(self, call: Call[T]) -> T:
        """Sends a call and returns what its answer says."""
        start, attempt = time.monotonic(), 0
        while True:
            try:
                return _read(call, _checked(await self._http.request(**self._request(call))))
            except httpx.HTTPError as e:
                raise self._lost(e) from e
            except PvmmError as e:
                elapsed = time.monotonic() - start
                pause = pause_before_retry(e, attempt, elapsed, self.retry_seconds)
                if not call.again or pause is None:
                    raise
            await asyncio.sleep(pause)
            attempt += 1

    async def stream(self, call: Call[Any]) -> AsyncIterator[Event]:
        """Sends a call and yields the events of its answer."""
        decoder = Decoder()
        try:
            async with self._http.stream(**self._request(call)) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                _checked(answer)
                async for chunk in answer.aiter_bytes():
                    for event in decoder.feed(chunk):
                        yield event
        except httpx.HTTPError as e:
            raise self._lost(e) from e

    async def close(self) -> None:
        """Closes the connections; the sandboxes stay."""
        await self._http.aclose()


_lock = threading.Lock()
_shared: Optional[Client] = None
_shared_pid = 0
_shared_async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = (
    weakref.WeakKeyDictionary()
)


def shared() -> Client:
    """Returns the client of this process, made when it is first needed."""
    global _shared, _shared_pid
    with _lock:
        # Connections must not be used by two processes.
        if _shared is None or _shared_pid != os.getpid():
            _shared, _shared_pid = Client(), os.getpid()
        return _shared


async def shared_async() -> AsyncClient:
    """Returns the client of the running event loop, made when it is first needed."""
    loop = asyncio.get_running_loop()
    if loop not in _shared_async:
        client = await AsyncClient.connect()
        # Another task may have been faster.
        if _shared_async.setdefault(loop, client) is not client:
            with contextlib.suppress(Exception):
                await client.close()
    return _shared_async[loop]
