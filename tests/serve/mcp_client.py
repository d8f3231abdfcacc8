"""The published MCP client against `pvmm mcp` and the service's `/mcp`.

    mcp_client.py PVMM

Every tool is called over stdio; over HTTP, what differs there.
"""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from server import Server

TOOLS = """create run_code exec read_file write_file list_files fork checkpoint rollback checkout log diff list
terminate""".split()
UNKNOWN = "00000000-0000-4000-8000-000000000000"
# One red pixel; the template has no library for images.
PNG = """
import struct, zlib
def chunk(kind, data):
    return (struct.pack(">I", len(data)) + kind + data
            + struct.pack(">I", zlib.crc32(kind + data)))
png = (b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
       + chunk(b"IDAT", zlib.compress(b"\\0\\xff\\0\\0")) + chunk(b"IEND", b""))
open("/root/pixel.png", "wb").write(png)
display({"image/png": png}, raw=True)
"""


class Tools:
    """The tools of one conversation."""

    def __init__(self, client):
        self.client = client

    async def call(self, tool, **arguments):
        result = await self.client.call_tool(f"sandbox_{tool}", arguments, 600)
        return result

    async def text(self, tool, **arguments):
        result = await self.call(tool, **arguments)
        assert not result.is_error, result
        return "\n".join(block.text for block in result.content if block.type == "text")

    async def error(self, tool, **arguments):
        result = await self.call(tool, **arguments)
        assert result.is_error, result
        (block,) = result.content
        assert "\n" not in block.text, block.text
        return block.text

    async def image(self, tool, **arguments):
        result = await self.call(tool, **arguments)
        assert not result.is_error, result
        (image,) = [block for block in result.content if block.type == "image"]
        assert image.mime_type == "image/png", image
        data = base64.b64decode(image.data)
        assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82"), data
        return data

    async def list(self):
        return json.loads(await self.text("list"))


async def flow_tools_have_names_descriptions_and_arguments(tools):
    listed = (await tools.client.list_tools()).tools
    assert [tool.name for tool in listed] == [f"sandbox_{name}" for name in TOOLS], listed
    for tool in listed:
        assert tool.description and tool.input_schema["type"] == "object", tool
    assert await tools.list() == []


async def flow_bad_calls_are_one_line_and_make_no_sandbox(tools):
    assert "command" in await tools.error("exec")
    assert "comand" in await tools.error("exec", command="true", comand="true")
    assert "timeout_seconds" in await tools.error("exec", command="true", timeout_seconds=0)
    assert "language" in await tools.error("run_code", code="1", language="cobol")
    assert "count" in await tools.error("fork", count=17)
    assert "sandbox_list" in await tools.error("exec", command="true", sandbox="../x")
    assert "not found" in await tools.error("exec", command="true", sandbox=UNKNOWN)
    assert "template" in await tools.error("create", template="nothing-of-this-name")
    assert "no sandbox" in await tools.error("terminate")
    assert await tools.list() == []


async def flow_code_keeps_its_variables_and_shows_images(tools):
    await tools.text("run_code", code="x = 41")
    # An agent makes several calls at once.
    said = await asyncio.gather(*(tools.text("run_code", code=f"x + {n}") for n in (1, 2)))
    assert said == ["result:\n42", "result:\n43"], said
    assert "ZeroDivisionError" in await tools.text("run_code", code="1 / 0")
    shown = await tools.image("run_code", code=PNG)
    assert await tools.image("read_file", path="pixel.png") == shown
    slow = await tools.call("run_code", code="import time; time.sleep(60)", timeout_seconds=1)
    assert slow.is_error and "interrupted after 1 s" in slow.content[0].text, slow
    assert await tools.text("run_code", code="x") == "result:\n41"


async def flow_commands_have_exit_codes_and_both_outputs(tools):
    said = await tools.text("exec", command="pwd; echo err >&2; exit 3")
    assert said == "exit code: 3\nstdout:\n/root\n\nstderr:\nerr\n", repr(said)
    assert "exit code: 127" in await tools.text("exec", command="no-such-command")
    assert "stdout:\n/tmp\n" in await tools.text("exec", command="pwd", cwd="/tmp")
    # Long enough for a shell to begin on a slow host.
    slow = await tools.call("exec", command="echo begun; sleep 60", timeout_seconds=10)
    assert slow.is_error and "begun" in slow.content[0].text, slow
    (own,) = await tools.list()
    assert own["own"] and own["status"] == "running", own


async def flow_long_output_is_cut_and_can_be_read_on(tools):
    said = await tools.text("exec", command="seq 100000")
    assert len(said) < 31_000 and said.endswith("\n100000\n"), len(said)
    path = said.split("path=")[1].split()[0]
    offset, parts = 0, []
    while offset is not None:
        result = await tools.call("read_file", path=path, offset=offset, limit=200_000)
        parts.append(result.content[0].text)
        more = [block.text for block in result.content[1:]]
        offset = int(more[0].split("offset=")[1].rstrip("]")) if more else None
    assert "".join(parts).split() == [str(n) for n in range(1, 100_001)], len(parts)


async def flow_files_are_written_read_and_listed(tools):
    await tools.text("write_file", path="work/a.txt", content="héllo\n")
    assert await tools.text("read_file", path="/root/work/a.txt") == "héllo\n"
    blob = base64.b64encode(bytes(range(256))).decode()
    await tools.text("write_file", path="/root/work/b.bin", content=blob, encoding="base64")
    assert await tools.text("read_file", path="work/b.bin", encoding="base64") == blob
    assert "encoding=base64" in await tools.error("read_file", path="work/b.bin")
    listed = (await tools.text("list_files", path="work")).splitlines()
    assert listed == ["/root/work: 2 entries", "file 7 a.txt", "file 256 b.bin"], listed
    assert "a.txt" not in await tools.text("list_files")
    assert "nothing" in await tools.error("read_file", path="/root/nothing")
    assert "base64" in await tools.error("write_file", path="x", content="!", encoding="base64")


async def flow_rollback_undoes_everything_since_the_checkpoint(tools):
    assert "no checkpoint" in await tools.error("rollback")
    await tools.text("run_code", code="x = 1")
    await tools.text("checkpoint")
    await tools.text("run_code", code="x = 2")
    await tools.text("exec", command="rm -rf /root/work /usr/bin/env")
    assert "work" in await tools.error("read_file", path="/root/work/a.txt")
    await tools.text("rollback")
    assert await tools.text("read_file", path="work/a.txt") == "héllo\n"
    assert await tools.text("run_code", code="x") == "result:\n1"
    assert "exit code: 0" in await tools.text("exec", command="/usr/bin/env")


async def flow_checkpoints_are_a_tree(tools):
    await tools.text("checkpoint", name="before")
    await tools.text("run_code", code="x = 3")
    await tools.text("exec", command="rm -r /root/work; echo one > /root/new")
    await tools.text("checkpoint", name="after")
    said = (await tools.text("diff", **{"from": "before", "to": "after", "path": "/root"})).splitlines()
    assert "A  /root/new  4 bytes" in said and "D  /root/work/a.txt  7 bytes" in said, said
    await tools.text("checkout", name="before")
    assert await tools.text("run_code", code="x") == "result:\n1"
    log = await tools.text("log")
    assert "before" in log and "after" in log and "<- current" in log, log
    await tools.text("checkout", name="after")
    assert await tools.text("run_code", code="x") == "result:\n3"
    patch = await tools.text("diff", **{"from": "before", "path": "/root", "patch": True})
    assert "+one" in patch, patch
    assert "no checkpoint" in await tools.error("checkout", name="other")
    await tools.text("checkout", name="before")


async def flow_forks_have_everything_and_go_their_own_ways(tools):
    forks = (await tools.text("fork", count=2)).splitlines()[1:]
    assert len(set(forks)) == 2, forks
    for number, fork in enumerate(forks):
        await tools.text("run_code", code=f"x += 10 * {number + 1}", sandbox=fork)
        await tools.text("write_file", path="f", content=fork, sandbox=fork)
    said = [await tools.text("run_code", code="x", sandbox=fork) for fork in forks]
    assert said == ["result:\n11", "result:\n21"], said
    assert await tools.text("read_file", path="f", sandbox=forks[0]) == forks[0]
    assert await tools.text("run_code", code="x") == "result:\n1"
    listed = {it["id"]: it for it in await tools.list()}
    (own,) = [it["id"] for it in listed.values() if it["own"]]
    assert all(listed[fork]["fork_of"] == own for fork in forks), listed
    for fork in forks:
        await tools.text("terminate", sandbox=fork)
    assert [it["id"] for it in await tools.list()] == [own]


async def flow_terminated_sandbox_is_followed_by_a_new_one(tools):
    await tools.text("terminate")
    assert await tools.list() == []
    assert "no such" in (await tools.error("read_file", path="work/a.txt")).lower()
    made = await tools.text("create", ttl_seconds=600)
    (own,) = [it["id"] for it in await tools.list() if it["own"]]
    assert own in made and len(await tools.list()) == 2, made


def running(pvmm):
    said = subprocess.run([pvmm, "ps", "--json"], stdout=subprocess.PIPE, check=True).stdout
    return json.loads(said)


def wait_until_gone(pvmm):
    deadline = time.monotonic() + 60
    while running(pvmm):
        assert time.monotonic() < deadline, running(pvmm)
        time.sleep(0.5)


async def over_stdio(pvmm):
    server = StdioServerParameters(command=pvmm, args=["mcp", "--ttl", "10m"], env=dict(os.environ))
    async with Client(stdio_client(server)) as client:
        tools = Tools(client)
        for name, flow in list(globals().items()):
            if name.startswith("flow_"):
                start = time.monotonic()
                await flow(tools)
                print(f"{name}: ok ({time.monotonic() - start:.1f} s)", flush=True)
        assert len(running(pvmm)) == 2
    wait_until_gone(pvmm)
    print("conversation over stdio: ok", flush=True)


def say(server, method, number=None, **params):
    message = {"jsonrpc": "2.0", "method": method, "params": params}
    message.update({"id": number} if number else {})
    server.stdin.write(json.dumps(message).encode() + b"\n")
    server.stdin.flush()


def answer(server, number):
    while (message := json.loads(server.stdout.readline())).get("id") != number:
        pass
    return message["result"]


def in_use(pvmm):
    """Starts `pvmm mcp` and returns it when it has a sandbox."""
    server = subprocess.Popen([pvmm, "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    client = {"name": "test", "version": "1"}
    first = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    say(server, "initialize", 1, **first)
    say(server, "notifications/initialized")
    say(server, "tools/call", 2, name="sandbox_exec", arguments={"command": "true"})
    assert not answer(server, 2)["isError"] and len(running(pvmm)) == 1
    return server


def cancelled_calls_end(pvmm):
    """A call that the client cancels ends its command or code; the sandbox goes on."""
    server = in_use(pvmm)
    start = time.monotonic()
    for number, tool, arguments in (
        (3, "sandbox_exec", {"command": "touch begun; sleep 1000", "timeout_seconds": 1000}),
        (4, "sandbox_run_code", {"code": "import time; x = 1; open('begun2', 'w'); "
                                         "time.sleep(1000)", "timeout_seconds": 1000}),
    ):
        say(server, "tools/call", number, name=tool, arguments=arguments)
    waiting = "while [ ! -e begun ] || [ ! -e begun2 ]; do sleep 0.1; done"
    say(server, "tools/call", 5, name="sandbox_exec", arguments={"command": waiting})
    answer(server, 5)
    for number in (3, 4):
        say(server, "notifications/cancelled", requestId=number)
    say(server, "tools/call", 6, name="sandbox_run_code", arguments={"code": "x"})
    assert answer(server, 6)["content"][0]["text"] == "result:\n1"
    left = "ls -l /proc/[0-9]*/exe 2>/dev/null | grep -c /sleep$"
    say(server, "tools/call", 7, name="sandbox_exec", arguments={"command": left})
    said = answer(server, 7)["content"][0]["text"]
    assert "stdout:\n0\n" in said, said
    assert time.monotonic() - start < 100
    server.stdin.close()
    assert server.wait(timeout=60) == 0
    print("cancelled calls: ok", flush=True)


def ended_by_signals(pvmm):
    for number in (signal.SIGINT, signal.SIGTERM):
        server = in_use(pvmm)
        server.send_signal(number)
        assert server.wait(timeout=60) == 0
        assert running(pvmm) == [], running(pvmm)
    killed = in_use(pvmm)
    killed.kill()
    killed.wait()
    # The next server ends what a killed one has left.
    subprocess.run([pvmm, "mcp"], stdin=subprocess.DEVNULL, timeout=60, check=True)
    assert running(pvmm) == [], running(pvmm)
    print("ended by signals: ok", flush=True)


async def over_http(pvmm):
    with Server(pvmm) as server:
        url = f"{server.url}/mcp"
        request = urllib.request.Request(url, method="POST", data=b"{}")
        try:
            urllib.request.urlopen(request)
            raise AssertionError("a request without a token was taken")
        except urllib.error.HTTPError as error:
            assert error.code == 401, error.code
        headers = {"Authorization": f"Bearer {server.token}"}
        http = create_mcp_http_client(headers=headers)
        async with Client(streamable_http_client(url, http_client=http)) as client:
            tools = Tools(client)
            await tools.text("run_code", code="x = 1")
            await tools.image("run_code", code=PNG)
            assert await tools.text("run_code", code="x") == "result:\n1"
            (row,) = server.call("GET", "/sandboxes")
            assert row["metadata"] == {"made_by": "mcp"} and row["ttl_seconds"] == 3600, row
            assert server.exec(row["id"], "ls /root/pixel.png") == "/root/pixel.png"
        wait_until_gone(pvmm)
        assert server.call("GET", "/sandboxes") == []
    print("conversation over HTTP: ok", flush=True)


async def main():
    await over_stdio(sys.argv[1])
    cancelled_calls_end(sys.argv[1])
    ended_by_signals(sys.argv[1])
    await over_http(sys.argv[1])


if __name__ == "__main__":
    asyncio.run(main())
