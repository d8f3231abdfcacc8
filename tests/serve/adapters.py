"""Agent frameworks with their published E2B adapters against `pvmm serve`; models are scripted.

    adapters.py PVMM [NAME...]

The templates `base` and `code-interpreter` must be built; they are baked first.
Each flow runs an agent whose model says what is written here, and checks what the agent did.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

from server import Server, run_flows

TEMPLATE = "base"


def sandboxes(server):
    return [row["id"] for row in server.call("GET", "/sandboxes")]


def flow_smolagents_runs_code_in_the_sandbox(server):
    before = sandboxes(server)
    from smolagents import CodeAgent, tool
    from smolagents.models import ChatMessage, Model

    @tool
    def double(number: int) -> int:
        """Doubles a number.

        Args:
            number: The number.
        """
        return 2 * number

    steps = [
        "import os\nx = double(20)\nprint('kernel', os.uname().sysname, x)",
        "1 / 0",
        "final_answer({'x': x + 2, 'both': (1, 'é')})",
    ]
    seen = []

    class Scripted(Model):
        def generate(self, messages, **_):
            seen.append(str(messages[-1].content))
            return ChatMessage("assistant", f"Thought: on.\n<code>\n{steps.pop(0)}\n</code>")

    # Its tools import numpy and PIL, which the template that it asks for by itself has.
    options = {"timeout": 900, "request_timeout": 180}
    agent = CodeAgent([double], Scripted(), executor_type="e2b", executor_kwargs=options)
    answer = agent.run("Go.", additional_args={"given": [1, 2]})
    assert answer == {"x": 42, "both": (1, "é")}, answer
    assert "kernel Linux 40" in seen[1] and "ZeroDivisionError" in seen[2], seen
    agent.cleanup()
    assert sandboxes(server) == before, before


def flow_langchain_agent_uses_commands_and_files(server):
    before = sandboxes(server)
    import e2b
    from deepagents import create_deep_agent
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langchain_e2b import E2BSandbox

    steps = [
        ("execute", {"command": "pwd; echo $((6 * 7)) > made; exit 3"}),
        ("read_file", {"file_path": "/home/user/made"}),
        ("write_file", {"file_path": "/home/user/note.txt", "content": "one é\n"}),
        ("edit_file", {"file_path": "/home/user/note.txt", "old_string": "one", "new_string": "two"}),
        ("glob", {"pattern": "*.txt", "path": "/home/user"}),
        ("grep", {"pattern": "two", "path": "/home/user"}),
        ("ls", {"path": "/home/user"}),
    ]

    class Scripted(BaseChatModel):
        @property
        def _llm_type(self):
            return "scripted"

        def bind_tools(self, tools, **_):
            return self

        def _generate(self, messages, *_, **__):
            said = sum(isinstance(message, AIMessage) for message in messages)
            message = AIMessage("done")
            if said < len(steps):
                name, args = steps[said]
                message = AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"c{said}"}])
            return ChatResult(generations=[ChatGeneration(message=message)])

    with e2b.Sandbox.create(TEMPLATE, timeout=900, request_timeout=180) as sandbox:
        backend = E2BSandbox(sandbox=sandbox, timeout=180)
        agent = create_deep_agent(Scripted(), backend=backend)
        result = agent.invoke({"messages": [("user", "Go.")]}, {"recursion_limit": 100})
        said = {it.tool_call_id: str(it.content) for it in result["messages"] if it.type == "tool"}
        assert "/home/user" in said["c0"] and "3" in said["c0"], said
        assert "42" in said["c1"] and "note.txt" in said["c4"], said
        assert "note.txt" in said["c5"] and "made" in said["c6"], said
        assert sandbox.files.read("/home/user/note.txt") == "two é\n"
        up = backend.upload_files([("/home/user/up.bin", bytes(range(256)))])
        assert up[0].error is None, up
        down = backend.download_files(["/home/user/up.bin", "/not/there"])
        assert down[0].content == bytes(range(256)) and down[1].error == "file_not_found", down
    assert sandboxes(server) == before, before


def flow_openai_agent_works_in_its_workspace(server):
    before = sandboxes(server)
    from agents import Runner, set_tracing_disabled
    from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
    from agents.items import ModelResponse
    from agents.models.interface import Model
    from agents.run_config import RunConfig, SandboxRunConfig
    from agents.sandbox import Manifest, SandboxAgent
    from agents.sandbox.entries import File
    from agents.usage import Usage
    from openai.types.responses import (
        ResponseFunctionToolCall,
        ResponseOutputMessage,
        ResponseOutputText,
    )

    set_tracing_disabled(True)
    steps = [
        {"cmd": "cat task.txt; pwd"},
        {"cmd": "echo $WORD > made.txt; exit 3"},
        {"cmd": "stty size; read a; echo got $a", "tty": True, "yield_time_ms": 2000},
    ]
    outputs = []

    def next_call():
        """Returns the next call: commands, then what is typed into the terminal of the last."""
        if len(outputs) < len(steps):
            return "exec_command", steps[len(outputs)]
        shown = "".join(outputs[2:])
        if "got it" in shown:
            return None
        session = int(outputs[2].split("session ID ")[1].split()[0])
        typed = "it\n" if "24 80" in shown and "it" not in answered else ""
        answered.append(typed.strip())
        return "write_stdin", {"session_id": session, "chars": typed}

    answered = []

    class Scripted(Model):
        async def get_response(self, system_instructions, input, *_, **__):
            outputs[:] = [it["output"] for it in input if it.get("type") == "function_call_output"]
            number = len(outputs)
            if call := next_call():
                words = {"name": call[0], "arguments": json.dumps(call[1])}
                item = ResponseFunctionToolCall(
                    type="function_call", call_id=f"c{number}", id=f"f{number}", **words
                )
            else:
                text = ResponseOutputText(type="output_text", text="done", annotations=[])
                item = ResponseOutputMessage(
                    id="m", type="message", role="assistant", status="completed", content=[text]
                )
            return ModelResponse(output=[item], usage=Usage(), response_id=None)

        def stream_response(self, *_, **__):
            raise NotImplementedError

    async def run():
        client = E2BSandboxClient()
        options = E2BSandboxClientOptions(
            "e2b", TEMPLATE, timeout=900, envs={"WORD": "built"}, exposed_ports=(8000,),
            timeouts={"fast_op_s": 120, "keepalive_s": 120, "cleanup_s": 120, "file_upload_s": 120},
        )
        manifest = Manifest(entries={"task.txt": File(content=b"the task\n")})
        session = await client.create(manifest=manifest, options=options)
        async with session:
            agent = SandboxAgent("tester", model=Scripted(), instructions="Go.")
            config = RunConfig(sandbox=SandboxRunConfig(client=client, session=session))
            result = await Runner.run(agent, "Go.", run_config=config, max_turns=100)
            assert result.final_output == "done", result
            assert "the task" in outputs[0] and "/workspace" in outputs[0], outputs
            assert "code 3" in outputs[1] and answered.count("it") == 1, outputs
            with await session.read("made.txt") as file:
                assert file.read() == b"built\n"
            await session.exec("echo page > index.html", shell=True)
            line = "setsid python3 -m http.server --bind 127.0.0.1 8000"
            await session.exec(f"{line} >/dev/null 2>&1 </dev/null &", shell=True)
            endpoint = await session.resolve_exposed_port(8000)
            assert endpoint.host.startswith("8000-") and not endpoint.tls, endpoint
            await asyncio.to_thread(shown, server, f"{endpoint.host}:{endpoint.port}")

    asyncio.run(run())
    assert sandboxes(server) == before, before


def shown(server, host):
    """Waits until a public port of a sandbox shows its page. Names are not resolved here."""
    request = urllib.request.Request(f"{server.url}/index.html", headers={"Host": host})
    until = time.monotonic() + 180
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.read() == b"page\n"
                return
        except urllib.error.HTTPError as error:
            assert error.code == 503, (error.code, error.read())
            time.sleep(0.2)
    raise AssertionError("nothing listens")


def main():
    pvmm, wanted = sys.argv[1], sys.argv[2:]
    for template in (TEMPLATE, "code-interpreter"):
        subprocess.run([pvmm, "--quiet", "template", "bake", template], check=True)
    with Server(pvmm) as server:
        os.environ.update(E2B_API_URL=server.url, E2B_SANDBOX_URL=server.url)
        os.environ["E2B_API_KEY"] = server.token
        run_flows(globals(), server, wanted)


if __name__ == "__main__":
    main()
