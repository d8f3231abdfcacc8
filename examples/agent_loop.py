"""The agent loop: the model proposes code, the sandbox runs it, the model sees what came back.

One sandbox lives for the whole request, so that a step finds what the step before has left.
"""

import json

from scripted_model import OpenAI

from pvmm import Sandbox

MAX_STEPS = 8
TOOL = {
    "type": "function",
    "function": {
        "name": "run_python",
        "description": "Run Python in a session that keeps its variables. Print what you need.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


def answer(request: str) -> str:
    model = OpenAI()
    messages = [{"role": "user", "content": request}]
    with Sandbox(template="code-interpreter", ttl_seconds=300) as sb:
        for _ in range(MAX_STEPS):
            reply = model.chat.completions.create(model="any", messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                code = json.loads(call.function.arguments)["code"]
                ran = sb.run_code(code, timeout_seconds=30)
                # A failure is an observation like any other: the model can correct itself.
                seen = ran.stdout + ran.stderr
                messages.append({"role": "tool", "tool_call_id": call.id, "content": seen[-4000:]})
    raise RuntimeError(f"no answer within {MAX_STEPS} steps")


if __name__ == "__main__":
    said = answer("Which of the numbers up to 50 are prime, and what is their sum?")
    print(said)
    assert said == "Their sum is 328.", said
