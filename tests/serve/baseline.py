"""Sandboxes of a server with a processor baseline do not see what other hosts may lack.

    baseline.py PVMM
"""

import sys
import time
import urllib.error

from server import Server


def main() -> None:
    with Server(sys.argv[1], "--cpu", "x86-64-v2") as server:
        deadline = time.monotonic() + 300
        while True:
            try:
                sandbox = server.call("POST", "/sandboxes", {"template": "base"})["id"]
                break
            except urllib.error.HTTPError as error:
                # The template of this baseline is being baked.
                assert error.code == 503 and time.monotonic() < deadline, error.read()
                time.sleep(2)
        seen = server.exec(sandbox, "for f in sse4_2 avx; do grep -cw $f /proc/cpuinfo; done | xargs")
        assert seen == "1 0", seen
        forked = server.call("POST", f"/sandboxes/{sandbox}/fork")["id"]
        assert server.exec(forked, "python3 -c 'print(6*7)'") == "42"
        for one in (sandbox, forked):
            server.call("DELETE", f"/sandboxes/{one}")
    print("baseline: a sandbox and its fork")


if __name__ == "__main__":
    main()
