"""`pvmm serve` is killed again and again while clients use it: no sandbox is lost, none is left over.

    restart.py PVMM ROUNDS

Each round kills the server during another call, and with every turn through the calls a little later
after the call has begun. What a client was never told of is gone once the next server is up; every
other sandbox still answers, and has the file that was written in it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
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
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
    except urllib.error.HTTPError as refusal:
        raise AssertionError((method, path, refusal.code, refusal.read())) from None
    return json.loads(text) if text else None


def run(sandbox, line):
    return call("POST", f"/sandboxes/{sandbox}/exec", {"cmd": line})["stdout"].strip()


def ids(answer):
    """The sandboxes that an answer speaks of."""
    answer = answer.get("children", answer) if isinstance(answer, dict) else answer
    return [it["id"] for it in (answer if isinstance(answer, list) else [answer])]


def create(it):
    it.made = ids(call("POST", "/sandboxes", {"template": "base", "ttl_seconds": 600}))


def fork(it):
    it.made = ids(call("POST", f"/sandboxes/{it.running}/fork", {}))


def fork_tree(it):
    it.made = ids(call("POST", f"/sandboxes/{it.running}/fork-tree", {"count": 3}))


def delete(it):
    call("DELETE", f"/sandboxes/{it.victim}")
    it.deleted = True


def snapshot(it):
    call("POST", f"/sandboxes/{it.running}/snapshots")


def hibernate(it):
    call("POST", f"/sandboxes/{it.running}/hibernate")


def wake(it):
    call("POST", f"/sandboxes/{it.asleep}/wake")


def pause(it):
    call("POST", f"/sandboxes/{it.running}/pause")


def rollback(it):
    call("POST", f"/sandboxes/{it.running}/rollback")


def checkout(it):
    call("POST", f"/sandboxes/{it.running}/checkout", {"name": it.kept})


CALLS = [create, fork, hibernate, delete, wake, snapshot, fork_tree, pause, rollback, checkout]


class Round:
    """What there is before a call, and what the call has told its client."""

    def __init__(self, running, asleep, victim):
        self.running, self.asleep, self.victim = running, asleep, victim
        self.made, self.deleted, self.refused, self.kept = [], False, None, None

    def attempt(self, act):
        try:
            act(self)
        except OSError:
            pass  # The server is gone, which the client sees.
        except AssertionError as refused:
            self.refused = refused


def check(it, act):
    """What holds after the next server has come up."""
    assert it.refused is None, it.refused
    there = {row["id"]: row["status"] for row in call("GET", "/sandboxes")}
    expected = {it.running, it.asleep, *it.made}
    assert expected <= set(there) <= expected | ({it.victim} - {None}), (act.__name__, there, vars(it))
    assert not (it.deleted and it.victim in there), (act.__name__, there)
    if act is pause and there[it.running] == "paused":
        call("POST", f"/sandboxes/{it.running}/resume")
    if act is checkout:
        tree = {row["name"]: row for row in call("GET", f"/sandboxes/{it.running}/checkpoints")["items"]}
        assert it.kept in tree and len(tree) >= 2, tree
    for sandbox in (it.running, *([it.asleep] if act is wake else [])):
        assert run(sandbox, "cat /root/f") == sandbox, (act.__name__, there)
    for sandbox in (*it.made, *({it.victim} & set(there))):
        assert run(sandbox, "echo on") == "on", act.__name__
        call("DELETE", f"/sandboxes/{sandbox}")
    for kept in call("GET", "/snapshots")["snapshots"]:
        call("DELETE", f"/snapshots/{kept['id']}")
    # Nothing runs that the service does not know.
    rows = json.loads(subprocess.check_output([PVMM, "ps", "--json"]))
    known = {row["id"] for row in call("GET", "/sandboxes")}
    assert len(rows) <= len(known), (act.__name__, rows, known)


def main():
    global PORT, PVMM
    PVMM, rounds, PORT = sys.argv[1], int(sys.argv[2]), 18088
    # A create that has to bake first may be told to come again.
    subprocess.run([PVMM, "--quiet", "template", "bake", "base"], stdout=subprocess.DEVNULL, check=True)
    server = start(PVMM)
    body = {"template": "base", "persistent": True}
    running, asleep = (call("POST", "/sandboxes", body)["id"] for _ in range(2))
    for sandbox in (running, asleep):
        run(sandbox, f"echo {sandbox} > /root/f; sync")
    call("POST", f"/sandboxes/{running}/checkpoint")
    turns = -(-rounds // len(CALLS))
    for number in range(rounds):
        act, turn = CALLS[number % len(CALLS)], number // len(CALLS)
        there = {row["id"]: row["status"] for row in call("GET", "/sandboxes")}
        if there[asleep] != "hibernated":
            call("POST", f"/sandboxes/{asleep}/hibernate")
        if there[running] == "hibernated":
            call("POST", f"/sandboxes/{running}/wake")
        if act is rollback:
            call("POST", f"/sandboxes/{running}/checkpoint")
        victim = ids(call("POST", "/sandboxes", {**body, "persistent": False}))[0] if act is delete else None
        it = Round(running, asleep, victim)
        if act is checkout:
            it.kept = call("POST", f"/sandboxes/{running}/checkpoint", {"name": f"kept-{turn}"})["name"]
            call("POST", f"/sandboxes/{running}/checkpoint")
        client = threading.Thread(target=it.attempt, args=[act])
        client.start()
        time.sleep((turn + 0.3) * 1.5 / turns)
        server.send_signal(signal.SIGKILL)
        server.wait()
        client.join()
        server = start(PVMM)
        check(it, act)
    assert run(asleep, "cat /root/f") == asleep
    for sandbox in (running, asleep):
        call("DELETE", f"/sandboxes/{sandbox}")
    left = json.loads(subprocess.check_output([PVMM, "ps", "--json"]))
    assert left == [], left
    server.terminate()
    assert server.wait(timeout=30) == 0
    print(f"killed {rounds} times")


if __name__ == "__main__":
    main()
