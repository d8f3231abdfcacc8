"""What becomes of answers, arguments and events, without any connection."""

from __future__ import annotations

import unittest

import pvmm
from pvmm.service import Address
from pvmm.sse import Decoder, Event
from pvmm.state import preview_url


class Executions(unittest.TestCase):
    def test_bundles_and_single_forms_are_both_results(self) -> None:
        ran = pvmm.Execution.from_json(
            {
                "results": [
                    {"text/plain": "df", "text/html": "<table>"},
                    {"type": "image/png", "data": "aGk="},
                    {"type": "application/json", "data": '{"a": 1}'},
                ],
                "stdout": "hi\n",
                "exit": 0,
            }
        )
        self.assertEqual((ran.text, ran.html, ran.png), ("df", "<table>", "aGk="))
        self.assertEqual(ran.results[2].json, {"a": 1})
        self.assertTrue(ran.ok)

    def test_traceback_is_in_stderr_and_fails(self) -> None:
        ran = pvmm.Execution.from_json({"error": "ValueError: no", "stderr": "", "exit": 0})
        self.assertEqual((ran.exit_code, ran.stderr), (1, "ValueError: no"))

    def test_answer_without_exit_code_is_not_taken_for_success(self) -> None:
        with self.assertRaises(KeyError):
            pvmm.ExecResult.from_json({"stdout": ""})


class Arguments(unittest.TestCase):
    def test_allow_list_that_is_one_string_is_refused(self) -> None:
        nowhere = pvmm.Client("http://127.0.0.1:9", "secret")
        with self.assertRaisesRegex(TypeError, "list of names"):
            pvmm.Sandbox(egress_allowlist="pypi.org", client=nowhere)

    def test_mount_at_a_relative_path_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "begins with '/'"):
            pvmm.Volume("data", 10).mount("workspace")

    def test_volume_that_is_not_mounted_is_refused(self) -> None:
        nowhere = pvmm.Client("http://127.0.0.1:9", "secret")
        with self.assertRaisesRegex(TypeError, "Volume.mount"):
            pvmm.Sandbox(volumes=["data"], client=nowhere)  # type: ignore[list-item]


class Previews(unittest.TestCase):
    def test_local_service_is_reached_below_localhost(self) -> None:
        url = preview_url(Address("http://127.0.0.1:8080"), "id", 3000, None)
        self.assertEqual(url, "http://3000-id.localhost:8080")

    def test_host_can_be_given(self) -> None:
        url = preview_url(Address("https://pvmm.example/v1"), "id", 3000, "preview.example")
        self.assertEqual(url, "https://3000-id.preview.example")

    def test_port_out_of_range_is_refused(self) -> None:
        with self.assertRaises(ValueError):
            preview_url(Address("http://127.0.0.1:8080"), "id", 0, None)


class Events(unittest.TestCase):
    def test_events_cut_anywhere_come_out_whole(self) -> None:
        text = b"event: a\r\ndata: x\r\ndata: y\r\n\r\n: note\n\ndata: \xc3\xa9\n\n"
        for size in (1, 2, 3, len(text)):
            decoder = Decoder()
            events = [
                event
                for at in range(0, len(text), size)
                for event in decoder.feed(text[at : at + size])
            ]
            self.assertEqual(events, [Event("a", "x\ny"), Event("", "é")])


if __name__ == "__main__":
    unittest.main()
