"""Clients from npm against `pvmm serve`: the programs of `tests/serve/node`.

    node_clients.py PVMM NODE_MODULES [PROGRAM [NAME...]]
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from server import Server

HERE = Path(__file__).resolve().parent / "node"
PROGRAMS = ["e2b.mjs", "mcp.mjs"]


def run(node_modules: str, program: str, *words: str, before: "list[str]" = []) -> bool:
    """Runs a program from a copy of its folder, beside which the packages are found."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE, folder, dirs_exist_ok=True)
        os.symlink(node_modules, Path(folder) / "node_modules")
        return subprocess.run([*before, "node", str(Path(folder) / program), *words]).returncode == 0


def main() -> None:
    pvmm, node_modules, wanted = sys.argv[1], sys.argv[2], sys.argv[3:]
    with Server(pvmm) as server:
        os.environ.update(PVMM=pvmm, E2B_API_URL=server.url, E2B_SANDBOX_URL=server.url)
        os.environ["E2B_API_KEY"] = server.token
        good = [run(node_modules, program, *wanted[1:]) for program in wanted[:1] or PROGRAMS]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
