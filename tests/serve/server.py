"""A `pvmm serve` of the test's own, which ends with it."""

import json
import os
import subprocess
import sys
import time
import traceback
import urllib.request


class Server:
    def __init__(self, pvmm: str, *more: str) -> None:
        self.pvmm = pvmm
        words = ["--quiet", "serve", "--listen", "127.0.0.1:0", "--with-parent", *more]
        self.process = subprocess.Popen(
            [pvmm, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        address = json.loads(self.process.stdout.readline())
        self.url, self.token = address["url"], address["token"]
        for name in ("PANDASTACK", "PVMM"):
            os.environ[f"{name}_API"] = self.url
            os.environ[f"{name}_API_KEY"] = self.token

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        assert self.process.wait(timeout=120) == 0

    def call(self, method: str, path: str, body: object = None, timeout: float = 120):
        request = urllib.request.Request(f"{self.url}/v1{path}", method=method)
        request.add_header("Authorization", f"Bearer {self.token}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def exec(self, sandbox: str, line: str) -> str:
        answer = self.call("POST", f"/sandboxes/{sandbox}/exec", {"cmd": line})
        assert answer["exit_code"] == 0, answer
        return answer["stdout"].strip()


def run_flows(module, argument, wanted):
    """Calls the functions of a module whose names begin with flow_, and ends the program."""
    failed = 0
    for name, flow in list(module.items()):
        if not name.startswith("flow_") or (wanted and not any(w in name for w in wanted)):
            continue
        start = time.monotonic()
        try:
            flow(argument)
            print(f"{name}: ok ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: failed", flush=True)
            traceback.print_exc()
    sys.exit(1 if failed else 0)
