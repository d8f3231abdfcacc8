"""A `pvmm serve` whose connections come over standard input and output, for a browser elsewhere.

    page_relay.py PVMM

The first line that it prints has the token. After it, each line in either direction is a piece of a
connection: its number and its bytes in base64; no bytes end it.
"""

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.parse

from server import Server

lock = threading.Lock()


def tell(message: object) -> None:
    with lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def answer(number: int, connection: socket.socket) -> None:
    while data := read(connection):
        tell([number, base64.b64encode(data).decode()])
    tell([number, ""])


def read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def main() -> None:
    # A create that has to bake first may be told to come again.
    bake = [sys.argv[1], "--quiet", "template", "bake", "base"]
    subprocess.run(bake, stdout=subprocess.DEVNULL, check=True)
    with Server(sys.argv[1]) as server:
        place = urllib.parse.urlparse(server.url)
        connections = {}
        tell({"token": server.token})
        for line in sys.stdin:
            number, text = json.loads(line)
            if number not in connections:
                connections[number] = socket.create_connection((place.hostname, place.port))
                threading.Thread(target=answer, args=[number, connections[number]], daemon=True).start()
            try:
                if text:
                    connections[number].sendall(base64.b64decode(text))
                else:
                    connections[number].shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
    # Threads may still wait for clients that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
