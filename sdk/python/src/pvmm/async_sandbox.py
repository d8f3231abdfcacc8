"""`AsyncSandbox`: a disposable computer with its own kernel, for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import (
    Any,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    List,
    Mapping,
    Optional,
    Type,
    Union,
)

from . import calls
from .calls import Command
from .client import AsyncClient, shared_async
from .code import AsyncCodeContext
from .errors import NotFound
from .filesystem import AsyncFilesystem
from .results import (
    Checkpoint,
    ExecResult,
    Execution,
    FileDiff,
    Lifecycle,
    Preview,
    Promotion,
    Snapshot,
)
from .sandbox import checked
from .state import (
    DEFAULT_TEMPLATE,
    Constructor,
    Described,
    Output,
    State,
    VolumeLike,
    create_body,
    diff_params,
    fork_body,
)


class AsyncSandbox(Described):
    """A computer that is made for one task and thrown away afterwards.

    >>> async with AsyncSandbox(template="code-interpreter") as sb:
    ...     await sb.run_code("x = 6 * 7")
    ...     twin = await sb.fork()
    ...     print((await twin.run_code("x")).text)
    42

    The computer is made by `async with`, or by `sb = await AsyncSandbox(…)`.
    """

    filesystem: AsyncFilesystem

    def __init__(
        self,
        template: str = DEFAULT_TEMPLATE,
        *,
        cpu: Optional[int] = None,
        memory_mb: Optional[int] = None,
        ttl_seconds: Optional[int] = None,
        persistent: bool = False,
        metadata: Optional[Mapping[str, str]] = None,
        env: Optional[Mapping[str, str]] = None,
        volumes: Optional[Iterable[VolumeLike]] = None,
        egress_allowlist: Optional[Iterable[str]] = None,
        from_snapshot: Union[str, Snapshot, None] = None,
        client: Optional[AsyncClient] = None,
    ) -> None:
        """Describes a sandbox; the options are those of `Sandbox`."""
        self._given = client
        self._body = create_body(
            template=template,
            cpu=cpu,
            memory_mb=memory_mb,
            ttl_seconds=ttl_seconds,
            persistent=persistent,
            metadata=metadata,
            env=env,
            volumes=volumes,
            egress_allowlist=egress_allowlist,
            from_snapshot=from_snapshot,
        )

    #: `await AsyncSandbox.create(…)` is `await AsyncSandbox(…)`.
    create = Constructor()

    def __await__(self) -> Generator[Any, None, AsyncSandbox]:
        return self._make().__await__()

    async def _make(self) -> AsyncSandbox:
        client = self._given or await shared_async()
        self._adopt(client, State(await client.send(calls.create(self._body))))
        return self

    def _adopt(self, client: AsyncClient, state: State) -> None:
        self._client = client
        self._state = state
        self._address = client.address
        self._lock = asyncio.Lock()
        self.filesystem = AsyncFilesystem(client, state.id)

    @classmethod
    def _of(
        cls, client: AsyncClient, data: Mapping[str, Any], session: Optional[str] = None
    ) -> AsyncSandbox:
        """Returns the object of a sandbox that exists."""
        self = cls.__new__(cls)
        self._adopt(client, State(data, session))
        return self

    @classmethod
    async def get(cls, sandbox_id: str, *, client: Optional[AsyncClient] = None) -> AsyncSandbox:
        """Returns a sandbox that exists; raises `NotFound` if there is none of this id."""
        client = client or await shared_async()
        return cls._of(client, await client.send(calls.get(sandbox_id)))

    @classmethod
    async def list(cls, *, client: Optional[AsyncClient] = None) -> List[AsyncSandbox]:
        """Returns every sandbox that has not ended."""
        client = client or await shared_async()
        return [cls._of(client, item) for item in await client.send(calls.list_sandboxes())]

    async def refresh(self) -> AsyncSandbox:
        """Asks the service how the sandbox is now."""
        self._state.update(await self._client.send(calls.get(self.id)))
        return self

    # Commands and code

    async def run(
        self,
        text: str,
        *,
        language: Optional[str] = None,
        timeout_seconds: Optional[float] = None,
    ) -> ExecResult:
        """Runs a line in the language of the template: Python in `python-data`, else shell.

        Python keeps its variables between calls and in forks; `language` overrides the template.
        """
        if self._state.language(language) == "python":
            return await self.run_code(text, timeout_seconds=timeout_seconds)
        return await self.exec(text, timeout_seconds=timeout_seconds)

    async def exec(
        self,
        command: Command,
        timeout_seconds: Optional[float] = None,
        check: bool = False,
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        user: Optional[str] = None,
        stdin: Optional[str] = None,
    ) -> ExecResult:
        """Runs a command and returns what it wrote and how it ended.

        A string is a line for a shell; a list is run as it is. `check` raises `CommandFailed` for
        an exit code other than zero. Raises `CommandTimeout` when the time is over.
        """
        call = calls.exec_(
            self.id,
            command,
            timeout_seconds=timeout_seconds,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
        )
        return checked(await self._client.send(call), command, check)

    async def exec_stream(
        self,
        command: Command,
        on_stdout: Optional[Callable[[str], None]] = None,
        on_stderr: Optional[Callable[[str], None]] = None,
        timeout_seconds: Optional[float] = None,
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        user: Optional[str] = None,
        stdin: Optional[str] = None,
    ) -> int:
        """Runs a command, hands over its output as it comes, and returns its exit code.

        Raises `OutcomeUnknown` if the stream ends before the exit code comes.
        """
        call = calls.exec_(
            self.id,
            command,
            timeout_seconds=timeout_seconds,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            stream=True,
        )
        output, hear = Output(), {"stdout": on_stdout, "stderr": on_stderr}
        async for event in self._client.stream(call):
            written = output.take(event)
            listener = hear[written[0]] if written else None
            if written and listener:
                listener(written[1])
        return output.result().exit_code

    async def run_code(
        self, code: str, language: str = "python", timeout_seconds: Optional[float] = None
    ) -> Execution:
        """Runs code and returns what it printed, displayed and raised.

        Python runs in the session of this sandbox, which keeps its variables, also in forks.
        """
        if self._state.language(language) == "shell":
            result = await self.exec(["bash", "-c", code], timeout_seconds=timeout_seconds)
            return Execution(**vars(result))
        call = calls.run_in_session(self.id, await self._session(), code, timeout_seconds)
        return await self._client.send(call)

    async def create_code_context(self, language: str = "python") -> AsyncCodeContext:
        """Opens a session of its own, beside the one that `run_code` uses."""
        session = await self._client.send(calls.open_session(self.id, language))
        return AsyncCodeContext(self._client, self.id, session, language)

    async def _session(self) -> str:
        async with self._lock:
            if self._state.session is None:
                session = await self._client.send(calls.open_session(self.id, "python"))
                self._state.session = session
            return self._state.session

    async def logs(self, stream: str = "both", follow: bool = False) -> AsyncIterator[str]:
        """Yields the lines that the sandbox has logged; `follow` waits for more until it ends."""
        call = calls.logs(self.id, stream, follow)
        if not follow:
            for line in await self._client.send(call):
                yield line
            return
        async for event in self._client.stream(call):
            yield str(event.fields.get("line", event.data)).rstrip("\n")

    # Time: pause, checkpoints, forks, snapshots

    async def pause(self) -> None:
        """Stops the clock of the sandbox; its memory stays."""
        await self._client.send(calls.act(self.id, "pause"))

    async def resume(self) -> None:
        """Lets a paused sandbox go on."""
        await self._client.send(calls.act(self.id, "resume"))

    async def hibernate(self) -> None:
        """Writes the sandbox to disk and frees its memory; the next request wakes it."""
        await self._client.send(calls.act(self.id, "hibernate"))

    async def wake(self) -> None:
        """Brings a hibernated sandbox back at once."""
        await self._client.send(calls.act(self.id, "wake"))

    async def checkpoint(self, name: Optional[str] = None) -> Checkpoint:
        """Keeps the present of the sandbox, memory and disk, for `rollback()` and `checkout()`.

        Without a name it gets the next number. It is below the checkpoint that the sandbox stands
        on, so that the next one after a `checkout()` is a branch.
        """
        taken = await self._client.send(calls.checkpoint(self.id, name))
        self._state.took_checkpoint(taken.name)
        return taken

    async def rollback(self) -> None:
        """Goes back to the last checkpoint: what happened since then has not happened.

        Raises `Conflict` if there is no checkpoint.
        """
        await self._client.send(calls.act(self.id, "rollback"))
        self._state.went_to(None)

    async def checkout(self, name: str) -> None:
        """Goes to any checkpoint, older, newer or of another branch.

        What happened since the last checkpoint is lost. Raises `NotFound` if there is none of this
        name.
        """
        await self._client.send(calls.act(self.id, "checkout", {"name": name}))
        self._state.went_to(name)

    async def log(self) -> List[Checkpoint]:
        """Returns the checkpoints, oldest first; their parents make them a tree."""
        return await self._client.send(calls.checkpoints(self.id))

    async def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint; those below it stay."""
        await self._client.send(calls.delete_checkpoint(self.id, name))

    async def diff(
        self, old: str, new: Optional[str] = None, *, path: str = "/", patch: bool = False
    ) -> FileDiff:
        """Returns the files that differ between two checkpoints, or a checkpoint and the present.

        The sandbox is not touched. `path` is the directory to compare; with `patch` text files have
        the lines that differ.
        """
        return await self._client.send(calls.diff(self.id, diff_params(old, new, path, patch)))

    async def fork(
        self,
        metadata: Optional[Mapping[str, str]] = None,
        *,
        ttl_seconds: Optional[int] = None,
        volumes: Optional[str] = None,
    ) -> AsyncSandbox:
        """Returns a copy of the running sandbox: memory, processes, files and variables.

        Both go on from here and never see what the other does. `volumes="copy"` gives the child a
        copy of the mounted volumes; without it the child has none.
        """
        body = fork_body(metadata, ttl_seconds, volumes)
        data = await self._client.send(calls.fork(self.id, body))
        return self._of(self._client, data, self._state.session)

    async def fork_tree(
        self,
        count: int,
        metadata: Optional[Mapping[str, str]] = None,
        *,
        ttl_seconds: Optional[int] = None,
        volumes: Optional[str] = None,
    ) -> List[AsyncSandbox]:
        """Returns up to sixteen copies of the running sandbox, all of the same moment."""
        body = fork_body(metadata, ttl_seconds, volumes, count)
        children = await self._client.send(calls.fork_tree(self.id, body))
        return [self._of(self._client, child, self._state.session) for child in children]

    async def promote(
        self, *, cleanup_siblings: bool = False, tree_id: Optional[str] = None
    ) -> Promotion:
        """Makes a child of a fork tree a sandbox of its own, and can end its siblings."""
        return await self._client.send(calls.promote(self.id, cleanup_siblings, tree_id))

    async def snapshot(self, *, disk_only: bool = False) -> Snapshot:
        """Writes the sandbox to disk as a snapshot, and lets it go on.

        With `disk_only` the snapshot has the files and no memory: it is small, and a sandbox that
        is made from it boots.
        """
        return await self._client.send(calls.snapshot(self.id, disk_only))

    # Life

    async def lifecycle(self) -> Lifecycle:
        """Returns how long the sandbox may live and how long it has been idle."""
        return await self._client.send(calls.lifecycle(self.id))

    async def set_ttl(self, seconds: int) -> Lifecycle:
        """Lets the sandbox live for so many seconds from now."""
        return await self._client.send(calls.lifecycle(self.id, {"ttl_seconds": seconds}))

    async def set_persistent(self, persistent: bool) -> Lifecycle:
        """Says whether the sandbox stays after the block and sleeps on disk when idle."""
        change = await self._client.send(calls.lifecycle(self.id, {"persistent": persistent}))
        self._state.persistent = persistent
        return change

    async def ports(self) -> List[int]:
        """Returns the TCP ports on which something listens in the sandbox."""
        return await self._client.send(calls.ports(self.id))

    async def preview(self, port: int, *, public: Optional[bool] = None) -> Preview:
        """Returns the address of a port and the token that opens it.

        With `public`, the port is opened to everyone, or closed again.
        """
        return await self._client.send(calls.preview(self.id, port, public))

    async def close(self) -> None:
        """Ends the sandbox at once and removes it; does nothing if it has ended."""
        if self._state.closed:
            return
        with contextlib.suppress(NotFound):
            await self._client.send(calls.delete(self.id))
        self._state.closed = True

    kill = close

    async def __aenter__(self) -> AsyncSandbox:
        # An object that `await` or `fork` has returned is a sandbox already.
        return self if hasattr(self, "_state") else await self._make()

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if not self.persistent:
            await self.close()
