"""Runs every program of `examples/` against one `pvmm serve`: Python, articles, TypeScript, harbor.

    examples.py PVMM NODE_MODULES [NAME...]

The templates must be built; those that the programs use are baked first.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from server import Server

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ["code-interpreter", "agent", "python-data"]


def typescript(node_modules: str, names: "list[str]") -> bool:
    """Runs the programs from a copy, beside which the packages are found."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples/typescript", folder, dirs_exist_ok=True)
        os.symlink(node_modules, Path(folder) / "node_modules")
        for path in sorted(Path(folder).glob("*.mjs")):
            if path.name == "scripted_model.mjs" or (names and not any(n in f"typescript/{path.name}" for n in names)):
                continue
            start = time.monotonic()
            done = subprocess.run(
                ["node", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
            )
            verdict = "ok" if done.returncode == 0 else f"failed with code {done.returncode}"
            print(f"typescript/{path.name}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
            if done.returncode:
                good = False
                print(done.stdout, flush=True)
    return good


def main() -> None:
    pvmm, node_modules, names = sys.argv[1], sys.argv[2], sys.argv[3:]
    for template in TEMPLATES:
        for more in ([], ["--volumes", "rw"]):
            start = time.monotonic()
            subprocess.run([pvmm, "--quiet", "template", "bake", template, *more], check=True)
            print(f"baked {template} {' '.join(more)} ({time.monotonic() - start:.1f} s)", flush=True)
    with Server(pvmm):
        python = subprocess.run([sys.executable, str(ROOT / "examples/run_all.py"), *names]).returncode
        node = typescript(node_modules, names)
    sys.exit(0 if python == 0 and node else 1)


if __name__ == "__main__":
    main()
