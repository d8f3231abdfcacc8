"""schemathesis on docs/api.json: requests right and wrong, against a service with live sandboxes.

    schema.py PVMM API EXAMPLES
"""

import subprocess
import sys
import tempfile

from server import Server

# The clients' contract asks for 503 and 507 while there is no room, and for 504 when a command's time
# has passed.
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 101, 503, 504, 507]
"""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,negative_data_rejection"


def main() -> None:
    pvmm, api, examples = sys.argv[1:]
    # A create that has to bake first may be told to come again.
    subprocess.run([pvmm, "--quiet", "template", "bake", "base"], stdout=subprocess.DEVNULL, check=True)
    with Server(pvmm, "--max-sandboxes", "2") as server, tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(CONFIG)
        config.flush()
        server.call("POST", "/sandboxes", {"template": "base", "ttl_seconds": 3600})
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", config.name, "run", api, "--url", server.url,
                   "--checks", CHECKS, "--phases", "coverage,fuzzing", "--max-examples", examples,
                   "--generation-deterministic", "--request-timeout", "60",
                   "-H", f"Authorization: Bearer {server.token}"]
        code = subprocess.run(command).returncode
        for row in server.call("GET", "/sandboxes"):
            server.call("DELETE", f"/sandboxes/{row['id']}")
        sandbox = server.call("POST", "/sandboxes", {"template": "base", "ttl_seconds": 600})["id"]
        assert server.exec(sandbox, "echo on") == "on"
        assert code == 0, f"schemathesis ended with {code}"
        print("schemathesis: the service survived")


if __name__ == "__main__":
    main()
