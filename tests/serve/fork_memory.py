"""Ten forks of a session that holds much memory: what they add, as the operating system counts it.

    fork_memory.py PVMM MIB FORKS MOST_MIB
"""

import sys
import time

from server import Server


def per_cpu_kib() -> int:
    """Free pages in the lists of single processors, which MemFree counts as used: up to 40 MiB."""
    lines = (line.split() for line in open("/proc/zoneinfo"))
    return 4 * sum(int(words[1]) for words in lines if words[:1] == ["count:"])


def used_kib() -> int:
    """Memory of the host that is neither free nor cached file data."""
    facts = dict(line.split(":", 1) for line in open("/proc/meminfo"))
    kib = lambda name: int(facts[name].split()[0])
    free = kib("MemFree") + per_cpu_kib()
    return kib("MemTotal") - free - kib("Buffers") - (kib("Cached") - kib("Shmem"))


def settled() -> int:
    time.sleep(12)
    return min(used_kib() for _ in range(5) if time.sleep(0.5) is None)


def main() -> None:
    pvmm, mib, forks, most = sys.argv[1], *(int(word) for word in sys.argv[2:])
    with Server(pvmm) as server:
        body = {"template": "base", "memory_mb": mib + 524, "ttl_seconds": 1800}
        deadline = time.monotonic() + 300
        while True:
            try:
                parent = server.call("POST", "/sandboxes", body)["id"]
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(2)
        session = server.call("POST", f"/sandboxes/{parent}/repl/sessions", {"language": "python"})["id"]

        def run(sandbox: str, code: str) -> str:
            answer = server.call("POST", f"/sandboxes/{sandbox}/repl/sessions/{session}/run", {"code": code})
            assert not answer.get("error"), answer
            return answer["stdout"].strip()

        run(parent, f"import os; x = os.urandom(1 << 20) * {mib}")
        before = settled()
        tree = server.call("POST", f"/sandboxes/{parent}/fork-tree", {"count": forks})
        children = tree if isinstance(tree, list) else tree["items"] if "items" in tree else tree["children"]
        frozen = settled()
        for child in children:
            line = "print(len(x), sum(x[:len(x) // 10:4096]))"
            assert run(child["id"], line).startswith(str(mib << 20))
        after = settled()
        print(f"{forks} forks of {mib} MiB: {(frozen - before) / 1024:.1f} MiB when made, "
              f"{(after - before) / 1024:.1f} MiB after a line in each")
        assert after - before <= most * 1024, "the forks add too much"


if __name__ == "__main__":
    main()
