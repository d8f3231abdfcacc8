"""A fresh sandbox for every task: nothing that one leaves behind reaches the next.

The tasks run side by side; each has its own kernel, files and processes.
"""

from concurrent.futures import ThreadPoolExecutor

from pvmm import Sandbox

TASKS = [
    "import os; print(os.path.exists('/root/trace')); open('/root/trace', 'w').write('mine')",
] * 4


def run(code: str) -> str:
    with Sandbox(template="code-interpreter", ttl_seconds=120, metadata={"kind": "task"}) as sb:
        ran = sb.run_code(code, timeout_seconds=30)
        assert ran.ok, ran.stderr
        return ran.stdout.strip()


if __name__ == "__main__":
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(run, TASKS))
    print(found)
    assert found == ["False"] * 4, found
