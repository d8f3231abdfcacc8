"""Runs the Python examples one after the other and says which hold what they promise.

`run_all.py` runs all, `run_all.py NAME…` those whose path contains a name.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
#: Modules that the programs import.
NOT_PROGRAMS = {"run_all.py", "scripted_model.py", "example_repository.py", "sandboxed.py"}
TIMEOUT_SECONDS = 300


def programs(names: "list[str]") -> "list[Path]":
    found = sorted(HERE.glob("*.py")) + sorted(HERE.glob("articles/*.py"))
    paths = [path for path in found if path.name not in NOT_PROGRAMS]
    return [p for p in paths if not names or any(n in str(p.relative_to(HERE)) for n in names)]


def run(path: Path) -> bool:
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, said = 124, str(late)
    verdict = "ok" if code == 0 else f"failed with code {code}"
    print(f"{path.relative_to(HERE)}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    if code:
        print(said, flush=True)
    return code == 0


if __name__ == "__main__":
    chosen = programs(sys.argv[1:])
    if not chosen:
        sys.exit(f"no example is called {' or '.join(sys.argv[1:])}")
    if not os.environ.get("PANDASTACK_API_KEY"):
        print("PANDASTACK_API_KEY is not set: the programs with the published client will fail")
    failed = sum(not run(path) for path in chosen)
    print(f"{len(chosen) - failed} of {len(chosen)} examples hold")
    sys.exit(1 if failed else 0)
