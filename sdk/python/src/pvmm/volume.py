"""Named volumes: disks that stay when the sandbox that used them is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from . import calls
from .client import AsyncClient, Client, shared, shared_async
from .errors import Conflict, NotFound


@dataclass(frozen=True)
class Mount:
    """A volume and the folder at which a sandbox sees it."""

    name: str
    path: str
    read_only: bool = False

    def to_json(self) -> Dict[str, Any]:
        return {"name": self.name, "mount_path": self.path, "read_only": self.read_only}


@dataclass(frozen=True)
class _Volume:
    """What is known of a volume."""

    name: str
    size_mb: int
    created_at: str = ""

    def mount(self, path: str, read_only: bool = False) -> Mount:
        """Returns what `Sandbox(volumes=[…])` takes to see this volume at a path.

        One sandbox at a time can write to a volume; any number can read it.
        """
        if not path.startswith("/"):
            raise ValueError(f"the path of a mount begins with '/', which {path!r} does not")
        return Mount(self.name, path, read_only)


def _kept(data: Mapping[str, Any]) -> Dict[str, Any]:
    return {
        "name": str(data["name"]),
        "size_mb": int(data.get("size_mb") or 0),
        "created_at": str(data.get("created_at") or ""),
    }


def _size_mb(size_gb: float) -> int:
    size_mb = int(size_gb * 1024)
    if size_mb <= 0:
        raise ValueError(f"size_gb must be above zero, and is {size_gb}")
    return size_mb


class Volume(_Volume):
    """A named volume, for blocking programs."""

    @classmethod
    def get_or_create(
        cls, name: str, size_gb: float = 10, *, client: Optional[Client] = None
    ) -> Volume:
        """Returns the volume of this name, and makes it if there is none.

        A volume that exists keeps its size.
        """
        try:
            return cls.get(name, client=client)
        except NotFound:
            pass
        try:
            return cls.create(name, size_gb, client=client)
        except Conflict:
            # Somebody else made it between the two requests.
            return cls.get(name, client=client)

    @classmethod
    def create(cls, name: str, size_gb: float = 10, *, client: Optional[Client] = None) -> Volume:
        """Makes a volume; raises `Conflict` if the name is taken."""
        call = calls.create_volume(name, _size_mb(size_gb))
        return cls(**_kept((client or shared()).send(call)))

    @classmethod
    def get(cls, name: str, *, client: Optional[Client] = None) -> Volume:
        """Returns the volume of this name; raises `NotFound` if there is none."""
        return cls(**_kept((client or shared()).send(calls.get_volume(name))))

    @classmethod
    def list(cls, *, client: Optional[Client] = None) -> List[Volume]:
        """Returns every volume."""
        return [cls(**_kept(item)) for item in (client or shared()).send(calls.list_volumes())]

    def delete(self, *, client: Optional[Client] = None) -> None:
        """Deletes the volume and what is on it; raises `Conflict` while a sandbox uses it."""
        (client or shared()).send(calls.delete_volume(self.name))


class AsyncVolume(_Volume):
    """A named volume, for asyncio programs."""

    @classmethod
    async def get_or_create(
        cls, name: str, size_gb: float = 10, *, client: Optional[AsyncClient] = None
    ) -> AsyncVolume:
        """Returns the volume of this name, and makes it if there is none.

        A volume that exists keeps its size.
        """
        try:
            return await cls.get(name, client=client)
        except NotFound:
            pass
        try:
            return await cls.create(name, size_gb, client=client)
        except Conflict:
            return await cls.get(name, client=client)

    @classmethod
    async def create(
        cls, name: str, size_gb: float = 10, *, client: Optional[AsyncClient] = None
    ) -> AsyncVolume:
        """Makes a volume; raises `Conflict` if the name is taken."""
        call = calls.create_volume(name, _size_mb(size_gb))
        return cls(**_kept(await (client or await shared_async()).send(call)))

    @classmethod
    async def get(cls, name: str, *, client: Optional[AsyncClient] = None) -> AsyncVolume:
        """Returns the volume of this name; raises `NotFound` if there is none."""
        return cls(**_kept(await (client or await shared_async()).send(calls.get_volume(name))))

    @classmethod
    async def list(cls, *, client: Optional[AsyncClient] = None) -> List[AsyncVolume]:
        """Returns every volume."""
        found = await (client or await shared_async()).send(calls.list_volumes())
        return [cls(**_kept(item)) for item in found]

    async def delete(self, *, client: Optional[AsyncClient] = None) -> None:
        """Deletes the volume and what is on it; raises `Conflict` while a sandbox uses it."""
        await (client or await shared_async()).send(calls.delete_volume(self.name))
