"""The calls of the API as values: method, path, body, and how to read the answer.

Building them here, without any input or output, lets the blocking and the asynchronous classes
share every path, field name and default.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Callable, Dict, Generic, List, Mapping, Optional, Sequence, TypeVar, Union
from urllib.parse import quote

import httpx

from .results import (
    Checkpoint,
    ExecResult,
    Execution,
    FileDiff,
    FileInfo,
    Lifecycle,
    Preview,
    Promotion,
    Snapshot,
)

T_co = TypeVar("T_co", covariant=True)
Json = Dict[str, Any]
Command = Union[str, Sequence[str]]

#: Seconds that a command without a timeout of its own may be silent before the client gives up.
SILENCE_SECONDS = 3600.0
#: Seconds that the service gets beyond a command's own timeout.
GRACE_SECONDS = 30.0
#: Seconds for calls that write a guest's memory to disk.
SNAPSHOT_SECONDS = 300.0


@dataclass(frozen=True)
class Call(Generic[T_co]):
    """One request, and the function that reads its answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], T_co]
    json: Optional[Json] = None
    params: Optional[Mapping[str, str]] = None
    content: Optional[bytes] = None
    #: Seconds without a byte after which the client gives up; None for the client's own value.
    timeout: Optional[float] = None
    #: Whether a refusal for lack of room means that nothing was made, so that asking again is safe.
    again: bool = False


def nothing(_: httpx.Response) -> None:
    """Reads an answer that carries nothing."""


def fields(answer: httpx.Response) -> Json:
    """Reads a JSON object."""
    return dict(answer.json())


def sandbox(answer: httpx.Response) -> Json:
    """Reads the description of a sandbox, which has an id at least."""
    data = fields(answer)
    found = dict(data.get("sandbox") or data)
    return {**found, "id": found["id"]}


def items(key: str) -> Callable[[httpx.Response], List[Json]]:
    """Reads a list, which may be wrapped in an object under a key."""

    def read(answer: httpx.Response) -> List[Json]:
        data = answer.json()
        found = data.get(key) if isinstance(data, dict) else data
        return [dict(item) for item in found or []]

    return read


def sandbox_path(sandbox_id: str, rest: str = "") -> str:
    return f"/v1/sandboxes/{quote(sandbox_id, safe='')}{rest}"


def without_none(**values: Any) -> Json:
    """Returns the given fields without those that are None, which keep the service's default."""
    return {key: value for key, value in values.items() if value is not None}


# Sandboxes


def create(body: Json) -> Call[Json]:
    return Call("POST", "/v1/sandboxes", sandbox, json=body, again=True)


def list_sandboxes() -> Call[List[Json]]:
    return Call("GET", "/v1/sandboxes", items("items"))


def get(sandbox_id: str) -> Call[Json]:
    return Call("GET", sandbox_path(sandbox_id), sandbox)


def delete(sandbox_id: str) -> Call[None]:
    return Call("DELETE", sandbox_path(sandbox_id), nothing)


def act(sandbox_id: str, verb: str, body: Optional[Json] = None) -> Call[None]:
    """Pause, resume, hibernate, wake, checkout, rollback: a verb that returns nothing."""
    return Call(
        "POST", sandbox_path(sandbox_id, f"/{verb}"), nothing, json=body, timeout=SNAPSHOT_SECONDS
    )


def checkpoint(sandbox_id: str, name: Optional[str]) -> Call[Checkpoint]:
    return Call(
        "POST",
        sandbox_path(sandbox_id, "/checkpoint"),
        lambda answer: Checkpoint.from_json(fields(answer)),
        json=without_none(name=name),
        timeout=SNAPSHOT_SECONDS,
    )


def checkpoints(sandbox_id: str) -> Call[List[Checkpoint]]:
    read = items("items")
    return Call(
        "GET",
        sandbox_path(sandbox_id, "/checkpoints"),
        lambda answer: [Checkpoint.from_json(item) for item in read(answer)],
    )


def delete_checkpoint(sandbox_id: str, name: str) -> Call[None]:
    return Call("DELETE", sandbox_path(sandbox_id, f"/checkpoints/{quote(name, safe='')}"), nothing)


def diff(sandbox_id: str, params: Mapping[str, str]) -> Call[FileDiff]:
    return Call(
        "GET",
        sandbox_path(sandbox_id, "/diff"),
        lambda answer: FileDiff.from_json(fields(answer)),
        params=params,
        timeout=SNAPSHOT_SECONDS,
    )


def fork(sandbox_id: str, body: Json) -> Call[Json]:
    path = sandbox_path(sandbox_id, "/fork")
    return Call("POST", path, sandbox, json=body, timeout=SNAPSHOT_SECONDS, again=True)


def fork_tree(sandbox_id: str, body: Json) -> Call[List[Json]]:
    path = sandbox_path(sandbox_id, "/fork-tree")
    read = items("children")
    return Call("POST", path, read, json=body, timeout=SNAPSHOT_SECONDS, again=True)


def promote(sandbox_id: str, cleanup_siblings: bool, tree_id: Optional[str]) -> Call[Promotion]:
    body = without_none(cleanup_siblings=cleanup_siblings, tree_id=tree_id)
    return Call(
        "POST",
        sandbox_path(sandbox_id, "/promote"),
        lambda answer: Promotion.from_json(fields(answer)),
        json=body,
        timeout=SNAPSHOT_SECONDS,
    )


def snapshot(sandbox_id: str, disk_only: bool) -> Call[Snapshot]:
    return Call(
        "POST",
        sandbox_path(sandbox_id, "/snapshots"),
        lambda answer: Snapshot.from_json(fields(answer)),
        json={"disk_only": True} if disk_only else None,
        timeout=SNAPSHOT_SECONDS,
    )


def lifecycle(sandbox_id: str, change: Optional[Json] = None) -> Call[Lifecycle]:
    return Call(
        "PATCH" if change else "GET",
        sandbox_path(sandbox_id, "/lifecycle"),
        lambda answer: Lifecycle.from_json(fields(answer)),
        json=change,
    )


def ports(sandbox_id: str) -> Call[List[int]]:
    def read(answer: httpx.Response) -> List[int]:
        data = answer.json()
        found = data.get("ports") if isinstance(data, dict) else data
        return [int(item["port"] if isinstance(item, dict) else item) for item in found or []]

    return Call("GET", sandbox_path(sandbox_id, "/ports"), read)


def preview(sandbox_id: str, port: int, public: Optional[bool]) -> Call[Preview]:
    return Call(
        "GET" if public is None else "PUT",
        sandbox_path(sandbox_id, f"/ports/{int(port)}"),
        lambda answer: Preview.from_json(fields(answer)),
        json=None if public is None else {"public": public},
    )


def logs(sandbox_id: str, stream: str, follow: bool) -> Call[List[str]]:
    return Call(
        "GET",
        sandbox_path(sandbox_id, "/logs"),
        lambda answer: answer.text.splitlines(),
        params={"stream": stream, "follow": "true" if follow else "false"},
        timeout=SILENCE_SECONDS if follow else None,
    )


# Commands and code


def exec_(
    sandbox_id: str,
    command: Command,
    *,
    timeout_seconds: Optional[float],
    cwd: Optional[str],
    env: Optional[Mapping[str, str]],
    user: Optional[str],
    stdin: Optional[str],
    stream: bool = False,
) -> Call[ExecResult]:
    line = command if isinstance(command, str) else shlex.join(command)
    body = without_none(
        cmd=line,
        timeout_seconds=timeout_seconds,
        cwd=cwd,
        env=dict(env) if env else None,
        user=user,
        stdin=stdin,
    )
    return Call(
        "POST",
        sandbox_path(sandbox_id, "/exec/stream" if stream else "/exec"),
        lambda answer: ExecResult.from_json(fields(answer)),
        json=body,
        timeout=patience(timeout_seconds),
    )


def patience(timeout_seconds: Optional[float]) -> float:
    """Returns how long the client waits for work that has this timeout in the sandbox."""
    return SILENCE_SECONDS if timeout_seconds is None else timeout_seconds + GRACE_SECONDS


def open_session(sandbox_id: str, language: str) -> Call[str]:
    return Call(
        "POST",
        sandbox_path(sandbox_id, "/repl/sessions"),
        lambda answer: str(fields(answer)["id"]),
        json={"language": language},
    )


def run_in_session(
    sandbox_id: str, session: str, code: str, timeout_seconds: Optional[float]
) -> Call[Execution]:
    timeout_ms = None if timeout_seconds is None else int(timeout_seconds * 1000)
    return Call(
        "POST",
        sandbox_path(sandbox_id, f"/repl/sessions/{quote(session, safe='')}/run"),
        lambda answer: Execution.from_json(fields(answer)),
        json=without_none(code=code, timeout_ms=timeout_ms),
        timeout=patience(timeout_seconds),
    )


def close_session(sandbox_id: str, session: str) -> Call[None]:
    path = sandbox_path(sandbox_id, f"/repl/sessions/{quote(session, safe='')}")
    return Call("DELETE", path, nothing)


# Files


def read_file(sandbox_id: str, path: str) -> Call[bytes]:
    return Call(
        "GET", sandbox_path(sandbox_id, "/fs"), lambda answer: answer.content, params={"path": path}
    )


def write_file(sandbox_id: str, path: str, content: Union[str, bytes]) -> Call[None]:
    data = content.encode() if isinstance(content, str) else bytes(content)
    params = {"path": path}
    return Call("PUT", sandbox_path(sandbox_id, "/fs"), nothing, content=data, params=params)


def list_dir(sandbox_id: str, path: str) -> Call[List[FileInfo]]:
    def read(answer: httpx.Response) -> List[FileInfo]:
        return [FileInfo.from_json(item, path) for item in fields(answer).get("entries") or []]

    return Call("GET", sandbox_path(sandbox_id, "/fs/dir"), read, params={"path": path})


def stat(sandbox_id: str, path: str) -> Call[FileInfo]:
    folder = path.rstrip("/").rpartition("/")[0]

    def read(answer: httpx.Response) -> FileInfo:
        return FileInfo.from_json(fields(answer), folder)

    return Call("GET", sandbox_path(sandbox_id, "/fs/stat"), read, params={"path": path})


# Volumes and snapshots


def volume_path(name: str) -> str:
    return f"/v1/volumes/{quote(name, safe='')}"


def create_volume(name: str, size_mb: int) -> Call[Json]:
    return Call("POST", "/v1/volumes", fields, json={"name": name, "size_mb": size_mb})


def get_volume(name: str) -> Call[Json]:
    return Call("GET", volume_path(name), fields)


def list_volumes() -> Call[List[Json]]:
    return Call("GET", "/v1/volumes", items("items"))


def delete_volume(name: str) -> Call[None]:
    return Call("DELETE", volume_path(name), nothing)


def list_snapshots(sandbox_id: Optional[str]) -> Call[List[Snapshot]]:
    def read(answer: httpx.Response) -> List[Snapshot]:
        return [Snapshot.from_json(item) for item in items("snapshots")(answer)]

    params = {"sandbox_id": sandbox_id} if sandbox_id else None
    return Call("GET", "/v1/snapshots", read, params=params)


def delete_snapshot(snapshot_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/snapshots/{quote(snapshot_id, safe='')}", nothing)
