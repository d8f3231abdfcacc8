"""Undo: a checkpoint before a risky step, and back to it when the step goes wrong."""

from pvmm import Sandbox

if __name__ == "__main__":
    with Sandbox(template="code-interpreter", ttl_seconds=300) as sb:
        sb.run_code("balance = 100")
        sb.filesystem.write("/workspace/ledger", "100\n")
        sb.checkpoint()

        sb.run_code("balance = -1")
        sb.exec("rm -rf /workspace/*", check=True)
        assert not sb.filesystem.exists("/workspace/ledger")

        sb.rollback()
        balance = sb.run_code("print(balance)").stdout
        ledger = sb.filesystem.read_text("/workspace/ledger")
    print(balance, ledger)
    assert balance == "100\n" and ledger == "100\n", (balance, ledger)
