"""Finding a service, and starting one with a program that stands in for pvmm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from peer import Answer, Peer

import pvmm
from pvmm import service

STAND_IN = f"""#!{sys.executable}
import json, os, sys
assert sys.argv[1:] == ["serve", "--with-parent", "--listen", "127.0.0.1:0"], sys.argv
open(os.environ["MARK"], "w").write(str(os.getpid()))
print(json.dumps({{"url": "http://127.0.0.1:9", "token": "t"}}), flush=True)
sys.stdin.read()
"""


class Names(unittest.TestCase):
    def test_arguments_come_before_the_environment(self) -> None:
        env = {"PVMM_API": "http://env", "PVMM_API_KEY": "env"}
        self.assertEqual(service.named(env, "http://arg"), service.Address("http://arg", "env"))
        self.assertEqual(service.named(env), service.Address("http://env", "env"))

    def test_own_names_come_before_pandastacks(self) -> None:
        env = {"PANDASTACK_API": "http://panda", "PANDASTACK_API_KEY": "p"}
        self.assertEqual(service.named(env), service.Address("http://panda", "p"))
        self.assertEqual(service.named({**env, "PVMM_API": "unix:/x"}).url, "unix:/x")

    def test_base_url_has_no_version(self) -> None:
        self.assertEqual(service.Address("http://h:1/v1").base_url, "http://h:1")
        self.assertEqual(service.Address("unix:/s").base_url, "http://localhost")

    def test_lines_that_are_no_address_are_refused(self) -> None:
        for line in ("", "ready", "[]", '{"token": "t"}', '{"url": 1}'):
            self.assertIsNone(service.parse(line))


class Announcements(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)
        variable = mock.patch.dict(os.environ, {"PVMM_RUNTIME_DIR": folder.name})
        variable.start()
        self.addCleanup(variable.stop)

    def announce(self, url: str) -> None:
        (self.dir / "serve.json").write_text(json.dumps({"url": url, "token": "t"}))

    def test_running_service_is_found(self) -> None:
        with Peer(Answer()) as peer:
            self.announce(peer.url)
            self.assertEqual(service.announced(), service.Address(peer.url, "t"))

    def test_service_that_is_gone_is_not_used(self) -> None:
        self.announce("http://127.0.0.1:9")
        self.assertIsNone(service.announced())
        self.announce(f"unix:{self.dir}/no.sock")
        self.assertIsNone(service.announced())

    def test_file_of_another_user_is_not_trusted(self) -> None:
        with Peer(Answer()) as peer:
            self.announce(peer.url)
            with (
                mock.patch("os.geteuid", lambda: 12345),
                mock.patch("os.fstat", lambda _: mock.Mock(st_uid=54321)),
            ):
                self.assertIsNone(service.announced())


class Starts(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)

    def program(self, text: str) -> str:
        path = self.dir / "pvmm"
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def test_started_service_ends_with_the_program(self) -> None:
        mark = self.dir / "mark"
        env = {
            **os.environ,
            "PVMM_BIN": self.program(STAND_IN),
            "MARK": str(mark),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        code = (
            "from pvmm import service; a = service.own(); assert a is service.own(); print(a.url)"
        )
        for ending in ("", "; import os; os.kill(os.getpid(), 9)"):
            done = subprocess.run(
                [sys.executable, "-c", code + ending],
                env=env,
                capture_output=True,
                text=True,
                timeout=30,
            )
            if not ending:
                self.assertEqual(done.stdout, "http://127.0.0.1:9\n", done.stderr)
            self.assertTrue(ends(int(mark.read_text())), "the service outlived the program")

    def test_service_that_fails_says_why(self) -> None:
        failing = self.program("#!/bin/sh\necho 'no /dev/kvm here' >&2; exit 125\n")
        with mock.patch.dict(os.environ, {"PVMM_BIN": failing}):
            with self.assertRaisesRegex(pvmm.ServiceNotFound, "no /dev/kvm here"):
                service._start()

    def test_service_that_says_nothing_is_ended_at_the_deadline(self) -> None:
        silent = self.program("#!/bin/sh\ncat\n")
        with (
            mock.patch.dict(os.environ, {"PVMM_BIN": silent}),
            mock.patch.object(service, "START_SECONDS", 0.2),
        ):
            with self.assertRaisesRegex(pvmm.ServiceNotFound, "it said nothing"):
                service._start()

    def test_missing_program_names_the_ways_out(self) -> None:
        with mock.patch.dict(os.environ, {"PATH": "/nowhere", "PVMM_BIN": ""}):
            with self.assertRaisesRegex(pvmm.ServiceNotFound, "PVMM_API"):
                service._start()


def ends(pid: int) -> bool:
    """Tells whether a process ends within some seconds."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


if __name__ == "__main__":
    unittest.main()
