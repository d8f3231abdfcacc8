"""Disposable computers for AI agents.

>>> from pvmm import Sandbox
>>> with Sandbox(template="code-interpreter") as sb:
...     print(sb.run_code("print(6 * 7)").stdout)
42

The package talks to a running `pvmm serve`, or starts one that ends with the program.
"""

from .async_sandbox import AsyncSandbox
from .client import AsyncClient, Client
from .code import AsyncCodeContext, CodeContext
from .errors import (
    AuthError,
    CommandFailed,
    CommandTimeout,
    Conflict,
    ConnectionLost,
    InvalidRequest,
    LimitReached,
    NotFound,
    NotSupported,
    OutcomeUnknown,
    OutOfCapacity,
    PvmmError,
    ServiceError,
    ServiceNotFound,
)
from .filesystem import AsyncFilesystem, Filesystem
from .results import (
    Checkpoint,
    ExecResult,
    Execution,
    FileChange,
    FileDiff,
    FileInfo,
    Lifecycle,
    Preview,
    Promotion,
    Result,
    Snapshot,
)
from .sandbox import Sandbox
from .volume import AsyncVolume, Mount, Volume

__all__ = [
    "AsyncClient",
    "AsyncCodeContext",
    "AsyncFilesystem",
    "AsyncSandbox",
    "AsyncVolume",
    "AuthError",
    "Checkpoint",
    "Client",
    "CodeContext",
    "CommandFailed",
    "CommandTimeout",
    "Conflict",
    "ConnectionLost",
    "ExecResult",
    "Execution",
    "FileChange",
    "FileDiff",
    "FileInfo",
    "Filesystem",
    "InvalidRequest",
    "Lifecycle",
    "LimitReached",
    "Mount",
    "NotFound",
    "NotSupported",
    "OutOfCapacity",
    "OutcomeUnknown",
    "Preview",
    "Promotion",
    "PvmmError",
    "Result",
    "Sandbox",
    "ServiceError",
    "ServiceNotFound",
    "Snapshot",
    "Volume",
]

__version__ = "0.1.0"
