"""Many clients at once: no error that is not a documented refusal, and nothing grows.

    clients.py PVMM CLIENTS SECONDS
"""

import contextlib
import os
import sys
import threading
import time
import urllib.error

from server import Server

#: Refusals that tell a client to come back later.
REFUSALS = {429, 503, 507}
#: The most sandboxes for each processor.
PER_CPU = 8


def size(pid: int) -> "tuple[int, int, int]":
    """Descriptors, threads and resident KiB of a process."""
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    threads, resident = int(status["Threads"]), int(status["VmRSS"].split()[0])
    return len(os.listdir(f"/proc/{pid}/fd")), threads, resident


def client(
    server: Server, number: int, until: float, turns: threading.Semaphore, done: "list[str]", wrong: "list[str]"
) -> None:
    # Some clients do not know that there is a limit.
    turn = contextlib.nullcontext() if number % 10 == 9 else turns
    while time.monotonic() < until and not wrong:
        with turn:
            if time.monotonic() < until:
                play(server, number, done, wrong)


def fork(server: Server, sandbox: str, done: "list[str]") -> str:
    """Forks a sandbox, perhaps after a few refusals."""
    for left in reversed(range(10)):
        try:
            return server.call("POST", f"/sandboxes/{sandbox}/fork")["id"]
        except urllib.error.HTTPError as error:
            if error.code not in REFUSALS or not left:
                raise
            error.read()
            done.append(str(error.code))
            time.sleep(1)


def play(server: Server, number: int, done: "list[str]", wrong: "list[str]") -> None:
    """Makes a sandbox and a fork of it, runs a command in each, and deletes both."""
    sandbox = None
    try:
        sandbox = server.call("POST", "/sandboxes", {"template": "base", "ttl_seconds": 120})["id"]
        said = server.exec(sandbox, f"echo {number} | tee /root/f")
        assert said == str(number), said
        forked = fork(server, sandbox, done)
        try:
            assert server.exec(forked, "cat /root/f") == str(number)
        finally:
            server.call("DELETE", f"/sandboxes/{forked}")
        done.append("round")
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        if error.code in REFUSALS:
            done.append(str(error.code))
            time.sleep(min(2.0, float(error.headers.get("Retry-After", 1))))
        else:
            wrong.append(f"{error.code} {text}")
    except Exception as error:
        wrong.append(repr(error))
    finally:
        if sandbox:
            try:
                server.call("DELETE", f"/sandboxes/{sandbox}")
            except OSError as error:
                wrong.append(f"delete: {error!r}")


def load(server: Server, clients: int, seconds: float, most: int) -> "list[str]":
    done, wrong = [], []
    # As many at a time that there is room for forks.
    turns = threading.Semaphore(max(1, most * 3 // 4))
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client, args=[server, number, until, turns, done, wrong])
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]
    return done


def main() -> None:
    pvmm, clients, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    # More VMs than this on a processor, where it is an emulated one, are only in each other's way.
    most = PER_CPU * (os.cpu_count() or 1)
    with Server(pvmm, "--max-sandboxes", str(most)) as server:
        # Caches and pools fill.
        while "round" not in load(server, min(clients, 4), 10.0, most):
            pass
        time.sleep(1)
        before = size(server.process.pid)
        done = load(server, clients, seconds, most)
        deadline = time.monotonic() + 60
        while True:
            after = size(server.process.pid)
            if after[0] <= before[0] + 2 and after[1] <= before[1] + clients:
                break
            assert time.monotonic() < deadline, (before, after)
            time.sleep(1)
        assert after[2] <= before[2] + 16 * 1024, (before, after)
        assert server.call("GET", "/sandboxes") == []
        rounds = done.count("round")
        assert rounds > 0
        print(f"{clients} clients, {rounds} rounds, {len(done) - rounds} refusals; "
              f"descriptors, threads, KiB: {before} -> {after}")


if __name__ == "__main__":
    main()
