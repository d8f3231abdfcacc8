"""The errors of this package, and the rule that turns an HTTP answer into one of them.

Every error is a `PvmmError`, so that a program can catch all of them with one name. The message is
the service's own line, which names the field and the fix.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, Optional


class PvmmError(Exception):
    """Base of all errors of this package.

    `status` is the HTTP status of the refusal, or None if there was no answer. `retry_after` is the
    number of seconds that the service asks to wait, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: Optional[int] = None,
        retry_after: Optional[float] = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ServiceNotFound(PvmmError):
    """No service runs here, and none could be started."""


class ConnectionLost(PvmmError):
    """The service did not answer, or stopped answering; what was asked may have happened."""


class AuthError(PvmmError):
    """The token is missing, wrong, or not allowed to do this."""


class NotFound(PvmmError):
    """There is no such sandbox, file, session, snapshot, template or volume."""


class InvalidRequest(PvmmError):
    """A value that the caller gave is wrong."""


class Conflict(PvmmError):
    """The thing exists but its state forbids the request; a paused sandbox runs no command."""


class LimitReached(PvmmError):
    """The token has used up a limit: sandboxes, memory, or requests a second."""


class OutOfCapacity(PvmmError):
    """The host has no memory or disk for this now; nothing was created."""


class NotSupported(PvmmError):
    """The service does not offer this."""


class ServiceError(PvmmError):
    """The service failed."""


class CommandTimeout(PvmmError):
    """A command or a piece of code ran out of its time and was ended.

    `stdout` and `stderr` hold what it had written until then.
    """

    def __init__(
        self, message: str, *, stdout: str = "", stderr: str = "", status: Optional[int] = None
    ) -> None:
        super().__init__(message, status=status)
        self.stdout = stdout
        self.stderr = stderr


class CommandFailed(PvmmError):
    """A command ended with a code other than zero, and the caller had asked to be told."""

    def __init__(self, message: str, *, exit_code: int, stdout: str, stderr: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr


class OutcomeUnknown(PvmmError):
    """The stream of a command ended before its exit code came.

    The command may have succeeded, failed, or still run. `stdout` and `stderr` hold what came.
    """

    def __init__(self, message: str, *, stdout: str, stderr: str) -> None:
        super().__init__(message)
        self.stdout = stdout
        self.stderr = stderr


_BY_STATUS: Mapping[int, type[PvmmError]] = {
    401: AuthError,
    403: AuthError,
    404: NotFound,
    409: Conflict,
    429: LimitReached,
    501: NotSupported,
    503: OutOfCapacity,
    507: OutOfCapacity,
}


def from_answer(status: int, headers: Mapping[str, str], body: bytes) -> PvmmError:
    """Returns the error that an HTTP answer of 400 or above stands for."""
    fields = _fields(body)
    message = _message(status, fields, body)
    if fields.get("timed_out") or (status >= 500 and "timeout" in message.lower()):
        return CommandTimeout(
            message,
            status=status,
            stdout=str(fields.get("stdout") or ""),
            stderr=str(fields.get("stderr") or ""),
        )
    kind = _BY_STATUS.get(status, ServiceError if status >= 500 else InvalidRequest)
    return kind(message, status=status, retry_after=retry_after(headers))


def retry_after(headers: Mapping[str, str]) -> Optional[float]:
    """Returns the seconds of a Retry-After header, or None if there is none in seconds."""
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _message(status: int, fields: Mapping[str, Any], body: bytes) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(fields.get(key), str) and fields[key]:
            return str(fields[key])
    text = body.decode("utf-8", "replace").strip()
    if text and not fields:
        return text.splitlines()[0][:500]
    return f"the service answered with HTTP status {status}"
