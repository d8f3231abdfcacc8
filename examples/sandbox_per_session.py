"""One sandbox for a whole conversation: variables, files and packages stay between the steps."""

from scripted_model import Anthropic

from pvmm import Sandbox

TOOL = {"name": "run_code", "input_schema": {"type": "object"}}


def converse(request: str, sb: Sandbox) -> str:
    model, messages = Anthropic(), [{"role": "user", "content": request}]
    while True:
        reply = model.messages.create(model="any", max_tokens=2048, tools=[TOOL], messages=messages)
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": sb.run_code(block.input["code"]).stdout,
            }
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    with Sandbox(template="code-interpreter", ttl_seconds=600) as sb:
        said = converse("Count to three, one step at a time.", sb)
        steps = sb.filesystem.read_text("/root/steps")
    print(said)
    assert said == "I have counted to 3.", said
    assert steps == "one\ntwo\nthree\n", steps
