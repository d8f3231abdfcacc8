"""From "Sandbox Agent": a sandbox with limits, and a pool of them.

The article runs the code in a process of the host. Here only the imports differ: a temporary
folder is a computer, and the process runs in it.
"""

from dataclasses import dataclass, field
from sandboxed import subprocess
from sandboxed import tempfile
from sandboxed import Path

@dataclass
class SandboxConfig:
    language: str = "python"
    timeout_seconds: int = 30
    max_memory_mb: int = 256
    allowed_imports: list[str] = field(
        default_factory=lambda: ["json", "math", "re"])

@dataclass
class ExecutionResult:
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    timed_out: bool = False

class CodeSandbox:
    def __init__(self, config: SandboxConfig):
        self.config = config
        self.work_dir = tempfile.mkdtemp()

    def execute(self, code: str) -> ExecutionResult:
        file_path = Path(self.work_dir) / "main.py"
        file_path.write_text(code, encoding="utf-8")
        try:
            proc = subprocess.run(
                ["python3", str(file_path)],
                capture_output=True, text=True,
                timeout=self.config.timeout_seconds,
                cwd=self.work_dir)
            return ExecutionResult(
                stdout=proc.stdout,
                stderr=proc.stderr,
                exit_code=proc.returncode)
        except subprocess.TimeoutExpired:
            return ExecutionResult(
                stderr="Execution timed out",
                exit_code=1, timed_out=True)

from dataclasses import dataclass, field
import shutil

class SandboxPool:
    def __init__(self, pool_size: int = 3):
        self.pool_size = pool_size
        self.sandboxes: list[CodeSandbox] = []
        self.available: list[int] = []

    def initialize(self, config: SandboxConfig):
        for i in range(self.pool_size):
            sb = CodeSandbox(config)
            self.sandboxes.append(sb)
            self.available.append(i)

    def acquire(self) -> CodeSandbox | None:
        if not self.available:
            return None
        idx = self.available.pop(0)
        return self.sandboxes[idx]

    def release(self, sandbox: CodeSandbox):
        idx = self.sandboxes.index(sandbox)
        self._cleanup(sandbox)
        self.available.append(idx)

    def _cleanup(self, sandbox: CodeSandbox):
        work = Path(sandbox.work_dir)
        for item in work.iterdir():
            if item.is_file():
                item.unlink()

    def status(self) -> dict:
        return {"total": self.pool_size,
                "available": len(self.available),
                "in_use": self.pool_size - len(
                    self.available)}

if __name__ == "__main__":
    import sandboxed

    # What this example promises:
    try:
        pool = SandboxPool(pool_size=2)
        pool.initialize(SandboxConfig(timeout_seconds=5))
        first, second = pool.acquire(), pool.acquire()
        assert first and second and pool.acquire() is None
        assert pool.status() == {"total": 2, "available": 0, "in_use": 2}

        told = first.execute("import os; print(6 * 7, os.listdir('.'))")
        assert (told.stdout, told.exit_code) == ("42 ['main.py']\n", 0), told
        failed = first.execute("raise SystemExit(3)")
        assert failed.exit_code == 3, failed
        slow = second.execute("while True: pass")
        assert slow == ExecutionResult(stderr="Execution timed out", exit_code=1, timed_out=True)

        pool.release(first)
        assert pool.status() == {"total": 2, "available": 1, "in_use": 1}
        assert list(Path(first.work_dir).iterdir()) == []
        print(pool.status())
    finally:
        sandboxed.close_all()
