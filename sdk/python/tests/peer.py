"""A small HTTP peer that answers as a test says and remembers what it was asked.

It stands in for a service only where a real one would add nothing: paths, headers, error codes.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, List, Optional, Tuple
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    query: Dict[str, str]
    headers: Dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """One answer to give."""

    status: int = 200
    body: bytes = b""
    headers: Dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Any, status: int = 200, **headers: str) -> Answer:
        return cls(status, json.dumps(data).encode(), headers)


class Peer:
    """Listens on a free port and gives out its answers in order, the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: List[Asked] = []
        self._answers = list(answers)
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                parts = urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                answer = peer.take(
                    Asked(
                        self.command,
                        parts.path,
                        dict(parse_qsl(parts.query)),
                        {key.lower(): value for key, value in self.headers.items()},
                        self.rfile.read(length),
                    )
                )
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def take(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Optional[Tuple[Any, ...]]) -> None:
        self._server.shutdown()
        self._server.server_close()


SANDBOX = {
    "id": "0b0e7c0e-5d5c-4f8f-9a55-6c1d6a4b2f10",
    "template": "code-interpreter",
    "cpu": 2,
    "memory_mb": 1024,
    "status": "running",
    "persistent": False,
    "metadata": {},
}
