"""`pvmm serve` is killed again and again while clients use it: no sandbox is lost, none is left over.

    restart.py PVMM ROUNDS

Each round kills the server a little later after a create has begun. A create whose answer never came
leaves nothing once the next server is up; every other sandbox still answers.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

TOKEN = "a-token-of-the-test"


def start(pvmm):
    server = subprocess.Popen(
        [pvmm, "--quiet", "serve", "--listen", f"127.0.0.1:{PORT}", "--token", TOKEN],
        stdin=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            call("GET", "/sandboxes")
            return server
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


def call(method, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1{path}", method=method)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def run(sandbox, line):
    return call("POST", f"/sandboxes/{sandbox}/exec", {"cmd": line})["stdout"].strip()


def attempt(made):
    try:
        made.append(call("POST", "/sandboxes", {"template": "base", "ttl_seconds": 600})["id"])
    except OSError:
        pass


def main():
    global PORT
    pvmm, rounds, PORT = sys.argv[1], int(sys.argv[2]), 18088
    server = start(pvmm)
    body = {"template": "base", "persistent": True}
    running, asleep = (call("POST", "/sandboxes", body)["id"] for _ in range(2))
    for sandbox in (running, asleep):
        run(sandbox, f"echo {sandbox} > /root/f")
    call("POST", f"/sandboxes/{asleep}/hibernate")
    for number in range(rounds):
        made = []
        client = threading.Thread(target=attempt, args=[made])
        client.start()
        time.sleep(number * 1.5 / rounds)
        server.send_signal(signal.SIGKILL)
        server.wait()
        client.join()
        server = start(pvmm)
        there = {it["id"] for it in call("GET", "/sandboxes")}
        assert there == {running, asleep, *made}, (number, there, made)
        assert run(running, "cat /root/f") == running
        for sandbox in made:
            assert run(sandbox, "echo on") == "on"
            call("DELETE", f"/sandboxes/{sandbox}")
    assert run(asleep, "cat /root/f") == asleep
    for sandbox in (running, asleep):
        call("DELETE", f"/sandboxes/{sandbox}")
    left = json.loads(subprocess.check_output([pvmm, "ps", "--json"]))
    assert left == [], left
    server.terminate()
    assert server.wait(timeout=30) == 0
    print(f"killed {rounds} times")


if __name__ == "__main__":
    main()
