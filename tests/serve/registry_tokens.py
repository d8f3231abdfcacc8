"""A server of tokens for a registry: whoever has the password gets one, signed with a key that the
registry trusts. Ends with its standard input.

    registry_tokens.py ADDRESS PORT FOLDER

The folder has cert.pem and key.pem. Prints a line when it listens.
"""

import base64
import json
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PASSWORD = "Basic " + base64.b64encode(b"u:p").decode()


def words(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def signed(folder: Path, claims: dict) -> str:
    """Returns a JSON Web Token."""
    cert = ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text())
    head = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(cert).decode()]}
    text = ".".join(words(json.dumps(part).encode()) for part in (head, claims))
    sign = ["openssl", "dgst", "-sha256", "-sign", str(folder / "key.pem")]
    done = subprocess.run(sign, input=text.encode(), stdout=subprocess.PIPE, check=True)
    return f"{text}.{words(done.stdout)}"


class Tokens(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        if self.headers.get("Authorization") != PASSWORD:
            self.send_error(401)
            return
        access = []
        for scope in query.get("scope", []):
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        claims = {"iss": "tokens", "sub": "u", "aud": query["service"][0], "access": access}
        claims |= {"exp": now + 300, "nbf": now - 60, "iat": now, "jti": str(time.monotonic_ns())}
        body = json.dumps({"token": signed(self.folder, claims)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    address, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    Tokens.folder = folder
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server = ThreadingHTTPServer((address, port), Tokens)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("listening", flush=True)
    sys.stdin.read()


main()
