"""Undo: checkpoints before risky steps, what each step changed, and back to any of them."""

from pvmm import Sandbox

if __name__ == "__main__":
    with Sandbox(template="code-interpreter", ttl_seconds=300) as sb:
        sb.run_code("balance = 100")
        sb.filesystem.write("/workspace/ledger", "100\n")
        sb.checkpoint("before")

        sb.run_code("balance = -1")
        sb.exec("rm -rf /workspace/*", check=True)
        sb.checkpoint("after")
        changes = [(it.change, it.path) for it in sb.diff("before", path="/workspace").changes]

        sb.checkout("before")
        balance = sb.run_code("print(balance)").stdout
        ledger = sb.filesystem.read_text("/workspace/ledger")
        tree = [(it.name, it.parent, it.current) for it in sb.log()]
    print(balance, ledger, changes, tree)
    assert balance == "100\n" and ledger == "100\n", (balance, ledger)
    assert changes == [("removed", "/workspace/ledger")], changes
    assert tree == [("before", None, True), ("after", "before", False)], tree
