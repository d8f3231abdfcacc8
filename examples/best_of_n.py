"""Best of N: one warm environment, a fork for each attempt, the tests decide.

The repository is set up once. Every fork begins with it, and a wrong attempt costs a `close()`.
"""

from concurrent.futures import ThreadPoolExecutor

from scripted_model import generate_n_fixes

from pvmm import Sandbox

SETUP = """
mkdir -p /workspace/repo && cd /workspace/repo
printf 'def mean(values):\\n    return sum(values) / 2\\n' > stats.py
cat > check.py <<'END'
from stats import mean
assert mean([2, 4, 6]) == 4
assert mean([1, 2]) == 1.5
END
"""


def attempt(child: Sandbox, patch: str) -> bool:
    child.filesystem.write("/workspace/repo/fix.patch", patch)
    child.exec("patch -p1 < fix.patch", cwd="/workspace/repo", check=True)
    return child.exec("python3 check.py", cwd="/workspace/repo", timeout_seconds=60).ok


if __name__ == "__main__":
    patches = generate_n_fixes(5)
    with Sandbox(template="agent", ttl_seconds=600) as base:
        base.exec(SETUP, check=True)
        children = base.fork_tree(len(patches), ttl_seconds=300)
        with ThreadPoolExecutor(max_workers=len(children)) as pool:
            passed = list(pool.map(attempt, children, patches))

        winner = children[passed.index(True)]
        promotion = winner.promote(cleanup_siblings=True)
        source = winner.filesystem.read_text("/workspace/repo/stats.py")
        untouched = base.filesystem.read_text("/workspace/repo/stats.py")
        winner.close()
    print(f"{sum(passed)} of {len(passed)} attempts pass; the first is\n{source}")
    assert passed == [False, True, False, False, True], passed
    assert "sum(values) / len(values)" in source
    assert untouched == "def mean(values):\n    return sum(values) / 2\n", untouched
    assert sorted(promotion.deleted) == sorted(c.id for c in children if c is not winner)
