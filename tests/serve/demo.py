"""`examples/quickstart.py` against a `pvmm serve` of its own.

    demo.py PVMM
"""

import subprocess
import sys
from pathlib import Path

from server import Server

with Server(sys.argv[1]):
    program = Path(__file__).resolve().parents[2] / "examples/quickstart.py"
    sys.exit(subprocess.run([sys.executable, str(program)]).returncode)
