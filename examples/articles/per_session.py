"""From "How to Give Your AI Agent a Sandbox": one VM for the whole conversation."""

from pandastack import Sandbox

# Per-session: one VM for the whole conversation.
sb = Sandbox.create(template="code-interpreter", ttl_seconds=1800)
try:
    def run_code(code: str) -> str:
        r = sb.run_code(code, language="python")
        return (r.stdout + (r.stderr if r.exit_code else "")).strip()
    # ... run the agent loop here, all calls share `sb` ...

    # What this example promises: a file of one step is there in the next.
    assert run_code("open('/workspace/note', 'w').write('kept')") == ""
    assert run_code("print(open('/workspace/note').read())") == "kept"
finally:
    sb.kill()  # always tear down; ttl_seconds is the backstop
assert sb.id not in [other.id for other in Sandbox.list()]
