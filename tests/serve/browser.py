"""A headless Chromium, spoken to over a pipe, with what a test of a page needs."""

import base64
import json
import os
import subprocess
import tempfile
import time

PROGRAM = "chromium"
#: How long a page may take for anything, on a machine that is busy.
PATIENCE = 180


class Browser:
    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, self.to), (self.answers, write) = os.pipe(), os.pipe()
        # Chromium reads descriptor 3 and writes descriptor 4. Other shells know descriptors up to 9.
        script = f'exec "$@" 3<&{read} 4>&{write}'
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                 f"--user-data-dir={self.profile.name}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", PROGRAM, *words], pass_fds=[read, write],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(read), os.close(write)
        self.rest, self.number, self.session = b"", 0, None
        self.requests, self.errors = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.profile.cleanup()

    def call(self, method: str, **parameters: object) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def receive(self) -> dict:
        while b"\0" not in self.rest:
            piece = os.read(self.answers, 1 << 20)
            assert piece, "the browser has ended"
            self.rest += piece
        one, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(one)
        what = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(what["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(what["entry"]["text"])
        return message

    def run(self, script: str) -> object:
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str) -> object:
        """Waits until an expression is true, and returns it."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.2)
        return value

    def type(self, field: str, text: str) -> None:
        self.run(f"document.getElementById({field!r}).focus()")
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
                      windowsVirtualKeyCode=13, text="\r")

    def look(self, path: str, width: int, height: int, scheme: str) -> None:
        """Takes a picture of the whole page."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        time.sleep(1.5)
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(taken["data"]))
