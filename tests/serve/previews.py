"""Ports of sandboxes at addresses of their own, as browsers use them, on real guests.

    previews.py PVMM [NAME...]

Names below localhost are not resolved here: requests go to the server with the name as their Host.
"""

import http.client
import json
import os
import socket
import sys
import time
from urllib.parse import urlsplit

from server import Server, run_flows

# A web server that shows the headers it gets, and a websocket at /ws that says everything twice.
GUEST = r'''
import base64, hashlib, http.server, json, struct

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.headers.get("Upgrade") == "websocket":
            return self.websocket()
        body = json.dumps({"path": self.path, "headers": self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("Set-Cookie", "guest=1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def websocket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        while (head := self.rfile.read(2)) and head[0] & 15 == 1:
            mask, size = self.rfile.read(4), head[1] & 127
            text = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(size)))
            self.wfile.write(bytes([129, 2 * size]) + 2 * text)
        self.close_connection = True

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
'''
PAGE = {"Accept": "text/html,*/*"}


class Site:
    """A sandbox with a web server in it."""

    def __init__(self, server):
        self.server = server
        self.id = self.make()
        self.start()
        shown = self.preview()
        assert not shown["public"], shown
        self.host, self.token = urlsplit(shown["url"]).netloc, shown["token"]
        assert self.host.startswith(f"8000-{self.id}.localhost:"), shown
        self.first = shown["open_url"].split(self.host)[1]

    def make(self):
        wish = {"template": "base", "persistent": True, "ttl_seconds": 900}
        return self.server.call("POST", "/sandboxes", wish)["id"]

    def start(self):
        line = "cat > /root/web.py <<'END'\n" + GUEST + "\nEND\n"
        line += "setsid python3 /root/web.py >/dev/null 2>&1 </dev/null & "
        line += "until ss -ltn 2>/dev/null | grep -q :8000 || grep -q :1F40 /proc/net/tcp; do sleep 0.1; done"
        self.server.exec(self.id, line)

    def preview(self, **change):
        path = f"/sandboxes/{self.id}/ports/8000"
        return self.server.call("PUT" if change else "GET", path, change or None)

    def ask(self, path="/", host=None, method="GET", **headers):
        """Sends a request as a browser does; returns the status, the headers and the body."""
        connection = http.client.HTTPConnection(urlsplit(self.server.url).netloc, timeout=180)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers={"Host": host or self.host, **headers})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()

    def seen(self, path="/", **headers):
        """Returns what the guest saw of a request."""
        status, _, body = self.ask(path, **headers)
        assert status == 200, (status, body)
        said = json.loads(body)
        text = json.dumps(said)
        assert self.token not in text and self.server.token not in text, text
        return said["path"], {name.lower(): value for name, value in said["headers"]}

    def cookie(self):
        status, headers, _ = self.ask(self.first, **PAGE)
        assert (status, headers["Location"]) == (303, "/"), (status, headers)
        pair, *words = headers["Set-Cookie"].split("; ")
        assert words == ["Path=/", "HttpOnly", "SameSite=Lax"], words
        return pair


def flow_port_is_closed_without_its_token(site):
    other = Site.make(site)
    for headers in ({}, {"Cookie": "pvmm-preview=x"}, {"Authorization": "Bearer x"}, {"X-Pvmm-Token": "x"}):
        for path in ("/", "/?pvmm-token=x", "/v1/sandboxes", "/sandboxes", "/healthz"):
            assert site.ask(path, **headers)[0] == 401, (headers, path)
    # A token opens its own port of its own sandbox.
    for host in (f"8001-{site.id}.localhost", f"8000-{other}.localhost"):
        assert site.ask(site.first, host=host)[0] == 401, host
    site.server.call("DELETE", f"/sandboxes/{other}")


def flow_token_becomes_a_cookie_that_the_guest_does_not_see(site):
    cookie = site.cookie()
    path, headers = site.seen("/a%2Fb?c=d", Cookie=f"mine=1; {cookie}", Authorization="Basic dTpw")
    assert path == "/a%2Fb?c=d" and headers["cookie"] == "mine=1", (path, headers)
    assert headers["authorization"] == "Basic dTpw" and headers["host"] == site.host, headers
    status, headers, _ = site.ask(Cookie=cookie)
    assert headers["Set-Cookie"] == "guest=1", headers
    # Pages of other origins, also of other sandboxes and of the API, cannot use the cookie.
    for origin in ("http://localhost:8088", f"http://8000-{'0' * 36}.localhost", "null"):
        assert site.ask(method="POST", Cookie=cookie, Origin=origin)[0] == 401, origin
    assert site.ask(Cookie=cookie, Sec_Fetch_Site="same-site", Sec_Fetch_Mode="no-cors")[0] == 401
    site.seen(method="POST", Cookie=cookie, Origin=f"http://{site.host}")


def flow_programs_send_the_token_in_the_query_or_a_header(site):
    path, _ = site.seen(f"/x?a=b&pvmm-token={site.token}")
    assert path == "/x?a=b", path
    for name, value in (("X-Pvmm-Token", site.token), ("Authorization", f"Bearer {site.server.token}")):
        _, headers = site.seen(**{name: value})
        assert name.lower() not in headers, headers


def flow_page_of_a_guest_cannot_use_the_api(site):
    cookie, api = site.cookie(), urlsplit(site.server.url).netloc
    assert site.ask("/v1/sandboxes", host=api, Cookie=cookie)[0] == 401
    assert site.ask("/v1/sandboxes", host=api, Authorization=f"Bearer {site.token}")[0] == 401
    assert site.ask("/sandboxes", host=api, X_Api_Key=site.token)[0] == 401
    # At the address of the guest, the paths of the API are the guest's.
    assert site.seen("/v1/sandboxes", Cookie=cookie)[0] == "/v1/sandboxes"
    # Below the API's own address a page is kept apart, and no cookie opens it.
    path = f"/v1/sandboxes/{site.id}/ports/8000/proxy/y?z"
    assert site.ask(path, host=api, Cookie=cookie)[0] == 401
    bearer = {"Authorization": f"Bearer {site.server.token}"}
    status, headers, body = site.ask(path, host=api, **bearer)
    assert status == 200 and json.loads(body)["path"] == "/y?z", body
    assert headers["Content-Security-Policy"] == "sandbox", headers


def flow_websocket_is_passed_on(site):
    cookie = site.cookie()
    own = {"Cookie": cookie, "Origin": f"http://{site.host}"}
    for path, headers in (("/ws", own), (f"/ws?pvmm-token={site.token}", {})):
        status, connection, stream = opened(site, path, **headers)
        assert status == 101, status
        for text in (b"one ", b"two "):
            mask = os.urandom(4)
            masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(text))
            connection.sendall(bytes([129, 128 + len(text)]) + mask + masked)
            assert stream.read(2 + 2 * len(text)) == bytes([129, 2 * len(text)]) + 2 * text
        connection.close()
    for headers in ({}, {"Cookie": cookie, "Origin": "http://localhost:8088"}):
        assert opened(site, "/ws", **headers)[0] == 401, headers


def opened(site, path, **headers):
    """Opens a websocket; returns the status, the socket and its stream."""
    api = urlsplit(site.server.url)
    connection = socket.create_connection((api.hostname, api.port), timeout=180)
    headers |= {"Host": site.host, "Connection": "Upgrade", "Upgrade": "websocket"}
    headers |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    stream = connection.makefile("rb")
    status = int(stream.readline().split()[1])
    while stream.readline().strip():
        pass
    return status, connection, stream


def flow_hibernated_sandbox_wakes_for_its_holder_only(site):
    cookie = site.cookie()
    site.server.call("POST", f"/sandboxes/{site.id}/hibernate")
    state = lambda: site.server.call("GET", f"/sandboxes/{site.id}")["status"]
    assert site.ask("/")[0] == 401 and state() == "hibernated"
    site.seen("/after", Cookie=cookie)
    assert state() == "running"


def flow_port_that_was_made_public_is_open_to_all(site):
    assert site.preview(public=True)["public"]
    _, headers = site.seen("/all", Cookie="pvmm-preview=x; a=b")
    assert headers["cookie"] == "a=b", headers
    assert site.ask(host=f"8001-{site.id}.localhost")[0] == 401
    fork = site.server.call("POST", f"/sandboxes/{site.id}/fork")["id"]
    assert site.ask(host=f"8000-{fork}.localhost")[0] == 401
    site.server.call("DELETE", f"/sandboxes/{fork}")
    assert not site.preview(public=False)["public"]
    assert site.ask("/all")[0] == 401


def flow_e2b_client_opens_ports_by_host_and_traffic_token(site):
    from e2b import Sandbox

    os.environ.update(E2B_API_URL=site.server.url, E2B_SANDBOX_URL=site.server.url)
    os.environ["E2B_API_KEY"] = site.server.token
    wishes = {"timeout": 900, "request_timeout": 180}
    sandbox = Sandbox.connect(site.id, **wishes)
    host = sandbox.get_host(8000)
    assert host == site.host and sandbox.traffic_access_token, host
    _, headers = site.seen(host=host, E2b_Traffic_Access_Token=sandbox.traffic_access_token)
    assert "e2b-traffic-access-token" not in headers, headers
    # It opens ports, and not the sandbox.
    to = {"E2b-Sandbox-Id": site.id, "X-Access-Token": sandbox.traffic_access_token}
    assert site.ask("/files?path=/etc/passwd", host="localhost", **to)[0] == 401
    with Sandbox.create("base", network={"allow_public_traffic": True}, **wishes) as public:
        line = "cd /srv && echo page > index.html && python3 -m http.server --bind 127.0.0.1 8000"
        public.commands.run(line, background=True)
        until = time.monotonic() + 180
        while (answer := site.ask("/index.html", host=public.get_host(8000)))[0] == 503:
            assert time.monotonic() < until, answer
        assert (answer[0], answer[2]) == (200, b"page\n"), answer


def main():
    pvmm, wanted = sys.argv[1], sys.argv[2:]
    with Server(pvmm) as server:
        site = Site(server)
        try:
            run_flows(globals(), site, wanted)
        finally:
            server.call("DELETE", f"/sandboxes/{site.id}")


if __name__ == "__main__":
    main()
