"""Files of a sandbox. Paths are absolute paths in the sandbox unless a name says `local`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import AsyncIterator, Iterator, List, Tuple, Union

from . import calls
from .client import AsyncClient, Client
from .errors import NotFound
from .results import FileInfo

LocalPath = Union[str, "os.PathLike[str]"]
Step = Tuple[str, List[FileInfo], List[FileInfo]]


def _step(path: str, entries: List[FileInfo]) -> Step:
    folders = [entry for entry in entries if entry.is_dir]
    return path, folders, [entry for entry in entries if not entry.is_dir]


class Filesystem:
    """The files of a sandbox, for blocking programs."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self._client = client
        self._id = sandbox_id

    def read(self, path: str) -> bytes:
        """Returns the content of a file."""
        return self._client.send(calls.read_file(self._id, path))

    def read_text(self, path: str) -> str:
        """Returns the content of a file as text."""
        return self.read(path).decode()

    def write(self, path: str, content: Union[str, bytes]) -> None:
        """Replaces a file, and makes the folders above it."""
        self._client.send(calls.write_file(self._id, path, content))

    def upload(self, local_path: LocalPath, path: str) -> None:
        """Copies a local file into the sandbox."""
        self.write(path, Path(local_path).read_bytes())

    def download(self, path: str, local_path: LocalPath) -> None:
        """Copies a file of the sandbox to a local file."""
        Path(local_path).write_bytes(self.read(path))

    def listdir(self, path: str = "/") -> List[FileInfo]:
        """Returns the entries of a folder."""
        return self._client.send(calls.list_dir(self._id, path))

    def stat(self, path: str) -> FileInfo:
        """Returns what is known of a path; raises `NotFound` if nothing is there."""
        return self._client.send(calls.stat(self._id, path))

    def exists(self, path: str) -> bool:
        """Tells whether something is at a path."""
        try:
            self.stat(path)
        except NotFound:
            return False
        return True

    def walk(self, path: str = "/") -> Iterator[Step]:
        """Yields (folder, its folders, its files) for a folder and all below it, top down."""
        step = _step(path, self.listdir(path))
        yield step
        for folder in step[1]:
            yield from self.walk(folder.path)


class AsyncFilesystem:
    """The files of a sandbox, for asyncio programs."""

    def __init__(self, client: AsyncClient, sandbox_id: str) -> None:
        self._client = client
        self._id = sandbox_id

    async def read(self, path: str) -> bytes:
        """Returns the content of a file."""
        return await self._client.send(calls.read_file(self._id, path))

    async def read_text(self, path: str) -> str:
        """Returns the content of a file as text."""
        return (await self.read(path)).decode()

    async def write(self, path: str, content: Union[str, bytes]) -> None:
        """Replaces a file, and makes the folders above it."""
        await self._client.send(calls.write_file(self._id, path, content))

    async def upload(self, local_path: LocalPath, path: str) -> None:
        """Copies a local file into the sandbox."""
        await self.write(path, Path(local_path).read_bytes())

    async def download(self, path: str, local_path: LocalPath) -> None:
        """Copies a file of the sandbox to a local file."""
        Path(local_path).write_bytes(await self.read(path))

    async def listdir(self, path: str = "/") -> List[FileInfo]:
        """Returns the entries of a folder."""
        return await self._client.send(calls.list_dir(self._id, path))

    async def stat(self, path: str) -> FileInfo:
        """Returns what is known of a path; raises `NotFound` if nothing is there."""
        return await self._client.send(calls.stat(self._id, path))

    async def exists(self, path: str) -> bool:
        """Tells whether something is at a path."""
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def walk(self, path: str = "/") -> AsyncIterator[Step]:
        """Yields (folder, its folders, its files) for a folder and all below it, top down."""
        step = _step(path, await self.listdir(path))
        yield step
        for folder in step[1]:
            async for below in self.walk(folder.path):
                yield below
