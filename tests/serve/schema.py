"""schemathesis on docs/api.json: requests right and wrong, against a service with live sandboxes.

    schema.py PVMM API EXAMPLES
"""

import subprocess
import sys

from server import Server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,negative_data_rejection"


def main() -> None:
    pvmm, api, examples = sys.argv[1:]
    with Server(pvmm, "--max-sandboxes", "2") as server:
        sandbox = server.call("POST", "/sandboxes", {"template": "base", "ttl_seconds": 3600})["id"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", api, "--url", server.url,
                   "--checks", CHECKS, "--phases", "coverage,fuzzing", "--max-examples", examples,
                   "--generation-deterministic", "--request-timeout", "60",
                   "-H", f"Authorization: Bearer {server.token}"]
        code = subprocess.run(command).returncode
        assert server.exec(sandbox, "echo on") == "on"
        assert code == 0, f"schemathesis ended with {code}"
        print("schemathesis: the service survived")


if __name__ == "__main__":
    main()
