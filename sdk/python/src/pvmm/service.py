"""Finds the service that a program talks to, or starts one that ends with the program.

The order is: what the caller says, `PVMM_API` and `PVMM_API_KEY`, `PANDASTACK_API` and
`PANDASTACK_API_KEY`, a running `pvmm serve` of this user or of root, and last a service of our own.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Iterator, Mapping, Optional
from urllib.parse import urlsplit

from .errors import ServiceNotFound

START_SECONDS = 60.0
STOP_SECONDS = 10.0
_PROBE_SECONDS = 1.0
_MAX_LINE = 64 * 1024


@dataclass(frozen=True)
class Address:
    """Where a service is: `http://host:port` or `unix:/path`, and the token that it asks for."""

    url: str
    token: Optional[str] = None

    @property
    def socket_path(self) -> Optional[str]:
        """Returns the path of a Unix socket, or None for an address over TCP."""
        return self.url[len("unix:") :] if self.url.startswith("unix:") else None

    @property
    def base_url(self) -> str:
        """Returns the URL under which the paths of the API are."""
        url = "http://localhost" if self.socket_path else self.url.rstrip("/")
        return url[: -len("/v1")] if url.endswith("/v1") else url


def find(url: Optional[str] = None, token: Optional[str] = None) -> Address:
    """Returns the address of a service; starts one if there is none."""
    address = named(os.environ, url, token) or announced()
    return address if address else own()


def named(
    env: Mapping[str, str], url: Optional[str] = None, token: Optional[str] = None
) -> Optional[Address]:
    """Returns the address that the caller or the environment names."""
    if url:
        return Address(url, token or env.get("PVMM_API_KEY") or env.get("PANDASTACK_API_KEY"))
    for prefix in ("PVMM", "PANDASTACK"):
        if env.get(f"{prefix}_API"):
            return Address(env[f"{prefix}_API"], token or env.get(f"{prefix}_API_KEY"))
    return None


def announced() -> Optional[Address]:
    """Returns the address that a running `pvmm serve` has written down, if it accepts."""
    for path in _announcements():
        address = _read(path)
        if address and _accepts(address):
            return address
    return None


def _announcements() -> Iterator[Path]:
    if os.environ.get("PVMM_RUNTIME_DIR"):
        yield Path(os.environ["PVMM_RUNTIME_DIR"], "serve.json")
        return
    if os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(os.environ["XDG_RUNTIME_DIR"], "pvmm", "serve.json")
    yield Path("/run/pvmm/serve.json")


def _read(path: Path) -> Optional[Address]:
    try:
        with open(path, encoding="utf-8") as file:
            # Another user's file could lead our code and data to that user.
            if os.fstat(file.fileno()).st_uid not in (0, os.geteuid()):
                return None
            return parse(file.read(_MAX_LINE))
    except OSError:
        return None


def parse(line: str) -> Optional[Address]:
    """Parses `{"url": …, "token": …}`; returns None for anything else."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("url"), str):
        return None
    token = fields.get("token")
    return Address(fields["url"], token if isinstance(token, str) else None)


def _accepts(address: Address) -> bool:
    try:
        if address.socket_path:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(_PROBE_SECONDS)
                peer.connect(address.socket_path)
            return True
        parts = urlsplit(address.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), _PROBE_SECONDS).close()
        return True
    except (OSError, ValueError):
        return False


class _Own:
    """The service of this process: started once, shared by all clients, ended at exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._address: Optional[Address] = None

    def address(self) -> Address:
        with self._lock:
            # After os.fork() the service is the parent's: it may end before this process does.
            mine = self._pid == os.getpid() and self._process and self._process.poll() is None
            if mine and self._address:
                return self._address
            self._process, self._address = _start()
            if self._pid != os.getpid():
                atexit.register(self.stop)
            self._pid = os.getpid()
            return self._address

    def stop(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process and self._pid == os.getpid():
            _stop(process)


def _start() -> tuple[subprocess.Popen[bytes], Address]:
    program = os.environ.get("PVMM_BIN") or shutil.which("pvmm")
    if not program:
        raise ServiceNotFound(
            "no pvmm service runs here and there is no program 'pvmm' in PATH: install pvmm, "
            "set PVMM_BIN to it, or set PVMM_API and PVMM_API_KEY to a service elsewhere"
        )
    # The standard error stays a file: a pipe that nobody reads would stop the service when full.
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [program, "serve", "--with-parent", "--listen", "127.0.0.1:0"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Ctrl-C reaches this program first, which then ends its sandboxes in order.
                start_new_session=True,
            )
        except OSError as e:
            raise ServiceNotFound(f"cannot start {program}: {e}") from e
        assert process.stdout is not None
        line = _first_line(process.stdout, time.monotonic() + START_SECONDS)
        address = parse(line) if line else None
        if address is None:
            process.stdout.close()
            _stop(process)
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip() or line or "it said nothing"
            raise ServiceNotFound(f"'{program} serve' did not start: {said[-2000:]}")
    process.stdout.close()
    return process, address


def _first_line(pipe: IO[bytes], deadline: float) -> Optional[str]:
    """Returns the first line of a pipe, or None at its end or at the deadline."""
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while b"\n" not in text and len(text) < _MAX_LINE:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(pipe.fileno(), 4096)
            if not chunk:
                return None
            text += chunk
    return text.partition(b"\n")[0].decode("utf-8", "replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Closes the standard input of a service, which ends it, and ends it by signal if it stays."""
    try:
        if process.stdin:
            process.stdin.close()
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except OSError:
        process.kill()
        process.wait()


_own = _Own()


def own() -> Address:
    """Returns the address of the service that this process runs for itself."""
    return _own.address()
