"""What is sent and what becomes of refusals."""

from __future__ import annotations

import asyncio
import unittest

from peer import SANDBOX, Answer, Peer

import pvmm
from pvmm.client import pause_before_retry


def client(peer: Peer, **options: float) -> pvmm.Client:
    return pvmm.Client(peer.url, "secret", **options)


class Requests(unittest.TestCase):
    def test_create_with_all_options_sends_the_fields_of_the_api(self) -> None:
        with Peer(Answer.of(SANDBOX, 201)) as peer:
            volume = pvmm.Volume("data", 1024)
            pvmm.Sandbox(
                template="agent",
                cpu=2,
                memory_mb=512,
                ttl_seconds=60,
                persistent=True,
                metadata={"task": "one"},
                volumes=[volume.mount("/workspace"), volume.mount("/ro", read_only=True)],
                egress_allowlist=["pypi.org"],
                client=client(peer),
            )
        asked = peer.asked[0]
        self.assertEqual((asked.method, asked.path), ("POST", "/v1/sandboxes"))
        self.assertEqual(asked.headers["authorization"], "Bearer secret")
        self.assertEqual(
            asked.json,
            {
                "template": "agent",
                "cpu": 2,
                "memory_mb": 512,
                "ttl_seconds": 60,
                "persistent": True,
                "metadata": {"task": "one"},
                "volumes": [
                    {"name": "data", "mount_path": "/workspace", "read_only": False},
                    {"name": "data", "mount_path": "/ro", "read_only": True},
                ],
                "egress_allowlist": ["pypi.org"],
            },
        )

    def test_create_without_options_leaves_the_defaults_to_the_service(self) -> None:
        with Peer(Answer.of(SANDBOX, 201)) as peer:
            pvmm.Sandbox.create(client=client(peer))
        self.assertEqual(peer.asked[0].json, {"template": "code-interpreter"})

    def test_preview_is_asked_for_or_made_public(self) -> None:
        port = {"port": 8000, "public": True, "url": "u", "open_url": "o", "token": "t"}
        with Peer(Answer.of(SANDBOX, 201), Answer.of(port)) as peer:
            sandbox = pvmm.Sandbox(client=client(peer))
            self.assertEqual(sandbox.preview(8000).open_url, "o")
            self.assertTrue(sandbox.preview(8000, public=True).public)
        path = f"/v1/sandboxes/{sandbox.id}/ports/8000"
        asked = [(it.method, it.path) for it in peer.asked[1:]]
        self.assertEqual(asked, [("GET", path), ("PUT", path)])
        self.assertEqual(peer.asked[2].json, {"public": True})

    def test_snapshot_of_disks_alone_is_asked_for_by_its_field(self) -> None:
        row = {"id": "s", "disk_only": True}
        with Peer(Answer.of(SANDBOX, 201), Answer.of(row, 201)) as peer:
            sandbox = pvmm.Sandbox(client=client(peer))
            self.assertTrue(sandbox.snapshot(disk_only=True).disk_only)
            sandbox.snapshot()
        self.assertEqual(peer.asked[1].json, {"disk_only": True})
        self.assertEqual(peer.asked[2].body, b"")

    def test_with_block_ends_the_sandbox_once(self) -> None:
        with Peer(Answer.of(SANDBOX, 201), Answer(204)) as peer:
            with pvmm.Sandbox(client=client(peer)) as sb:
                sb.close()
        self.assertEqual([a.method for a in peer.asked], ["POST", "DELETE"])
        self.assertEqual(peer.asked[1].path, f"/v1/sandboxes/{SANDBOX['id']}")

    def test_with_block_of_a_persistent_one_leaves_it(self) -> None:
        with Peer(Answer.of({**SANDBOX, "persistent": True}, 201)) as peer:
            with pvmm.Sandbox(persistent=True, client=client(peer)):
                pass
        self.assertEqual(len(peer.asked), 1)

    def test_close_of_one_that_has_ended_is_quiet(self) -> None:
        with Peer(Answer.of(SANDBOX, 201), Answer.of({"error": "sandbox not found"}, 404)) as peer:
            pvmm.Sandbox(client=client(peer)).close()

    def test_paths_of_files_are_escaped(self) -> None:
        with Peer(Answer.of(SANDBOX), Answer.of({"path": "/a b+c&d", "bytes": 2})) as peer:
            sb = pvmm.Sandbox.get("one", client=client(peer))
            sb.filesystem.write("/a b+c&d", "hé")
        asked = peer.asked[1]
        self.assertEqual((asked.method, asked.query), ("PUT", {"path": "/a b+c&d"}))
        self.assertEqual(asked.body, "hé".encode())

    def test_exec_of_a_list_is_quoted_for_the_shell(self) -> None:
        done = Answer.of({"stdout": "", "stderr": "", "exit_code": 0})
        with Peer(Answer.of(SANDBOX), done) as peer:
            sb = pvmm.Sandbox.get("one", client=client(peer))
            sb.exec(["echo", "a b"], timeout_seconds=5, cwd="/tmp", env={"A": "1"})
        expected = {"cmd": "echo 'a b'", "timeout_seconds": 5, "cwd": "/tmp", "env": {"A": "1"}}
        self.assertEqual(peer.asked[1].json, expected)

    def test_run_follows_the_template_and_forks_share_the_session(self) -> None:
        data = {**SANDBOX, "template": "python-data"}
        ran = Answer.of({"results": [], "stdout": "7\n", "stderr": "", "exit": 0})
        with Peer(Answer.of(data), Answer.of({"id": "s1"}), ran, Answer.of(data), ran) as peer:
            sb = pvmm.Sandbox("python-data", client=client(peer))
            self.assertEqual(sb.run("print(7)").stdout, "7\n")
            sb.fork().run("print(7)")
        paths = [a.path.rpartition(f"{SANDBOX['id']}/")[2] for a in peer.asked[1:]]
        run = "repl/sessions/s1/run"
        self.assertEqual(paths, ["repl/sessions", run, "fork", run])

    def test_run_in_other_templates_is_a_shell_line(self) -> None:
        done = Answer.of({"stdout": "", "stderr": "", "exit_code": 0})
        with Peer(Answer.of(SANDBOX), done) as peer:
            pvmm.Sandbox(client=client(peer)).run("cd /workspace && git status")
        self.assertEqual(peer.asked[1].json, {"cmd": "cd /workspace && git status"})

    def test_rollback_forgets_sessions_opened_after_the_checkpoint(self) -> None:
        ran = Answer.of({"results": [], "stdout": "", "stderr": "", "exit": 0})
        nothing, session = Answer(204), Answer.of({"id": "s"})
        taken = Answer.of({"name": "1"}, 201)
        answers = [Answer.of(SANDBOX), taken, session, ran, nothing, session, ran]
        with Peer(*answers) as peer:
            sb = pvmm.Sandbox(client=client(peer))
            sb.checkpoint()
            sb.run_code("x = 1")
            sb.rollback()
            sb.run_code("x = 1")
        verbs = [a.path.rpartition("/")[2] for a in peer.asked[1:]]
        self.assertEqual(verbs, ["checkpoint", "sessions", "run", "rollback", "sessions", "run"])

    def test_checkout_uses_the_session_of_the_checkpoint_again(self) -> None:
        ran = Answer.of({"results": [], "stdout": "", "stderr": "", "exit": 0})
        nothing, session = Answer(204), Answer.of({"id": "s"})
        root, leaf = (Answer.of({"name": name}, 201) for name in ("root", "leaf"))
        answers = [Answer.of(SANDBOX), root, session, ran, leaf, nothing, session, ran]
        with Peer(*answers, nothing, ran, nothing, ran) as peer:
            sb = pvmm.Sandbox(client=client(peer))
            sb.checkpoint("root")
            sb.run_code("x = 1")
            self.assertEqual(sb.checkpoint("leaf").name, "leaf")
            sb.checkout("root")
            sb.run_code("x = 1")
            sb.checkout("leaf")
            sb.run_code("x")
            sb.rollback()
            sb.run_code("x")
        verbs = [a.path.rpartition("/")[2] for a in peer.asked[4:]]
        middle = ["checkout", "sessions", "run", "checkout", "run", "rollback", "run"]
        self.assertEqual(verbs, ["checkpoint", *middle])
        self.assertEqual(peer.asked[4].json, {"name": "leaf"})

    def test_log_and_diff_are_values(self) -> None:
        node = {"name": "b", "parent": "a", "created_at": "2026-01-01T00:00:00Z", "current": True}
        entry = {"kind": "file", "size": 5, "mode": 420, "uid": 0, "gid": 0, "target": None}
        change = {"change": "removed", "path": "/x", "what": [], "old": entry, "new": None}
        found = {"added": 0, "changed": 0, "removed": 1, "changes": [change], "left_out": 0}
        answers = [Answer.of(SANDBOX), Answer.of({"items": [node]}), Answer.of(found)]
        with Peer(*answers, Answer.of({"error": "lost"})) as peer:
            sb = pvmm.Sandbox(client=client(peer))
            self.assertEqual(sb.log(), [pvmm.Checkpoint(**node)])
            diff = sb.diff("a", path="/etc", patch=True)
            with self.assertRaisesRegex(pvmm.ServiceError, "lost"):
                sb.diff("a", "b")
        self.assertEqual((diff.removed, diff.changes[0].old_size), (1, 5))
        self.assertEqual((diff.changes[0].kind, diff.changes[0].new_size), ("file", None))
        self.assertEqual(peer.asked[2].query, {"from": "a", "path": "/etc", "patch": "true"})
        self.assertEqual(peer.asked[3].query["to"], "b")

    def test_volume_that_is_not_there_is_made(self) -> None:
        made = Answer.of({"name": "w", "size_mb": 20480}, 201)
        with Peer(Answer.of({"error": "no volume w: not found"}, 404), made) as peer:
            volume = pvmm.Volume.get_or_create("w", size_gb=20, client=client(peer))
        self.assertEqual(peer.asked[1].json, {"name": "w", "size_mb": 20480})
        self.assertEqual(volume.size_mb, 20480)


class Streams(unittest.TestCase):
    def stream(self, body: bytes) -> tuple[int, list[str]]:
        heard: list[str] = []
        with Peer(Answer.of(SANDBOX), Answer(200, body)) as peer:
            sb = pvmm.Sandbox(client=client(peer))
            return sb.exec_stream("true", heard.append, heard.append), heard

    def test_output_comes_in_order_and_the_exit_code_last(self) -> None:
        code, heard = self.stream(
            b'event: stdout\ndata: {"chunk":"a\\u2028b\\n"}\n\n'
            b": ping\n\n"
            b'event: stderr\ndata: {"chunk":"c"}\n\n'
            b'event: exit\ndata: {"exit_code":3}\n\n'
        )
        self.assertEqual((code, heard), (3, ["a\u2028b\n", "c"]))

    def test_stream_that_breaks_off_is_not_a_success(self) -> None:
        with self.assertRaises(pvmm.OutcomeUnknown) as caught:
            self.stream(b'event: stdout\ndata: {"chunk":"half"}\n\n')
        self.assertEqual(caught.exception.stdout, "half")

    def test_timeout_in_a_stream_keeps_the_output(self) -> None:
        with self.assertRaises(pvmm.CommandTimeout) as caught:
            self.stream(
                b'event: stdout\ndata: {"chunk":"half"}\n\n'
                b'event: error\ndata: {"error":"command timeout after 1 s"}\n\n'
            )
        self.assertEqual(caught.exception.stdout, "half")


class Refusals(unittest.TestCase):
    def refusal(self, status: int, **headers: str) -> pvmm.PvmmError:
        answer = Answer.of({"error": "why"}, status, **headers)
        with Peer(answer) as peer, self.assertRaises(pvmm.PvmmError) as caught:
            pvmm.Sandbox.get("one", client=client(peer))
        self.assertEqual(str(caught.exception), "why")
        return caught.exception

    def test_each_status_is_an_error_of_its_own(self) -> None:
        kinds = {
            400: pvmm.InvalidRequest,
            401: pvmm.AuthError,
            403: pvmm.AuthError,
            404: pvmm.NotFound,
            409: pvmm.Conflict,
            413: pvmm.InvalidRequest,
            429: pvmm.LimitReached,
            500: pvmm.ServiceError,
            501: pvmm.NotSupported,
            503: pvmm.OutOfCapacity,
            507: pvmm.OutOfCapacity,
        }
        for status, kind in kinds.items():
            with self.subTest(status=status):
                self.assertIs(type(self.refusal(status)), kind)

    def test_retry_after_is_handed_on(self) -> None:
        self.assertEqual(self.refusal(429, Retry_After="2").retry_after, 2.0)

    def test_answer_that_is_no_json_is_shown_as_it_is(self) -> None:
        with Peer(Answer(502, b"bad gateway\n")) as peer:
            with self.assertRaisesRegex(pvmm.ServiceError, "^bad gateway$"):
                pvmm.Sandbox.get("one", client=client(peer))

    def test_command_out_of_time_keeps_its_output(self) -> None:
        late = {"error": "command timeout after 1 s", "stdout": "half", "timed_out": True}
        for status in (504, 200):
            with (
                self.subTest(status=status),
                Peer(Answer.of(SANDBOX), Answer.of(late, status)) as peer,
            ):
                sb = pvmm.Sandbox(client=client(peer))
                with self.assertRaises(pvmm.CommandTimeout) as caught:
                    sb.exec("sleep 9", timeout_seconds=1)
                self.assertEqual(caught.exception.stdout, "half")

    def test_answer_of_something_else_is_named(self) -> None:
        for body in (b"<html>", b"[]", b"{}"):
            with self.subTest(body=body), Peer(Answer(200, body)) as peer:
                with self.assertRaisesRegex(pvmm.ServiceError, "is the service a pvmm"):
                    pvmm.Sandbox.get("one", client=client(peer))

    def test_check_turns_a_failed_command_into_an_error(self) -> None:
        failed = Answer.of({"stdout": "", "stderr": "a\nno such file\n", "exit_code": 2})
        with Peer(Answer.of(SANDBOX), failed) as peer:
            sb = pvmm.Sandbox(client=client(peer))
            with self.assertRaisesRegex(pvmm.CommandFailed, "code 2: no such file"):
                sb.exec("cat x", check=True)

    def test_nobody_listening_is_a_lost_connection(self) -> None:
        with self.assertRaises(pvmm.ConnectionLost):
            pvmm.Sandbox(client=pvmm.Client("http://127.0.0.1:9", "secret", timeout=2))

    def test_create_waits_for_room_and_asks_again(self) -> None:
        full = Answer.of({"error": "no room"}, 503, Retry_After="0")
        with Peer(full, Answer.of(SANDBOX, 201)) as peer:
            pvmm.Sandbox(client=client(peer))
        self.assertEqual(len(peer.asked), 2)

    def test_refusals_without_a_hint_are_raised_at_once(self) -> None:
        for status, hint in ((429, None), (503, None), (500, 1.0), (409, 1.0)):
            error = pvmm.PvmmError("why", status=status, retry_after=hint)
            with self.subTest(status=status):
                self.assertIsNone(pause_before_retry(error, 0, 0, 60))

    def test_wait_that_exceeds_the_budget_is_not_begun(self) -> None:
        error = pvmm.PvmmError("why", status=503, retry_after=30)
        self.assertIsNone(pause_before_retry(error, 0, 40, 60))


class Async(unittest.TestCase):
    def test_the_same_requests_are_sent(self) -> None:
        ran = Answer.of({"results": [{"text/plain": "42"}], "stdout": "", "stderr": "", "exit": 0})
        exit_ = Answer(200, b'event: exit\ndata: {"exit_code":0}\n\n')
        answers = [Answer.of(SANDBOX, 201), Answer.of({"id": "s"}), ran, exit_, Answer(204)]

        async def use(url: str) -> None:
            connection = await pvmm.AsyncClient.connect(url, "secret")
            async with pvmm.AsyncSandbox("agent", client=connection) as sb:
                self.assertEqual((await sb.run_code("6 * 7")).text, "42")
                self.assertEqual(await sb.exec_stream("true"), 0)
            await connection.close()

        with Peer(*answers) as peer:
            asyncio.run(use(peer.url))
        paths = [a.path.rpartition("/")[2] for a in peer.asked]
        self.assertEqual(paths, ["sandboxes", "sessions", "run", "stream", SANDBOX["id"]])

    def test_checkpoints_are_a_tree_too(self) -> None:
        node, found = {"name": "a"}, {"added": 1, "changed": 0, "removed": 0, "changes": []}
        answers = [Answer.of(node, 201), Answer(204), Answer.of({"items": [node]}), Answer.of(found)]

        async def use(url: str) -> None:
            connection = await pvmm.AsyncClient.connect(url, "secret")
            sb = await pvmm.AsyncSandbox.create("agent", client=connection)
            self.assertEqual((await sb.checkpoint("a")).name, "a")
            await sb.checkout("a")
            self.assertEqual([it.name for it in await sb.log()], ["a"])
            self.assertEqual((await sb.diff("a")).added, 1)
            await sb.delete_checkpoint("a")
            await connection.close()

        with Peer(Answer.of(SANDBOX, 201), *answers, Answer(204)) as peer:
            asyncio.run(use(peer.url))
        paths = [a.path.partition(f"{SANDBOX['id']}/")[2] for a in peer.asked[1:]]
        expected = ["checkpoint", "checkout", "checkpoints", "diff", "checkpoints/a"]
        self.assertEqual(paths, expected)

    def test_await_makes_it_too(self) -> None:
        async def use(url: str) -> str:
            connection = await pvmm.AsyncClient.connect(url, "secret")
            sb = await pvmm.AsyncSandbox.create("agent", client=connection)
            await connection.close()
            return sb.id

        with Peer(Answer.of(SANDBOX, 201)) as peer:
            self.assertEqual(asyncio.run(use(peer.url)), SANDBOX["id"])


if __name__ == "__main__":
    unittest.main()
