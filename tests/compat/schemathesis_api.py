"""schemathesis against docs/openapi.json: thousands of requests, right and wrong, that the server survives.

It speaks TCP only, so a small proxy stands between it and the Unix socket. No machine is ever started: the
server runs as nobody, in an empty directory, so that paths that are made up lead nowhere.

    schemathesis_api.py FIRECRACKER OPENAPI EXAMPLES
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

firecracker, openapi, examples = sys.argv[1:]
# What must hold whatever state the machine is in.
CHECKS = ("not_a_server_error,status_code_conformance,content_type_conformance,"
          "response_schema_conformance,negative_data_rejection")
NOBODY = 65534


class Server:
    """The process, started again if it has ended."""

    def __init__(self):
        self.folder = tempfile.mkdtemp()
        os.chmod(self.folder, 0o777)
        self.starts, self.codes, self.child = 0, [], None
        self.lock = threading.Lock()

    def connect(self):
        deadline = time.time() + 10
        with self.lock:
            while True:
                if self.child is None or self.child.poll() is not None:
                    self.start()
                client = socket.socket(socket.AF_UNIX)
                try:
                    client.connect(self.path)
                    return client
                except OSError:
                    # It is just ending, or does not listen yet.
                    client.close()
                    assert time.time() < deadline, "the server takes no connection"
                    time.sleep(0.01)

    def start(self):
        if self.child is not None:
            self.codes.append(self.child.returncode)
        self.starts += 1
        self.path = f"{self.folder}/{self.starts}.sock"
        self.child = subprocess.Popen(
            [firecracker, "--api-sock", self.path], cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, user=NOBODY, group=NOBODY, extra_groups=[])
        deadline = time.time() + 10
        while not os.path.exists(self.path):
            assert time.time() < deadline, "the server does not listen"
            time.sleep(0.01)


def pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def proxy(server):
    listener = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            client, _ = listener.accept()
            inner = server.connect()
            for ends in ((client, inner), (inner, client)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


def run(server, *which):
    url = f"http://127.0.0.1:{proxy(server)}"
    command = [sys.executable, "-m", "schemathesis.cli", "run", openapi, "--url", url, "--checks", CHECKS,
               "--phases", "coverage,fuzzing", "--max-examples", examples, "--generation-deterministic",
               "--request-timeout", "20", *which]
    code = subprocess.run(command, cwd=server.folder).returncode
    assert code == 0, f"schemathesis ended with {code}"


# Everything but loads: one process from the first request to the last.
server = Server()
run(server, "--exclude-path-regex", "load$")
with server.connect() as client:
    client.sendall(b"GET /version HTTP/1.1\r\n\r\n")
    assert client.recv(4096).startswith(b"HTTP/1.1 200"), "it answers no more"
assert server.starts == 1, f"it ended with {server.codes}"
server.child.kill()

# A load that fails ends the process, by contract, after its answer and with code 1.
server = Server()
run(server, "--include-path-regex", "load$")
server.child.kill()
assert all(code == 1 for code in server.codes), f"it ended with {server.codes}"
print("schemathesis: the server survived")
