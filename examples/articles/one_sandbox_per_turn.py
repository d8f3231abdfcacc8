"""From "AI agents": one sandbox for each turn of an agent."""

import json
import shlex

from pvmm import Sandbox
from scripted_model import OpenAI

oai = OpenAI()

def agent_turn(user_msg: str) -> str:
    with Sandbox(template="code-interpreter") as sb:
        messages = [{"role": "user", "content": user_msg}]
        while True:
            resp = oai.chat.completions.create(
                model="gpt-4.1",
                messages=messages,
                tools=[{
                    "type": "function",
                    "function": {
                        "name": "run_python",
                        "parameters": {
                            "type": "object",
                            "properties": {"code": {"type": "string"}},
                        },
                    },
                }],
            )
            msg = resp.choices[0].message
            if not msg.tool_calls:
                return msg.content

            for tc in msg.tool_calls:
                code = json.loads(tc.function.arguments)["code"]
                result = sb.run(f"python -c {shlex.quote(code)}")
                messages.append({
                    "role": "tool",
                    "tool_call_id": tc.id,
                    "content": result.stdout + result.stderr,
                })

if __name__ == "__main__":
    # What this example promises:
    said = agent_turn("What is the 30th Fibonacci number? Compute it, don't guess.")
    print(said)
    assert said == "The 30th Fibonacci number is 832040.", said
