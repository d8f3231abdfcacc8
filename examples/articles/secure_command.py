"""From "Secure code execution for AI agents": one command of an agent, run safely."""

from pandastack import Sandbox

# Whatever the agent decided to run this turn.
agent_command = "python3 -c 'import statistics; print(statistics.mean([2,4,6,8]))'"

# One hardware-isolated microVM per task (~179ms to create), auto-killed on exit.
with Sandbox.create(
    template="code-interpreter",  # python + node scientific stack
    ttl_seconds=300,              # reaped automatically if abandoned
    metadata={"task": "agent-tool-call"},
) as sb:
    result = sb.exec(agent_command, timeout_seconds=30)
    print(result.stdout, result.exit_code)
# Context manager destroys the VM here — no state survives to the next task.

# What this example promises:
assert (result.stdout, result.exit_code) == ("5\n", 0), result
assert sb.metadata["task"] == "agent-tool-call"
assert sb.id not in [other.id for other in Sandbox.list()]
