"""From "AI agents": a volume for each user, mounted into every sandbox."""

import os

from pvmm import Sandbox, Volume

user_id = os.getpid()

vol = Volume.get_or_create(name=f"user-{user_id}-workspace", size_gb=20)

with Sandbox(
    template="code-interpreter",
    volumes=[vol.mount("/workspace")],
) as sb:
    sb.run("cd /workspace && git status")

    # What this example promises: the files of this sandbox ...
    made = sb.run("cd /workspace && git init -q . && echo kept > note && git status --short")
    assert made.stdout == "?? note\n", made

# ... are there in the next, which is another computer.
vol = Volume.get_or_create(name=f"user-{user_id}-workspace", size_gb=20)
with Sandbox(template="code-interpreter", volumes=[vol.mount("/workspace")]) as again:
    seen = again.run("cd /workspace && git status --short && cat note")
    assert again.id != sb.id and seen.stdout == "?? note\nkept\n", seen
vol.delete()
