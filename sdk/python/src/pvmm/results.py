"""What calls return: plain values, made from the service's JSON and never changed afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional

from .errors import CommandTimeout, ServiceError


@dataclass(frozen=True)
class ExecResult:
    """What a command wrote and how it ended.

    `exit_code` is the command's own, or 128 plus the number of the signal that ended it.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    duration_ms: int = 0
    truncated: bool = False

    @property
    def ok(self) -> bool:
        """Tells whether the exit code is zero."""
        return self.exit_code == 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExecResult:
        raise_if_timed_out(data)
        return cls(
            stdout=str(data.get("stdout") or ""),
            stderr=str(data.get("stderr") or ""),
            exit_code=int(data["exit_code"]),
            duration_ms=int(data.get("duration_ms") or 0),
            truncated=bool(data.get("truncated")),
        )


@dataclass(frozen=True)
class Result:
    """One displayed value of a piece of code, in every form in which it can be shown.

    `data` maps MIME types to texts; images are base64.
    """

    data: Dict[str, str]

    @property
    def text(self) -> Optional[str]:
        return self.data.get("text/plain")

    @property
    def html(self) -> Optional[str]:
        return self.data.get("text/html")

    @property
    def markdown(self) -> Optional[str]:
        return self.data.get("text/markdown")

    @property
    def png(self) -> Optional[str]:
        return self.data.get("image/png")

    @property
    def jpeg(self) -> Optional[str]:
        return self.data.get("image/jpeg")

    @property
    def svg(self) -> Optional[str]:
        return self.data.get("image/svg+xml")

    @property
    def json(self) -> Any:
        """Returns the decoded `application/json` form, or None."""
        text = self.data.get("application/json")
        return None if text is None else json.loads(text)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """Accepts a whole bundle, or one form as `{"type": …, "data": …}`."""
        if "type" in data:
            return cls({str(data["type"]): str(data.get("data", ""))})
        return cls({str(mime): str(value) for mime, value in data.items()})


@dataclass(frozen=True)
class Execution(ExecResult):
    """What a piece of code printed, displayed and raised.

    `results` holds the displayed values, the value of the last expression last. `error` is the
    traceback if the code raised; `stderr` then ends with it and `exit_code` is not zero.
    """

    results: List[Result] = field(default_factory=list)
    error: Optional[str] = None

    @property
    def text(self) -> Optional[str]:
        """Returns the first result that has a plain text, or None."""
        return next((r.text for r in self.results if r.text is not None), None)

    @property
    def html(self) -> Optional[str]:
        """Returns the first result that has an HTML form, or None."""
        return next((r.html for r in self.results if r.html is not None), None)

    @property
    def png(self) -> Optional[str]:
        """Returns the first image as base64, or None."""
        return next((r.png for r in self.results if r.png is not None), None)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Execution:
        raise_if_timed_out(data)
        error = str(data["error"]) if data.get("error") else None
        stderr = str(data.get("stderr") or "")
        if error and error.strip() not in stderr:
            stderr = f"{stderr}\n{error}" if stderr else error
        code = int(data.get("exit", data.get("exit_code")) or 0)
        return cls(
            stdout=str(data.get("stdout") or ""),
            stderr=stderr,
            exit_code=code or (1 if error else 0),
            duration_ms=int(data.get("duration_ms") or 0),
            truncated=bool(data.get("truncated")),
            results=[Result.from_json(item) for item in data.get("results") or []],
            error=error,
        )


@dataclass(frozen=True)
class FileInfo:
    """A file or directory of a sandbox. `mtime` is in seconds since 1970."""

    name: str
    path: str
    is_dir: bool
    size: int
    mode: str
    mtime: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any], folder: str) -> FileInfo:
        name = str(data.get("name", ""))
        return cls(
            name=name,
            path=str(data.get("path") or f"{folder.rstrip('/')}/{name}"),
            is_dir=bool(data.get("is_dir")),
            size=int(data.get("size") or 0),
            mode=str(data.get("mode") or ""),
            mtime=int(data.get("mtime") or 0),
        )


@dataclass(frozen=True)
class Snapshot:
    """A kept state of a sandbox; `Sandbox(from_snapshot=snapshot)` starts another from it."""

    id: str
    sandbox_id: str
    template: str
    size_bytes: int
    created_at: str
    disk_only: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        return cls(
            id=str(data["id"]),
            sandbox_id=str(data.get("sandbox_id") or ""),
            template=str(data.get("template") or ""),
            size_bytes=int(data.get("size_bytes") or 0),
            created_at=str(data.get("created_at") or ""),
            disk_only=bool(data.get("disk_only")),
        )


@dataclass(frozen=True)
class Checkpoint:
    """A kept moment of a sandbox, to which `checkout(name)` goes back.

    `parent` is the name of the checkpoint that the sandbox stood on when this one was taken.
    `current` tells whether the sandbox goes on from here.
    """

    name: str
    parent: Optional[str] = None
    created_at: str = ""
    current: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Checkpoint:
        parent = data.get("parent")
        return cls(
            name=str(data["name"]),
            parent=None if parent is None else str(parent),
            created_at=str(data.get("created_at") or ""),
            current=bool(data.get("current")),
        )


@dataclass(frozen=True)
class FileChange:
    """A file that differs between two moments.

    `change` is "added", "changed" or "removed". `what` names what differs of a changed file:
    "kind", "content", "target", "mode", "owner". A size is None where there is no file.
    """

    change: str
    path: str
    kind: str
    old_size: Optional[int] = None
    new_size: Optional[int] = None
    what: List[str] = field(default_factory=list)
    patch: Optional[str] = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileChange:
        old, new = data.get("old"), data.get("new")
        return cls(
            change=str(data["change"]),
            path=str(data["path"]),
            kind=str((new or old or {}).get("kind", "")),
            old_size=int(old["size"]) if old else None,
            new_size=int(new["size"]) if new else None,
            what=[str(word) for word in data.get("what") or []],
            patch=None if data.get("patch") is None else str(data["patch"]),
        )


@dataclass(frozen=True)
class FileDiff:
    """The files that differ between two moments, in the order of their paths.

    The three counts are complete; `left_out` changes beyond the first 10,000 are not listed.
    """

    added: int
    changed: int
    removed: int
    changes: List[FileChange] = field(default_factory=list)
    left_out: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileDiff:
        if "changes" not in data:
            # The service had begun to answer before it failed.
            raise ServiceError(str(data.get("error") or "the service sent no diff"))
        return cls(
            added=int(data.get("added") or 0),
            changed=int(data.get("changed") or 0),
            removed=int(data.get("removed") or 0),
            changes=[FileChange.from_json(item) for item in data["changes"]],
            left_out=int(data.get("left_out") or 0),
        )


@dataclass(frozen=True)
class Lifecycle:
    """How long a sandbox may live. `ttl_seconds` is zero for one without a limit."""

    ttl_seconds: int
    persistent: bool
    idle_seconds: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Lifecycle:
        return cls(
            ttl_seconds=int(data.get("ttl_seconds") or 0),
            persistent=bool(data.get("persistent")),
            idle_seconds=int(data.get("idle_seconds") or 0),
        )


@dataclass(frozen=True)
class Preview:
    """The address of a port. A browser opens `open_url` first; programs send `token` in the header
    `X-Pvmm-Token`."""

    port: int
    public: bool
    url: Optional[str]
    open_url: Optional[str]
    token: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Preview:
        return cls(
            port=int(data["port"]),
            public=bool(data.get("public")),
            url=data.get("url"),
            open_url=data.get("open_url"),
            token=str(data.get("token") or ""),
        )


@dataclass(frozen=True)
class Promotion:
    """What became of a fork tree: the child that stays, the siblings that were ended, and why
    others could not be."""

    winner: str
    tree_id: str
    deleted: List[str]
    failures: Dict[str, str]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Promotion:
        return cls(
            winner=str(data.get("winner") or ""),
            tree_id=str(data.get("tree_id") or ""),
            deleted=[str(item) for item in data.get("deleted") or []],
            failures={str(k): str(v) for k, v in (data.get("failures") or {}).items()},
        )


def raise_if_timed_out(data: Mapping[str, Any]) -> None:
    """Raises for a command that ran out of its time after the service had begun to answer."""
    if data.get("timed_out"):
        raise CommandTimeout(
            str(data.get("error") or "the command ran out of its time"),
            stdout=str(data.get("stdout") or ""),
            stderr=str(data.get("stderr") or ""),
        )
