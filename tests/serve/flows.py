"""The published PandaStack client against `pvmm serve`: every flow that needs no large template.

    flows.py PVMM [NAME...]

Each flow is a function; one that raises is a failure.
"""

import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

from server import Server, run_flows

TEMPLATE = "base"


def flow_exec_gives_output_code_and_streams(client):
    with client.create() as sandbox:
        result = sandbox.exec("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3), result
        pieces = []
        code = sandbox.exec_stream("echo one; sleep 0.2; echo two; exit 4", on_stdout=pieces.append)
        assert (code, "".join(pieces)) == (4, "one\ntwo\n"), (code, pieces)


def flow_guest_without_bash_has_its_lines_run_by_sh(client):
    with client.create() as sandbox:
        assert sandbox.exec("echo $0 $PWD").stdout == "/bin/bash /root\n"
        sandbox.exec("mv /bin/bash /bin/away")
        assert sandbox.exec("echo $0 $PWD").stdout == "/bin/sh /root\n"
        pieces = []
        assert sandbox.exec_stream("echo $0; exit 5", on_stdout=pieces.append) == 5
        assert "".join(pieces) == "/bin/sh\n", pieces


def flow_files_go_in_and_come_out(client):
    with client.create() as sandbox:
        files = sandbox.filesystem
        files.write("/workspace/a.txt", "hello é\n")
        assert files.read("/workspace/a.txt").decode() == "hello é\n"
        blob = bytes(range(256)) * 4096
        files.write("/workspace/b.bin", blob)
        assert files.read("/workspace/b.bin") == blob
        assert sorted(it.name for it in files.listdir("/workspace")) == ["a.txt", "b.bin"]
        assert files.stat("/workspace/b.bin").size == len(blob)
        assert files.exists("/etc/passwd") and not files.exists("/etc/nothing")


def flow_code_context_keeps_its_variables_and_shows_values(client):
    with client.create() as sandbox:
        with sandbox.create_code_context("python") as context:
            context.run_code("x = 41")
            assert context.run_code("x + 1").text == "42"
            failed = context.run_code("1 / 0")
            assert "ZeroDivisionError" in failed.error, failed
        assert sandbox.run_code("print(6 * 7)").stdout == "42\n"


def flow_fork_goes_on_with_the_parents_files(client):
    with client.create() as sandbox:
        sandbox.exec("echo parent > /root/f")
        with sandbox.fork(metadata={"k": "v"}) as child:
            assert child.id != sandbox.id
            assert child.exec("cat /root/f").stdout == "parent\n"


def flow_fork_tree_and_promotion(client):
    with client.create() as sandbox:
        sandbox.exec("echo parent > /root/f")
        children = sandbox.fork_tree(count=3)
        assert len(children) == 3, children
        for number, child in enumerate(children):
            assert child.exec("cat /root/f").stdout == "parent\n"
            child.exec(f"echo {number} > /root/f")
        said = [child.exec("cat /root/f").stdout.strip() for child in children]
        assert said == ["0", "1", "2"], said
        assert sandbox.exec("cat /root/f").stdout == "parent\n"
        promoted = children[1].promote(cleanup_siblings=True)
        assert sorted(promoted["deleted"]) == sorted([children[0].id, children[2].id]), promoted
        assert children[1].exec("cat /root/f").stdout == "1\n"
        children[1].kill()


def flow_explore_finds_the_best_candidate(client):
    with client.create() as sandbox:
        result = sandbox.explore(
            ["echo 1", "echo PASS", "exit 1"],
            score_fn=lambda sb, outcome: 1.0 if "PASS" in outcome.stdout_tail else 0.0,
        )
        assert result.winner is not None
        result.winner.sandbox.kill() if hasattr(result.winner, "sandbox") else result.winner.kill()


def flow_pause_resume_hibernate_wake(client):
    with client.create(persistent=True) as sandbox:
        sandbox.exec("echo kept > /root/f")
        sandbox.pause()
        assert sandbox.refresh().status == "paused"
        sandbox.resume()
        assert sandbox.exec("cat /root/f").stdout == "kept\n"
        sandbox.hibernate()
        assert sandbox.refresh().status == "hibernated"
        # The next request wakes it.
        assert sandbox.exec("cat /root/f").stdout == "kept\n"
        sandbox.hibernate()
        sandbox.wake()
        assert sandbox.exec("cat /root/f").stdout == "kept\n"
        sandbox.set_ttl(60)
        sandbox.kill()


def flow_snapshot_is_a_place_to_start_from(client):
    with client.create() as sandbox:
        sandbox.exec("echo then > /root/f")
        snapshot = sandbox.snapshot()
        sandbox.exec("echo now > /root/f")
    with client.create(from_snapshot=snapshot) as other:
        assert other.exec("cat /root/f").stdout == "then\n"
    client.snapshots.delete(snapshot)


def flow_snapshot_of_disks_alone_boots_in_another_size(client):
    call = client.server.call
    with client.create() as sandbox:
        sandbox.exec("echo then > /root/f; (sleep 9999 >/dev/null 2>&1 &)")
        snapshots = f"/sandboxes/{sandbox.id}/snapshots"
        disks, whole = call("POST", snapshots, {"disk_only": True}), call("POST", snapshots)
        assert disks["disk_only"] and not whole["disk_only"], (disks, whole)
        assert disks["size_bytes"] * 2 < whole["size_bytes"], (disks, whole)
        boot_id = sandbox.exec("cat /proc/sys/kernel/random/boot_id").stdout
    # The published client sends no size.
    other = call("POST", "/sandboxes", {"from_snapshot": disks["id"], "memory_mb": 768, "ttl_seconds": 600})
    try:
        assert (other["memory_mb"], other["boot_mode"]) == (768, "boot"), other
        sleeps = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 9999' || true"
        said = client.server.exec(other["id"], f"cat /root/f; {sleeps}; cat /proc/sys/kernel/random/boot_id")
        file, count, other_boot_id = said.split("\n")
        assert (file, count) == ("then", "0") and other_boot_id != boot_id.strip(), said
    finally:
        call("DELETE", f"/sandboxes/{other['id']}")
    for snapshot in (disks, whole):
        client.snapshots.delete(snapshot["id"])


def flow_volume_outlives_its_sandboxes(client):
    client.volumes.create("flows", size_mb=64)
    try:
        mount = [{"name": "flows", "read_only": False}]
        with client.create(volumes=mount) as sandbox:
            sandbox.exec("echo kept > /workspace/f")
            try:
                client.create(volumes=mount).kill()
                raise AssertionError("a volume has two writers")
            except client.errors.BadRequestError:
                pass
        with client.create(volumes=mount) as sandbox:
            assert sandbox.exec("cat /workspace/f").stdout == "kept\n"
    finally:
        client.volumes.delete("flows")


def flow_template_is_built_from_a_dockerfile_with_its_context(client):
    dockerfile = "FROM base\nENV WORD=built\nCOPY src/ /srv/\nRUN echo $WORD; cat /srv/a/b > /srv/c\n"
    with tempfile.TemporaryDirectory() as context:
        os.makedirs(os.path.join(context, "src", "a"))
        with open(os.path.join(context, "src", "a", "b"), "w") as file:
            file.write("from the context\n")
        build = client.templates.build_from_dockerfile("flows", dockerfile, context_dir=context)
    assert build.status in ("queued", "running"), build
    lines = list(client.templates.build_logs(build.id))
    build = client.templates.get_build(build.id)
    assert build.is_done and build.bytes > 0, (build, lines)
    assert "built" in lines and any("Step 3/3: RUN" in line for line in lines), lines
    assert build.id in [known.id for known in client.templates.builds()]
    try:
        with client.Sandbox.create(template="flows", ttl_seconds=600) as sandbox:
            assert sandbox.exec("cat /srv/c").stdout == "from the context\n"
    finally:
        client.templates.delete("flows")
    refused = client.templates.build_from_dockerfile("flows", "FROM base\nRUN exit 3\n")
    lines = list(client.templates.build_logs(refused.id))
    refused = client.templates.get_build(refused.id)
    assert refused.is_failed and "exit code 3" in refused.error, (refused, lines)


def flow_command_that_takes_too_long_is_a_timeout(client):
    with client.create() as sandbox:
        try:
            sandbox.exec("echo begun; sleep 60", timeout_seconds=1)
            raise AssertionError("a command outlived its time")
        except client.errors.SandboxTimeout:
            pass
        assert sandbox.exec("echo on").stdout == "on\n"


def flow_unknown_sandbox_and_wrong_token_are_the_clients_own_errors(client):
    for call in (client.Sandbox.get, lambda id: client.Sandbox.get(id).kill()):
        try:
            call("00000000-0000-4000-8000-000000000000")
            raise AssertionError("an unknown sandbox was found")
        except client.errors.NotFoundError:
            pass
    request = urllib.request.Request(os.environ["PANDASTACK_API"] + "/v1/sandboxes")
    for header in ({}, {"Authorization": "Bearer wrong"}):
        request.headers = header
        try:
            urllib.request.urlopen(request)
            raise AssertionError("a wrong token was taken")
        except urllib.error.HTTPError as error:
            assert error.code == 401, error.code


def flow_what_a_network_policy_denies_is_in_the_audit_log(client):
    subprocess.run([client.server.pvmm, "--quiet", "template", "bake", TEMPLATE, "--net"], check=True)
    wishes = {"template": TEMPLATE, "ttl_seconds": 600, "egress_allowlist": ["example.test"]}
    sandbox = client.server.call("POST", "/sandboxes", wishes)["id"]
    connect = "import socket; socket.create_connection(('192.0.2.1', 443), 60)"
    said = client.server.exec(sandbox, f'python3 -c "{connect}" 2>&1 | tail -1')
    assert said.startswith("ConnectionRefusedError"), said
    client.server.call("DELETE", f"/sandboxes/{sandbox}")
    log = Path(os.environ["XDG_DATA_HOME"]) / "pvmm/service/audit.log"
    acts = [json.loads(line) for line in log.read_text().splitlines()]
    [denied] = [act for act in acts if act["act"] == "connect" and act["sandbox"] == sandbox]
    assert denied["what"].startswith("192.0.2.1:443/tcp") and denied["who"], denied


def flow_operation_is_a_span_below_its_request_in_the_trace_of_its_caller(client):
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with client.create() as sandbox:
        path = f"/v1/sandboxes/{sandbox.id}/exec"
        request = urllib.request.Request(client.server.url + path, b'{"cmd": "true"}')
        request.add_header("Authorization", f"Bearer {client.server.token}")
        request.add_header("Content-Type", "application/json")
        request.add_header("traceparent", f"00-{trace}-{caller}-01")
        urllib.request.urlopen(request, timeout=60).close()
        spans = client.collector.wait(lambda span: span["traceId"] == trace, 2)
    [outer] = [span for span in spans if span["kind"] == 2]
    [inner] = [span for span in spans if span["kind"] == 1]
    assert outer["name"] == "POST /v1/sandboxes/{id}/exec" and outer["parentSpanId"] == caller, outer
    assert inner["name"] == "exec" and inner["parentSpanId"] == outer["spanId"], inner
    told = {one["key"]: list(one["value"].values())[0] for one in outer["attributes"]}
    assert told["pvmm.sandbox"] == sandbox.id and told["http.response.status_code"] == "200", told
    assert int(outer["startTimeUnixNano"]) <= int(inner["startTimeUnixNano"]), (outer, inner)


class Client:
    def __init__(self, server, collector):
        import pandastack
        from pandastack import exceptions

        self.server, self.collector = server, collector
        self.Sandbox, self.errors = pandastack.Sandbox, exceptions
        client = pandastack.Client()
        self.snapshots, self.volumes = client.snapshots, client.volumes
        self.templates = client.templates

    def create(self, **options):
        return self.Sandbox.create(template=TEMPLATE, ttl_seconds=600, **options)


class Collector(http.server.ThreadingHTTPServer):
    """A collector of OpenTelemetry, which keeps the spans that it is sent."""

    def __init__(self):
        self.spans, self.news = [], threading.Condition()
        super().__init__(("127.0.0.1", 0), Spans)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def wait(self, wanted, count):
        with self.news:
            found = lambda: [span for span in self.spans if wanted(span)]
            assert self.news.wait_for(lambda: len(found()) >= count, 60), self.spans
            return found()


class Spans(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/traces", self.path
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        [resource] = body["resourceSpans"]
        [scope] = resource["scopeSpans"]
        with self.server.news:
            self.server.spans += scope["spans"]
            self.server.news.notify_all()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def main():
    pvmm, wanted = sys.argv[1], sys.argv[2:]
    collector = Collector()
    place = f"http://127.0.0.1:{collector.server_port}"
    with Server(pvmm, "--otlp-endpoint", place) as server:
        run_flows(globals(), Client(server, collector), wanted)


if __name__ == "__main__":
    main()
