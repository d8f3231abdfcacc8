"""From "How to Build a Sandboxed AI Coding Agent": the executor and its loop."""

from pandastack import Sandbox

class AgentSandbox:
    """One disposable computer that lives for the duration of a task."""

    def __init__(self, template: str = "code-interpreter"):
        # persistent=True: survives across steps; we kill it ourselves at the end.
        self.sbx = Sandbox.create(template=template, persistent=True, ttl_seconds=900)
        self._step = 0

    def run_code(self, code: str) -> dict:
        """The tool the model calls. Return value is serialized back into the prompt."""
        self._step += 1
        path = f"/workspace/step_{self._step}.py"
        self.sbx.filesystem.write(path, code)
        r = self.sbx.exec(f"python3 {path}", timeout_seconds=60)
        return {
            "exit_code": r.exit_code,
            "stdout": r.stdout[-4000:],  # don't blow the context window on logs
            "stderr": r.stderr[-2000:],
        }

    def close(self):
        self.sbx.kill()

def agent_loop(client, task: str, max_steps: int = 12):
    env = AgentSandbox()
    messages = [{"role": "user", "content": task}]
    try:
        for _ in range(max_steps):
            reply = client.next_action(messages)  # your model call
            if reply.is_final:
                return reply.text
            # The model asked to run code. We run it somewhere it can't hurt us.
            obs = env.run_code(reply.code)
            messages.append({"role": "tool", "content": obs})
        return "hit max_steps without finishing"  # budgets exist for a reason
    finally:
        env.close()  # the computer always gets thrown away

if __name__ == "__main__":
    from scripted_model import ActionClient

    # What this example promises:
    task = "Write the squares of 1 to 5 to a file, then add them up."
    said = agent_loop(ActionClient(), task)
    print(said)
    assert said == "The sum is 55.", said
    assert agent_loop(ActionClient(), task, max_steps=1) == "hit max_steps without finishing"
