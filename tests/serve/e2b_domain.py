"""E2B's clients with nothing but E2B_DOMAIN and E2B_API_KEY, over TLS, against `pvmm serve`.

    e2b_domain.py PVMM NODE_MODULES

The names below the domain are of this test only: the clients run with a file of hosts of their own.
"""

import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from node_clients import run as run_node
from server import Server

DOMAIN = "sandbox.test"
NAMES = f"DNS:{DOMAIN},DNS:*.{DOMAIN},IP:127.0.0.1"


def certificate(folder: Path) -> "tuple[str, str, str]":
    """Makes an authority and a certificate of the domain; returns its files."""
    authority, cert, key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    quiet = {"check": True, "stderr": subprocess.DEVNULL}
    subprocess.run([*new, "-subj", "/CN=test authority", "-keyout", f"{authority}.key", "-out", authority], **quiet)
    sign = ["-CA", authority, "-CAkey", f"{authority}.key", "-subj", f"/CN={DOMAIN}"]
    more = ["-addext", f"subjectAltName={NAMES}", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*new, *sign, *more, "-keyout", key, "-out", cert], **quiet)
    return authority, cert, key


def with_hosts(hosts: str) -> "list[str]":
    """Returns the words before a command that sees `hosts` as the file of hosts."""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    # The program mount would leave a folder in /run.
    script = (
        "import ctypes, os, sys; MS_BIND = 4096; "
        f"failed = ctypes.CDLL(None).mount({hosts.encode()!r}, b'/etc/hosts', None, MS_BIND, None); "
        "sys.exit('cannot mount') if failed else os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return ["unshare", "--mount", *root, "--", sys.executable, "-c", script]


def add_host(name: str) -> None:
    with open(os.environ["HOSTS"], "a") as file:
        file.write(f"127.0.0.1 {name}\n")


def client() -> None:
    """The Python client, in a process that has the hosts. It reads them once, and so begins anew
    when its sandbox has names."""
    from e2b_code_interpreter import Sandbox

    made = os.environ.get("SANDBOX_ID")
    if made is None:
        sandbox = Sandbox.create("base", timeout=900, request_timeout=180)
        for port in (49983, 49999, 8000):
            add_host(sandbox.get_host(port).split(":")[0])
        os.environ["SANDBOX_ID"] = sandbox.sandbox_id
        os.execv(sys.executable, [sys.executable, __file__])
    sandbox = Sandbox.connect(made, timeout=900, request_timeout=180)
    assert sandbox.get_host(8000) == f"8000-{sandbox.sandbox_id}.{os.environ['E2B_DOMAIN']}"
    assert sandbox.commands.run("echo on", timeout=180).stdout == "on\n"
    sandbox.files.write("/srv/index.html", "page\n")
    assert sandbox.run_code("6 * 7").text == "42"
    with urllib.request.urlopen(sandbox.download_url("/srv/index.html")) as answer:
        assert answer.read() == b"page\n"
    sandbox.commands.run("cd /srv && python3 -m http.server --bind 127.0.0.1 8000", background=True)
    request = urllib.request.Request(f"https://{sandbox.get_host(8000)}/index.html")
    assert status(request) == 401
    request.add_header("E2B-Traffic-Access-Token", sandbox.traffic_access_token)
    until = time.monotonic() + 180
    while (got := status(request)) == 503:
        assert time.monotonic() < until
    assert got == b"page\n", got
    assert sandbox.kill()
    print("e2b_domain, Python: ok", flush=True)


def status(request):
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        return error.code


def cookie_over_tls(server: Server, domain: str) -> None:
    """A preview address over TLS gives a cookie that browsers bind to its host."""
    sandbox = server.call("POST", "/sandboxes", {"template": "base", "ttl_seconds": 900})["id"]
    request = urllib.request.Request(f"{server.url}/v1/sandboxes/{sandbox}/ports/8000")
    request.add_header("Authorization", f"Bearer {server.token}")
    request.add_header("Host", f"api.{domain}")
    with urllib.request.urlopen(request, timeout=180) as answer:
        first = urlsplit(json.load(answer)["open_url"])
    assert (first.scheme, first.netloc) == ("https", f"8000-{sandbox}.{domain}"), first
    path = f"{first.path}?{first.query}"
    request = urllib.request.Request(server.url + path, headers={"Accept": "text/html"})
    request.add_header("Host", first.netloc)

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_):
            return None

    try:
        urllib.request.build_opener(Stay).open(request, timeout=180)
        raise AssertionError("no redirect")
    except urllib.error.HTTPError as error:
        cookie = error.headers["Set-Cookie"]
    assert cookie.startswith("__Host-pvmm-preview=") and cookie.endswith("; Secure"), cookie
    server.call("DELETE", f"/sandboxes/{sandbox}")
    print("e2b_domain, cookie: ok", flush=True)


def main() -> None:
    pvmm, node_modules = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        authority, cert, key = certificate(Path(folder))
        hosts = str(Path(folder) / "hosts")
        Path(hosts).write_text(f"127.0.0.1 localhost\n127.0.0.1 api.{DOMAIN}\n")
        os.environ.update(SSL_CERT_FILE=authority, NODE_EXTRA_CA_CERTS=authority, HOSTS=hosts)
        assert ssl.get_default_verify_paths().cafile == authority
        with Server(pvmm, "--tls-cert", cert, "--tls-key", key) as server:
            domain = f"{DOMAIN}:{server.url.rsplit(':', 1)[1]}"
            os.environ.update(E2B_DOMAIN=domain, E2B_API_KEY=server.token)
            before = with_hosts(hosts)
            subprocess.run([*before, sys.executable, __file__], check=True)
            assert run_node(node_modules, "e2b_domain.mjs", before=before)
            cookie_over_tls(server, domain)
            assert server.call("GET", "/sandboxes") == []


if __name__ == "__main__":
    main() if len(sys.argv) > 1 else client()
