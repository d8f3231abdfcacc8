"""Create and first command, through the service and by the library alone, in turns.

    create.py PVMM LIBRARY ROUNDS MOST_RATIO
"""

import http.client
import json
import statistics
import subprocess
import sys
import time
import urllib.parse

from server import Server


class Client:
    """One connection that stays, as published clients have it."""

    def __init__(self, server: Server) -> None:
        self.connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=120)
        self.headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}

    def call(self, method: str, path: str, body: object = None):
        text = None if body is None else json.dumps(body)
        self.connection.request(method, f"/v1{path}", text, self.headers)
        answer = self.connection.getresponse()
        text = answer.read()
        assert answer.status < 300, (answer.status, text)
        return json.loads(text) if text else None


def by_service(client: Client) -> float:
    begun = time.monotonic()
    sandbox = client.call("POST", "/sandboxes", {"template": "base", "ttl_seconds": 600})["id"]
    said = client.call("POST", f"/sandboxes/{sandbox}/exec", {"cmd": "/bin/true"})
    took = (time.monotonic() - begun) * 1000
    assert said["exit_code"] == 0, said
    client.call("DELETE", f"/sandboxes/{sandbox}")
    # Processes for the next sandboxes are started meanwhile, and would be in the library's way.
    while (pool := client.call("GET", "/pool")["prepared"])["available"] < pool["total"]:
        time.sleep(0.05)
    return took


def by_library(library: subprocess.Popen) -> float:
    library.stdin.write("\n")
    library.stdin.flush()
    return float(library.stdout.readline())


def main() -> None:
    pvmm, program, rounds, most = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    library = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with Server(pvmm) as server:
        client = Client(server)
        # The service bakes its template, and both load it.
        deadline = time.monotonic() + 300
        while True:
            try:
                by_service(client)
                break
            except AssertionError as error:
                assert time.monotonic() < deadline, error
                time.sleep(2)
        by_library(library)
        times = [(by_service(client), by_library(library)) for _ in range(rounds)]
    library.stdin.close()
    assert library.wait(timeout=60) == 0
    service, alone = (statistics.median(column) for column in zip(*times))
    ratio = service / alone
    print(f"create and first command, {rounds} in turns: service {service:.0f} ms, library {alone:.0f} ms, "
          f"ratio {ratio:.2f}")
    assert ratio <= most, "the service adds too much"


if __name__ == "__main__":
    main()
