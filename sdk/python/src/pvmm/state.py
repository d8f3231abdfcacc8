"""What a sandbox object knows of its sandbox, and the rules that need no connection.

The blocking and the asynchronous class both hold it.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Optional, Type, TypeVar, Union
from urllib.parse import urlsplit

from . import calls
from .errors import OutcomeUnknown, ServiceError, from_answer
from .results import ExecResult, Snapshot
from .service import Address
from .sse import Event
from .volume import Mount

DEFAULT_TEMPLATE = "code-interpreter"
#: Templates that are a Python session rather than a shell; `run` follows them.
PYTHON_TEMPLATES = ("python-data",)
PYTHON = ("python", "python3", "py")
SHELL = ("shell", "sh", "bash")

T = TypeVar("T")
VolumeLike = Union[Mount, Mapping[str, Any]]


def create_body(
    *,
    template: str,
    cpu: Optional[int],
    memory_mb: Optional[int],
    ttl_seconds: Optional[int],
    persistent: bool,
    metadata: Optional[Mapping[str, str]],
    env: Optional[Mapping[str, str]],
    volumes: Optional[Iterable[VolumeLike]],
    egress_allowlist: Optional[Iterable[str]],
    from_snapshot: Union[str, Snapshot, None],
) -> Dict[str, Any]:
    """Returns the body of a create; what the caller leaves out keeps the service's default."""
    if isinstance(egress_allowlist, str):
        raise TypeError("egress_allowlist takes a list of names, such as ['pypi.org']")
    source = from_snapshot.id if isinstance(from_snapshot, Snapshot) else from_snapshot
    return calls.without_none(
        template=template,
        cpu=cpu,
        memory_mb=memory_mb,
        ttl_seconds=ttl_seconds,
        persistent=persistent or None,
        metadata=dict(metadata) if metadata else None,
        env=dict(env) if env else None,
        volumes=[_mount(item) for item in volumes] if volumes else None,
        egress_allowlist=None if egress_allowlist is None else list(egress_allowlist),
        from_snapshot=source,
    )


def _mount(volume: VolumeLike) -> Dict[str, Any]:
    if isinstance(volume, Mount):
        return volume.to_json()
    if isinstance(volume, Mapping):
        return dict(volume)
    raise TypeError(f"volumes takes what Volume.mount(path) returns, not {volume!r}")


def fork_body(
    metadata: Optional[Mapping[str, str]],
    ttl_seconds: Optional[int],
    volumes: Optional[str],
    count: Optional[int] = None,
) -> Dict[str, Any]:
    """Returns the body of a fork or a fork tree."""
    if volumes not in (None, "copy", "none"):
        raise ValueError(f"volumes is 'copy' or 'none', not {volumes!r}")
    return calls.without_none(
        count=count,
        metadata=dict(metadata) if metadata else None,
        ttl_seconds=ttl_seconds,
        volumes=volumes,
    )


def diff_params(old: str, new: Optional[str], path: str, patch: bool) -> Dict[str, str]:
    """Returns the query of a diff."""
    params = {"from": old, "path": path, "patch": "true" if patch else "false"}
    return params if new is None else {**params, "to": new}


class State:
    """The last known description of a sandbox, and the session in which its code runs."""

    def __init__(self, data: Mapping[str, Any], session: Optional[str] = None) -> None:
        self.session = session
        # The sessions that there were at the checkpoints, and at the one that the sandbox stands on.
        self.session_at: Dict[str, Optional[str]] = {}
        self.session_at_current: Optional[str] = None
        self.closed = False
        self.update(data)

    def took_checkpoint(self, name: str) -> None:
        """Remembers the session that a checkpoint has."""
        self.session_at[name] = self.session_at_current = self.session

    def went_to(self, name: Optional[str]) -> None:
        """Uses the session of a checkpoint again; of the current one without a name.

        A checkpoint that others have taken has a session that nobody here knows.
        """
        if name is not None:
            self.session_at_current = self.session_at.get(name)
        self.session = self.session_at_current

    def update(self, data: Mapping[str, Any]) -> None:
        self.id = str(data["id"])
        self.template = str(data.get("template") or "")
        self.status = str(data.get("status") or "unknown")
        self.cpu = int(data.get("cpu") or 0)
        self.memory_mb = int(data.get("memory_mb") or 0)
        self.created_at = str(data.get("created_at") or "")
        self.metadata = {str(k): str(v) for k, v in (data.get("metadata") or {}).items()}
        self.persistent = bool(data.get("persistent"))
        self.boot_ms = data.get("boot_ms")

    def language(self, asked: Optional[str]) -> str:
        """Returns "python" or "shell": what the caller asks for, or what the template is for."""
        if asked is None:
            return "python" if self.template in PYTHON_TEMPLATES else "shell"
        if asked.lower() in PYTHON:
            return "python"
        if asked.lower() in SHELL:
            return "shell"
        raise ValueError(f"language is 'python' or 'shell', not {asked!r}")


class Constructor:
    """Gives a class's constructor a second name, with the constructor's own types."""

    def __get__(self, instance: Optional[T], owner: Type[T]) -> Type[T]:
        return owner


class Described:
    """The part of a sandbox object that answers without asking the service."""

    _state: State
    _address: Address

    @property
    def id(self) -> str:
        return self._state.id

    @property
    def template(self) -> str:
        return self._state.template

    @property
    def status(self) -> str:
        """Returns the state as of the last answer; `refresh()` asks again."""
        return self._state.status

    @property
    def cpu(self) -> int:
        return self._state.cpu

    @property
    def memory_mb(self) -> int:
        return self._state.memory_mb

    @property
    def metadata(self) -> Dict[str, str]:
        return dict(self._state.metadata)

    @property
    def persistent(self) -> bool:
        return self._state.persistent

    @property
    def created_at(self) -> str:
        return self._state.created_at

    @property
    def boot_ms(self) -> Optional[float]:
        """Returns the milliseconds that making it took, if the service says so."""
        return self._state.boot_ms

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.id!r}, template={self.template!r}, status={self.status!r})"

    def preview_url(self, port: int, *, host: Optional[str] = None) -> str:
        """Returns the URL of a web server in the sandbox.

        The port needs its token unless it is public: `preview` has both. `host` is the name, and
        port, under which others reach the service.
        """
        return preview_url(self._address, self.id, port, host)


def preview_url(address: Address, sandbox_id: str, port: int, host: Optional[str]) -> str:
    """Returns the URL at which a port of a sandbox can be reached."""
    if not 1 <= port <= 65535:
        raise ValueError(f"port is between 1 and 65535, not {port}")
    parts = urlsplit(address.base_url)
    if host is None:
        name = parts.hostname or "localhost"
        # A label cannot stand before an address, and every name below localhost is this host.
        name = "localhost" if name in ("127.0.0.1", "::1") else name
        host = f"{name}:{parts.port}" if parts.port else name
    return f"{parts.scheme}://{port}-{sandbox_id}.{host}"


class Output:
    """Collects the events of a streamed command until its exit code comes."""

    def __init__(self) -> None:
        self._parts: Dict[str, List[str]] = {"stdout": [], "stderr": []}
        self._exit: Optional[Mapping[str, Any]] = None

    def take(self, event: Event) -> Optional[tuple[str, str]]:
        """Takes an event in; returns the stream and the text if it carries output."""
        if event.name in self._parts:
            text = str(event.fields.get("chunk", ""))
            self._parts[event.name].append(text)
            return event.name, text
        if event.name == "exit":
            self._exit = event.fields
        elif event.name == "error":
            raise self._error(event)
        return None

    def result(self) -> ExecResult:
        """Returns how the command ended; raises `OutcomeUnknown` if no event said it."""
        if self._exit is None or "exit_code" not in self._exit:
            raise OutcomeUnknown(
                "the stream ended without an exit code: the command may have succeeded, failed or "
                "still run",
                stdout=self._text("stdout"),
                stderr=self._text("stderr"),
            )
        ending = {"stdout": self._text("stdout"), "stderr": self._text("stderr")}
        return ExecResult.from_json({**self._exit, **ending})

    def _text(self, stream: str) -> str:
        return "".join(self._parts[stream])

    def _error(self, event: Event) -> Exception:
        error = from_answer(500, {}, event.data.encode())
        if hasattr(error, "stdout"):
            error.stdout, error.stderr = self._text("stdout"), self._text("stderr")  # type: ignore[attr-defined]
        return error if str(error) else ServiceError("the service ended the stream")
