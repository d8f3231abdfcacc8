"""A sandbox, code in it, and a fork that answers differently: the published PandaStack client.

Set PANDASTACK_API and PANDASTACK_API_KEY as `pvmm serve` says them.
"""

import time

from pandastack import Sandbox
from pandastack.sandbox import CodeContext

start = time.monotonic()
with Sandbox.create(template="base", ttl_seconds=120) as sandbox:
    created = time.monotonic()
    session = sandbox.create_code_context()
    session.run_code("numbers = list(range(1_000_000)); factor = 6")
    before = time.monotonic()
    with sandbox.fork() as fork:
        forked = time.monotonic()
        # The fork has the session, its variables included, and changes only its own.
        same = CodeContext(fork, session.id)
        same.run_code("factor = 100")
        line = "factor * numbers[7]"
        one, other = session.run_code(line).text, same.run_code(line).text

print(f"a sandbox in {created - start:.2f} s, a fork of it in {forked - before:.2f} s")
print(f"the sandbox says {one}, its fork says {other}")
assert (one, other) == ("42", "700")
