"""Server-sent events: the form in which the service streams output and logs.

The decoder works on bytes, because a text line splitter would also split at characters that are
part of the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Iterator, List, Mapping


@dataclass(frozen=True)
class Event:
    """One event: its name, and its data as it was sent."""

    name: str
    data: str

    @property
    def fields(self) -> Mapping[str, Any]:
        """Returns the data as a JSON object, or an empty one if it is none."""
        try:
            fields = json.loads(self.data)
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) else {}


class Decoder:
    """Turns chunks of bytes, cut anywhere, into whole events."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: List[str] = []

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yields the events that the chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r").decode("utf-8", "replace")
            if not line:
                if self._data:
                    yield Event(self._name, "\n".join(self._data))
                self._name, self._data = "", []
                continue
            key, _, value = line.partition(":")
            value = value[1:] if value.startswith(" ") else value
            if key == "event":
                self._name = value
            elif key == "data":
                self._data.append(value)
