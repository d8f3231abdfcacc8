"""A persistent workspace: the computer is thrown away, the user's files stay.

The volume is mounted into a fresh sandbox at each visit, and its content is what the last visit
left.
"""

import os

from pvmm import Conflict, Sandbox, Volume


def visit(volume: Volume, command: str) -> str:
    with Sandbox(template="agent", ttl_seconds=120, volumes=[volume.mount("/workspace")]) as sb:
        return sb.exec(command, cwd="/workspace", timeout_seconds=30, check=True).stdout


if __name__ == "__main__":
    volume = Volume.get_or_create(name=f"example-workspace-{os.getpid()}", size_gb=1)
    try:
        visit(volume, "git init -q . && echo hello > note && git add note")
        status = visit(volume, "git status --short")
        print(status)
        assert status == "A  note\n", status

        # One writer at a time: a second one is told so.
        mount = volume.mount("/workspace")
        with Sandbox(template="agent", ttl_seconds=120, volumes=[mount]):
            try:
                Sandbox(template="agent", ttl_seconds=120, volumes=[mount]).close()
            except Conflict as refusal:
                print(refusal)
            else:
                raise AssertionError("two sandboxes could write to one volume")
    finally:
        volume.delete()
