"""The page of `pvmm serve` in a headless browser, with real sandboxes.

    page.py PICTURES COMMAND...

The command is `page_relay.py` where guests run; the browser runs here. Pictures of the page are
written to the folder, to be looked at.
"""

import base64
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

from browser import Browser

#: Text of a guest that would be code if it were taken for markup.
HOSTILE = "<img src=x onerror=document.title='taken'>"


#: Two branches of checkpoints below "start", and the sandbox stands in the middle of one.
STEPS = [
    ("checkpoint", "tests-green"), ("checkpoint", "refactored"), ("checkout", "start"),
    ("checkpoint", "other-idea"), ("checkpoint", "measured"), ("checkout", "other-idea"),
]


class Relay:
    """A local address whose connections end at a server elsewhere."""

    def __init__(self, command: "list[str]") -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.token = json.loads(self.process.stdout.readline())["token"]
        self.lock, self.connections, self.numbers = threading.Lock(), {}, itertools.count()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self.listener.getsockname()[1]
        for work in (self.accept, self.answer):
            threading.Thread(target=work, daemon=True).start()

    def tell(self, number: int, data: bytes) -> None:
        with self.lock:
            self.process.stdin.write(json.dumps([number, base64.b64encode(data).decode()]) + "\n")
            self.process.stdin.flush()

    def accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            number = next(self.numbers)
            self.connections[number] = connection
            threading.Thread(target=self.send, args=[number, connection], daemon=True).start()

    def send(self, number: int, connection: socket.socket) -> None:
        data = b"?"
        while data:
            try:
                data = connection.recv(65536)
            except OSError:
                data = b""
            try:
                self.tell(number, data)
            except (OSError, ValueError):
                # The server has ended before its client.
                return

    def answer(self) -> None:
        for line in self.process.stdout:
            number, text = json.loads(line)
            try:
                if text:
                    self.connections[number].sendall(base64.b64decode(text))
                else:
                    self.connections.pop(number).close()
            except (OSError, KeyError):
                pass

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(timeout=180) == 0

    def call(self, method: str, path: str, body: object = None) -> object:
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Authorization", f"Bearer {self.token}")
        request.add_header("Connection", "close")
        if body is not None:
            request.data = json.dumps(body).encode()
        with urllib.request.urlopen(request, timeout=300) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text.decode()


def make_sandboxes(relay: Relay) -> "dict[str, str]":
    """A small forest: a parent with three children, a grandchild, and one that hibernates."""
    create = {"template": "base", "ttl_seconds": 3600}
    one = lambda id, rest, body=None: relay.call("POST", f"/v1/sandboxes/{id}/{rest}", body)
    parent = relay.call("POST", "/v1/sandboxes", create)["id"]
    one(parent, "exec", {"cmd": f"echo kept > /root/f; touch \"/root/{HOSTILE}\""})
    children = [it["id"] for it in one(parent, "fork-tree", {"count": 3})["children"]]
    grandchild = one(children[0], "fork")["id"]
    one(children[1], "checkpoint", {"name": "start"})
    one(children[1], "exec", {"cmd": "rm /root/f"})
    one(children[1], "rollback")
    for verb, name in STEPS:
        one(children[1], verb, {"name": name})
    one(grandchild, "checkpoint")
    one(children[2], "pause")
    one(parent, "snapshots")
    asleep = relay.call("POST", "/v1/sandboxes", {**create, "persistent": True})["id"]
    one(asleep, "hibernate")
    return {"parent": parent, "checkpointed": children[1], "grandchild": grandchild, "asleep": asleep}


def busy(relay: Relay, made: "dict[str, str]", stop: threading.Event) -> None:
    """Load, so that the plots have something to show."""
    for turn in itertools.count():
        if stop.is_set():
            return
        line = "head -c 4000000 /dev/zero | sha256sum" if turn % 3 else "true"
        relay.call("POST", f"/v1/sandboxes/{made['grandchild']}/exec", {"cmd": line})
        if turn % 5 == 4:
            relay.call("POST", f"/v1/sandboxes/{made['checkpointed']}/rollback")


def count(browser: Browser, selector: str) -> int:
    return browser.run(f"document.querySelectorAll({selector!r}).length")


def look_at_checkpoints(relay: Relay, browser: Browser, sandbox: str) -> None:
    texts = lambda selector: f"[...document.querySelectorAll('#tree {selector}')].map((it) => it.textContent).sort()"
    names = ["1", "measured", "other-idea", "refactored", "start", "tests-green"]
    assert browser.run(texts("g.checkpoint text")) == names
    assert browser.run(texts("g.here text")) == ["1", "other-idea"]
    # Each has an edge; those of the branches come from the checkpoint where they part.
    assert count(browser, "#tree path.line") == 6 and count(browser, "#tree path.past") == 3
    titles = browser.run(texts("g.checkpoint title"))
    assert sum("after start" in title for title in titles) == 2, titles
    relay.call("POST", f"/v1/sandboxes/{sandbox}/checkout", {"name": "refactored"})
    browser.wait("[...document.querySelectorAll('#tree g.here text')].some((it) => it.textContent === 'refactored')")
    assert count(browser, "#tree path.past") == 4


def look(relay: Relay, browser: Browser, made: "dict[str, str]", pictures: str) -> None:
    browser.call("Page.navigate", url=f"{relay.url}/")
    browser.wait("document.readyState === 'complete' && !document.getElementById('door').hidden")
    browser.type("token", "wrong")
    browser.wait("document.getElementById('door-error').textContent.includes('not accepted')")
    # The browser reports the refusal that was asked for.
    browser.errors.clear()
    browser.type("token", relay.token)
    browser.wait("document.querySelectorAll('#list tr').length === 6")
    assert count(browser, "#tree g.sandbox") == 6 and count(browser, "#tree path.fork") == 4
    assert count(browser, "#tree .snapshot") == 1
    look_at_checkpoints(relay, browser, made["checkpointed"])
    states = browser.run("[...document.querySelectorAll('#list .key')].map((it) => it.textContent).sort()")
    assert states == ["hibernated", "paused", "running", "running", "running", "running"], states
    numbers = "[...document.querySelectorAll('#plots figure')].map((it) => it.textContent)"
    browser.wait(f"{numbers}.filter((it) => it.includes('p50')).length >= 5")
    memory = browser.run("[...document.querySelectorAll('#list .memory span')].map((it) => it.textContent)")
    assert sum("MiB" in text for text in memory) >= 5, memory

    browser.run(f"[...document.querySelectorAll('#list tr')].find((it) => it.querySelector('.id').title === {made['parent']!r}).click()")
    output = "document.getElementById('output').textContent"
    idle = "document.getElementById('stop').hidden"
    browser.type("command", f"uname -s; echo \"{HOSTILE}\" | tee /dev/stderr; cd /tmp")
    browser.wait(f"{idle} && {output}.includes('Linux')")
    assert browser.run(f"{output}.split({HOSTILE!r}).length") == 4, browser.run(output)
    browser.type("command", "pwd; exit 3")
    browser.wait(f"{idle} && {output}.includes('/tmp\\nexit 3')")
    browser.type("command", "sleep 600")
    browser.wait(f"!{idle}")
    browser.run("document.getElementById('stop').click()")
    browser.wait(f"{idle} && {output}.includes('stopped')")
    time.sleep(10)
    browser.look(os.path.join(pictures, "page-light.png"), 1360, 1000, "light")
    browser.look(os.path.join(pictures, "page-dark.png"), 1360, 1000, "dark")

    browser.run("document.getElementById('tab-files').click()")
    name = "[...document.querySelectorAll('#entries button')].find((it) => it.textContent === %r)"
    browser.wait(f"!!({name % 'root/'})")
    browser.run(f"({name % 'root/'}).click()")
    browser.wait(f"!!({name % HOSTILE})")
    browser.look(os.path.join(pictures, "page-files.png"), 1360, 1000, "light")
    browser.look(os.path.join(pictures, "page-narrow.png"), 480, 1600, "dark")
    browser.run(f"({name % 'f'}).click()")
    browser.wait("performance.getEntriesByType('resource').some((it) => it.name.endsWith('fs?path=%2Froot%2Ff'))")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.title") == "pvmm"

    outside = [url for url in browser.requests if not url.startswith((relay.url, "about:", "blob:"))]
    assert not outside and not browser.errors, (outside, browser.errors)


def check_metrics(relay: Relay) -> None:
    lines = relay.call("GET", "/metrics").splitlines()
    value = lambda name: float(next(line for line in lines if line.startswith(name + " ")).split()[1])
    for operation in ("create", "fork", "exec", "checkpoint", "rollback", "hibernate"):
        label = f'{{operation="{operation}"}}'
        assert value(f"pvmm_operation_duration_seconds_count{label}") > 0, operation
        assert value(f"pvmm_operation_failures_total{label}") == 0, operation
    assert value('pvmm_sandboxes{state="running"}') == 4 and value("pvmm_sandboxes_forked") == 4
    assert value("pvmm_memory_private_bytes") > 1 << 20 and value("pvmm_memory_shared_bytes") > 1 << 20
    assert value("pvmm_sandboxes_unmeasured") == 0


def main() -> None:
    pictures, command = sys.argv[1], sys.argv[2:]
    os.makedirs(pictures, exist_ok=True)
    relay = Relay(command)
    made, stop = make_sandboxes(relay), threading.Event()
    load = threading.Thread(target=busy, args=[relay, made, stop], daemon=True)
    load.start()
    with Browser() as browser:
        try:
            look(relay, browser, made, pictures)
        except BaseException:
            browser.look(os.path.join(pictures, "page-failed.png"), 1360, 1000, "light")
            raise
    stop.set()
    load.join()
    check_metrics(relay)
    relay.end()
    print("the page shows what it should")


if __name__ == "__main__":
    main()
