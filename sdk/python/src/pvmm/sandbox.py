"""`Sandbox`: a disposable computer with its own kernel, for blocking programs."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Any, Callable, Iterable, Iterator, List, Mapping, Optional, Type, Union

from . import calls
from .calls import Command
from .client import Client, shared
from .code import CodeContext
from .errors import CommandFailed, NotFound
from .filesystem import Filesystem
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


class Sandbox(Described):
    """A computer that is made for one task and thrown away afterwards.

    >>> with Sandbox(template="code-interpreter") as sb:
    ...     sb.run_code("x = 6 * 7")
    ...     twin = sb.fork()
    ...     print(twin.run_code("x").text)
    42

    The computer is there when the constructor returns. It ends with `close()`, at the end of the
    `with` block unless it is persistent, or when its time to live is over.
    """

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
        client: Optional[Client] = None,
    ) -> None:
        """Makes a sandbox.

        `template` names what is installed in it. `ttl_seconds` ends it even if the program dies.
        A `persistent` sandbox stays after the `with` block and sleeps on disk when idle.
        `volumes` takes what `Volume.mount` returns. `egress_allowlist` names the hosts, addresses
        and networks that it may reach; without it there is no network. `from_snapshot` continues
        a snapshot instead of starting from the template.
        """
        self._client = client or shared()
        body = create_body(
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
        self._adopt(State(self._client.send(calls.create(body))))

    def _adopt(self, state: State) -> None:
        self._state = state
        self._address = self._client.address
        self._lock = threading.Lock()
        self.filesystem = Filesystem(self._client, state.id)

    @classmethod
    def _of(cls, client: Client, data: Mapping[str, Any], session: Optional[str] = None) -> Sandbox:
        """Returns the object of a sandbox that exists."""
        self = cls.__new__(cls)
        self._client = client
        self._adopt(State(data, session))
        return self

    #: `Sandbox.create(…)` is `Sandbox(…)`.
    create = Constructor()

    @classmethod
    def get(cls, sandbox_id: str, *, client: Optional[Client] = None) -> Sandbox:
        """Returns a sandbox that exists; raises `NotFound` if there is none of this id."""
        client = client or shared()
        return cls._of(client, client.send(calls.get(sandbox_id)))

    @classmethod
    def list(cls, *, client: Optional[Client] = None) -> List[Sandbox]:
        """Returns every sandbox that has not ended."""
        client = client or shared()
        return [cls._of(client, item) for item in client.send(calls.list_sandboxes())]

    def refresh(self) -> Sandbox:
        """Asks the service how the sandbox is now."""
        self._state.update(self._client.send(calls.get(self.id)))
        return self

    # Commands and code

    def run(
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
            return self.run_code(text, timeout_seconds=timeout_seconds)
        return self.exec(text, timeout_seconds=timeout_seconds)

    def exec(
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
        return checked(self._client.send(call), command, check)

    def exec_stream(
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
        for event in self._client.stream(call):
            written = output.take(event)
            listener = hear[written[0]] if written else None
            if written and listener:
                listener(written[1])
        return output.result().exit_code

    def run_code(
        self, code: str, language: str = "python", timeout_seconds: Optional[float] = None
    ) -> Execution:
        """Runs code and returns what it printed, displayed and raised.

        Python runs in the session of this sandbox, which keeps its variables, also in forks.
        """
        if self._state.language(language) == "shell":
            result = self.exec(["bash", "-c", code], timeout_seconds=timeout_seconds)
            return Execution(**vars(result))
        call = calls.run_in_session(self.id, self._session(), code, timeout_seconds)
        return self._client.send(call)

    def create_code_context(self, language: str = "python") -> CodeContext:
        """Opens a session of its own, beside the one that `run_code` uses."""
        session = self._client.send(calls.open_session(self.id, language))
        return CodeContext(self._client, self.id, session, language)

    def _session(self) -> str:
        with self._lock:
            if self._state.session is None:
                self._state.session = self._client.send(calls.open_session(self.id, "python"))
            return self._state.session

    def logs(self, stream: str = "both", follow: bool = False) -> Iterator[str]:
        """Yields the lines that the sandbox has logged; `follow` waits for more until it ends."""
        call = calls.logs(self.id, stream, follow)
        if not follow:
            yield from self._client.send(call)
            return
        for event in self._client.stream(call):
            yield str(event.fields.get("line", event.data)).rstrip("\n")

    # Time: pause, checkpoints, forks, snapshots

    def pause(self) -> None:
        """Stops the clock of the sandbox; its memory stays."""
        self._client.send(calls.act(self.id, "pause"))

    def resume(self) -> None:
        """Lets a paused sandbox go on."""
        self._client.send(calls.act(self.id, "resume"))

    def hibernate(self) -> None:
        """Writes the sandbox to disk and frees its memory; the next request wakes it."""
        self._client.send(calls.act(self.id, "hibernate"))

    def wake(self) -> None:
        """Brings a hibernated sandbox back at once."""
        self._client.send(calls.act(self.id, "wake"))

    def checkpoint(self, name: Optional[str] = None) -> Checkpoint:
        """Keeps the present of the sandbox, memory and disk, for `rollback()` and `checkout()`.

        Without a name it gets the next number. It is below the checkpoint that the sandbox stands
        on, so that the next one after a `checkout()` is a branch.
        """
        taken = self._client.send(calls.checkpoint(self.id, name))
        self._state.took_checkpoint(taken.name)
        return taken

    def rollback(self) -> None:
        """Goes back to the last checkpoint: what happened since then has not happened.

        Raises `Conflict` if there is no checkpoint.
        """
        self._client.send(calls.act(self.id, "rollback"))
        self._state.went_to(None)

    def checkout(self, name: str) -> None:
        """Goes to any checkpoint, older, newer or of another branch.

        What happened since the last checkpoint is lost. Raises `NotFound` if there is none of this
        name.
        """
        self._client.send(calls.act(self.id, "checkout", {"name": name}))
        self._state.went_to(name)

    def log(self) -> List[Checkpoint]:
        """Returns the checkpoints, oldest first; their parents make them a tree."""
        return self._client.send(calls.checkpoints(self.id))

    def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint; those below it stay."""
        self._client.send(calls.delete_checkpoint(self.id, name))

    def diff(
        self, old: str, new: Optional[str] = None, *, path: str = "/", patch: bool = False
    ) -> FileDiff:
        """Returns the files that differ between two checkpoints, or a checkpoint and the present.

        The sandbox is not touched. `path` is the directory to compare; with `patch` text files have
        the lines that differ.
        """
        return self._client.send(calls.diff(self.id, diff_params(old, new, path, patch)))

    def fork(
        self,
        metadata: Optional[Mapping[str, str]] = None,
        *,
        ttl_seconds: Optional[int] = None,
        volumes: Optional[str] = None,
    ) -> Sandbox:
        """Returns a copy of the running sandbox: memory, processes, files and variables.

        Both go on from here and never see what the other does. `volumes="copy"` gives the child a
        copy of the mounted volumes; without it the child has none.
        """
        data = self._client.send(calls.fork(self.id, fork_body(metadata, ttl_seconds, volumes)))
        return self._of(self._client, data, self._state.session)

    def fork_tree(
        self,
        count: int,
        metadata: Optional[Mapping[str, str]] = None,
        *,
        ttl_seconds: Optional[int] = None,
        volumes: Optional[str] = None,
    ) -> List[Sandbox]:
        """Returns up to sixteen copies of the running sandbox, all of the same moment."""
        body = fork_body(metadata, ttl_seconds, volumes, count)
        children = self._client.send(calls.fork_tree(self.id, body))
        return [self._of(self._client, child, self._state.session) for child in children]

    def promote(
        self, *, cleanup_siblings: bool = False, tree_id: Optional[str] = None
    ) -> Promotion:
        """Makes a child of a fork tree a sandbox of its own, and can end its siblings."""
        return self._client.send(calls.promote(self.id, cleanup_siblings, tree_id))

    def snapshot(self, *, disk_only: bool = False) -> Snapshot:
        """Writes the sandbox to disk as a snapshot, and lets it go on.

        With `disk_only` the snapshot has the files and no memory: it is small, and a sandbox that
        is made from it boots.
        """
        return self._client.send(calls.snapshot(self.id, disk_only))

    # Life

    def lifecycle(self) -> Lifecycle:
        """Returns how long the sandbox may live and how long it has been idle."""
        return self._client.send(calls.lifecycle(self.id))

    def set_ttl(self, seconds: int) -> Lifecycle:
        """Lets the sandbox live for so many seconds from now."""
        return self._client.send(calls.lifecycle(self.id, {"ttl_seconds": seconds}))

    def set_persistent(self, persistent: bool) -> Lifecycle:
        """Says whether the sandbox stays after a `with` block and sleeps on disk when idle."""
        change = self._client.send(calls.lifecycle(self.id, {"persistent": persistent}))
        self._state.persistent = persistent
        return change

    def ports(self) -> List[int]:
        """Returns the TCP ports on which something listens in the sandbox."""
        return self._client.send(calls.ports(self.id))

    def preview(self, port: int, *, public: Optional[bool] = None) -> Preview:
        """Returns the address of a port and the token that opens it.

        With `public`, the port is opened to everyone, or closed again.
        """
        return self._client.send(calls.preview(self.id, port, public))

    def close(self) -> None:
        """Ends the sandbox at once and removes it; does nothing if it has ended."""
        if self._state.closed:
            return
        with contextlib.suppress(NotFound):
            self._client.send(calls.delete(self.id))
        self._state.closed = True

    kill = close

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if not self.persistent:
            self.close()


def checked(result: ExecResult, command: Command, check: bool) -> ExecResult:
    """Returns the result, or raises if the caller asked to be told of a failure."""
    if check and not result.ok:
        last = (result.stderr.strip().splitlines() or ["it wrote no error"])[-1]
        raise CommandFailed(
            f"{command!r} ended with code {result.exit_code}: {last}",
            exit_code=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
        )
    return result
