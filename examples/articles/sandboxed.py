"""`tempfile`, `pathlib` and `subprocess` as far as the next program uses them, in a sandbox.

A folder that `tempfile.mkdtemp` returns is in a sandbox of its own, and its name says in which:
`pvmm://<id>/<path>`. Paths below it and commands that run in it go there too.
"""

from __future__ import annotations

import posixpath
import subprocess as host
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Tuple

import pvmm

SCHEME = "pvmm://"
_sandboxes: Dict[str, pvmm.Sandbox] = {}


def close_all() -> None:
    """Ends every sandbox that this module has made."""
    while _sandboxes:
        _sandboxes.popitem()[1].close()


def _locate(name: str) -> Tuple[pvmm.Sandbox, str]:
    sandbox_id, _, path = name[len(SCHEME) :].partition("/")
    return _sandboxes[sandbox_id], f"/{path}"


def _mkdtemp() -> str:
    sandbox = pvmm.Sandbox(template="code-interpreter", ttl_seconds=600)
    _sandboxes[sandbox.id] = sandbox
    folder = sandbox.exec(["mktemp", "-d"], check=True).stdout.strip()
    return f"{SCHEME}{sandbox.id}{folder}"


class Path:
    """A path in a sandbox."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __truediv__(self, part: str) -> Path:
        return Path(posixpath.join(self._name, part))

    def __str__(self) -> str:
        return self._name

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        sandbox, path = _locate(self._name)
        sandbox.filesystem.write(path, text.encode(encoding))

    def iterdir(self) -> Iterator[Path]:
        sandbox, path = _locate(self._name)
        return iter([self / entry.name for entry in sandbox.filesystem.listdir(path)])

    def is_file(self) -> bool:
        sandbox, path = _locate(self._name)
        return not sandbox.filesystem.stat(path).is_dir

    def unlink(self) -> None:
        sandbox, path = _locate(self._name)
        sandbox.exec(["rm", "--", path], check=True)


def _run(
    args: List[str], *, capture_output: bool, text: bool, timeout: float, cwd: str
) -> host.CompletedProcess[str]:
    assert capture_output and text
    sandbox, folder = _locate(cwd)
    words = [_locate(word)[1] if word.startswith(SCHEME) else word for word in args]
    try:
        ran = sandbox.exec(words, timeout_seconds=timeout, cwd=folder)
    except pvmm.CommandTimeout as late:
        raise host.TimeoutExpired(args, timeout, late.stdout, late.stderr) from late
    return host.CompletedProcess(args, ran.exit_code, ran.stdout, ran.stderr)


tempfile: Any = SimpleNamespace(mkdtemp=_mkdtemp)
subprocess: Any = SimpleNamespace(run=_run, TimeoutExpired=host.TimeoutExpired)
