"""E2B's published clients against `pvmm serve`: every call that needs no large template.

    e2b_flows.py PVMM [NAME...]

Each flow is a function that gets a sandbox, or makes its own; one that raises is a failure.
"""

import os
import sys
import time
import urllib.error
import urllib.request

from server import Server, run_flows

TEMPLATE = "base"
# Where guests run without hardware for it, everything takes long.
PATIENCE = 180


def create(**options):
    from e2b_code_interpreter import Sandbox

    return Sandbox.create(TEMPLATE, timeout=900, request_timeout=PATIENCE, **options)


def run(sandbox, line, **options):
    return sandbox.commands.run(line, timeout=PATIENCE, **options)


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def flow_commands_have_output_codes_environment_and_place(sandbox):
    from e2b import CommandExitException, InvalidArgumentException

    pieces = []
    done = run(sandbox, "echo one; sleep 0.2; echo two; echo err >&2", on_stdout=pieces.append)
    assert (done.stdout, done.stderr, done.exit_code) == ("one\ntwo\n", "err\n", 0), done
    assert "".join(pieces) == "one\ntwo\n", pieces
    failed = raises(CommandExitException, lambda: run(sandbox, "echo bad >&2; exit 3"))
    assert (failed.exit_code, failed.stderr) == (3, "bad\n"), failed
    place = run(sandbox, "echo $A $B $(pwd) $(id -un)", envs={"B": "b"}, cwd="/usr", user="root")
    assert place.stdout == "a b /usr root\n", place
    assert run(sandbox, "pwd; id -un", user="nobody", cwd="/").stdout == "/\nnobody\n"
    assert run(sandbox, "pwd").stdout == "/root\n"
    long = run(sandbox, "head -c 2000000 /dev/zero | tr '\\0' x").stdout
    assert long == "x" * 2_000_000, len(long)
    raises(InvalidArgumentException, lambda: run(sandbox, "true", user="nobody-there"))
    raises(InvalidArgumentException, lambda: run(sandbox, "true", cwd="/not/there"))


def flow_command_that_takes_too_long_is_a_timeout(sandbox):
    from e2b import TimeoutException

    raises(TimeoutException, lambda: sandbox.commands.run("sleep 100", timeout=2))
    assert run(sandbox, "echo on").stdout == "on\n"


def flow_background_commands_are_listed_fed_and_killed(sandbox):
    from e2b import CommandExitException, NotFoundException

    sleeping = run(sandbox, "sleep 1000", background=True)
    listed = {process.pid: process for process in sandbox.commands.list()}
    assert listed[sleeping.pid].args[-1] == "sleep 1000", listed
    assert sandbox.commands.kill(sleeping.pid) and not sandbox.commands.kill(2**22)
    raises(CommandExitException, sleeping.wait)

    # What a command leaves in the background goes on.
    run(sandbox, "setsid sleep 987 >/dev/null 2>&1 </dev/null & echo $! > /tmp/left")
    assert run(sandbox, "sleep 1; kill -0 $(cat /tmp/left) && echo on").stdout == "on\n"

    reader = run(sandbox, 'read a; read b; echo "$a-$b"', background=True, stdin=True)
    sandbox.commands.send_stdin(reader.pid, "one\n")
    reader.disconnect()
    again = sandbox.commands.connect(reader.pid, timeout=PATIENCE)
    again.send_stdin("two\n")
    assert again.wait().stdout == "one-two\n"
    raises(NotFoundException, lambda: sandbox.commands.connect(2**22))

    counter = run(sandbox, "wc -c", background=True, stdin=True)
    sandbox.commands.stream_input(counter.pid, ["abc", b"def"])
    counter.close_stdin()
    assert counter.wait().stdout.strip() == "6"


def flow_files_are_written_read_listed_and_moved(sandbox):
    from e2b import FileNotFoundException, FileType

    files = sandbox.files
    written = files.write("/srv/new/a.txt", "hello é\n")
    assert (written.name, written.path) == ("a.txt", "/srv/new/a.txt"), written
    assert files.read("/srv/new/a.txt") == "hello é\n"
    blob = bytes(range(256)) * 1024
    files.write("/srv/new/b.bin", blob, use_octet_stream=True)
    assert files.read("/srv/new/b.bin", format="bytes") == blob
    assert b"".join(files.read("/srv/new/b.bin", format="stream")) == blob
    both = [{"path": "/srv/new/c", "data": "c"}, {"path": "/srv/new/d", "data": b"d"}]
    assert [it.path for it in files.write_files(both)] == ["/srv/new/c", "/srv/new/d"]
    files.write("relative", "r")
    assert files.read("/root/relative") == "r"
    names = [it.name for it in files.list("/srv/new")]
    assert names == ["a.txt", "b.bin", "c", "d"], names
    assert "/srv/new/c" in [it.path for it in files.list("/srv", depth=2)]
    info = files.get_info("/srv/new/b.bin")
    assert (info.type, info.size) == (FileType.FILE, len(blob)), info
    assert (info.permissions, info.owner, info.group) == ("-rw-r--r--", "root", "root"), info
    assert files.make_dir("/srv/x/y") and not files.make_dir("/srv/x/y")
    moved = files.rename("/srv/new/c", "/srv/x/y/z")
    assert moved.path == "/srv/x/y/z" and not files.exists("/srv/new/c")
    files.remove("/srv/x")
    assert not files.exists("/srv/x")
    for call in (files.read, files.get_info, files.list):
        raises(FileNotFoundException, lambda call=call: call("/not/there"))


def flow_signed_addresses_need_no_other_credential(sandbox):
    sandbox.files.write("/srv/signed", "signed\n")
    address = sandbox.download_url("/srv/signed", use_signature_expiration=600)
    assert urllib.request.urlopen(address).read() == b"signed\n"
    for wrong in (address.replace("signed&", "other&", 1), address[:-3] + "999"):
        error = raises(urllib.error.HTTPError, lambda wrong=wrong: urllib.request.urlopen(wrong))
        assert error.code == 401, error.code
    upload = urllib.request.Request(sandbox.upload_url("/srv/up"), data=b"up", method="POST")
    upload.add_header("Content-Type", "application/octet-stream")
    urllib.request.urlopen(upload)
    assert sandbox.files.read("/srv/up") == "up"


def flow_changes_in_a_directory_are_seen(sandbox):
    from e2b import FilesystemEventType as Kind

    sandbox.files.make_dir("/srv/watched/sub")
    watch = sandbox.files.watch_dir("/srv/watched", recursive=True)
    sandbox.files.write("/srv/watched/sub/f", "x")
    run(sandbox, "rm /srv/watched/sub/f")
    seen, until = [], time.monotonic() + PATIENCE
    while Kind.REMOVE not in [kind for _, kind in seen] and time.monotonic() < until:
        seen += [(event.name, event.type) for event in watch.get_new_events()]
    assert ("sub/f", Kind.WRITE) in seen and ("sub/f", Kind.REMOVE) in seen, seen
    watch.stop()


def flow_terminal_is_typed_into_and_resized(sandbox):
    from e2b import CommandExitException, PtySize

    terminal = sandbox.pty.create(PtySize(rows=20, cols=70), timeout=PATIENCE)
    sandbox.pty.send_stdin(terminal.pid, b"stty size\n")
    sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=90))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit 7\n")
    shown = bytearray()
    ended = raises(CommandExitException, lambda: terminal.wait(on_pty=shown.extend))
    assert ended.exit_code == 7 and b"30 90" in shown, (ended, shown)


def flow_code_shows_values_pictures_and_errors(sandbox):
    from e2b import NotFoundException

    out = []
    ran = sandbox.run_code("x = 41; print('said')", on_stdout=lambda it: out.append(it.line))
    assert ran.error is None and "".join(out) == "said\n" == "".join(ran.logs.stdout), ran
    assert sandbox.run_code("x + 1").text == "42"
    picture = (
        "class P:\n"
        "    def _repr_png_(self): return b'\\x89PNG'\n"
        "    def _repr_html_(self): return '<b>p</b>'\n"
        "P()"
    )
    shown = sandbox.run_code(picture).results[0]
    assert (shown.png, shown.html, shown.is_main_result) == ("iVBORw==", "<b>p</b>", True), shown
    failed = sandbox.run_code("1 / 0").error
    assert failed.name == "ZeroDivisionError" and "1 / 0" in failed.traceback, failed
    assert sandbox.run_code("import os; os.environ['A']").text == "'a'"
    ran = sandbox.run_code("os.environ.get('K')", envs={"K": "é'\"\n"})
    assert ran.text == repr("é'\"\n"), ran
    assert sandbox.run_code("os.environ.get('K') is None").text == "True"
    ran = sandbox.run_code("for n in range(2):\n    !echo $((6 * 7))\n_exit_code")
    assert (ran.logs.stdout, ran.text) == (["42\n", "42\n"], "0"), ran
    long = sandbox.run_code("raise ValueError('x' * 500_000)").error
    assert long.value == "x" * 500_000, len(long.value)
    context = sandbox.create_code_context(cwd="/usr", language="python")
    assert context.cwd == "/usr", context
    assert sandbox.run_code("import os; os.getcwd()", context=context).text == "'/usr'"
    assert sandbox.run_code("x", context=context).error.name == "NameError"
    assert context.id in [it.id for it in sandbox.list_code_contexts()]
    sandbox.run_code("kept = 1", context=context)
    sandbox.restart_code_context(context)
    assert sandbox.run_code("kept", context=context).error.name == "NameError"
    sandbox.remove_code_context(context)
    raises(NotFoundException, lambda: sandbox.run_code("1", context=context))


def flow_sandbox_is_found_connected_to_and_measured(sandbox):
    from e2b import SandboxQuery, SandboxState
    from e2b_code_interpreter import Sandbox

    info = sandbox.get_info()
    assert (info.sandbox_id, info.template_id) == (sandbox.sandbox_id, TEMPLATE), info
    assert info.state == SandboxState.RUNNING and info.metadata == {"k": "v é&="}, info
    query = SandboxQuery(metadata={"k": "v é&="}, state=[SandboxState.RUNNING])
    found = [it.sandbox_id for it in Sandbox.list(query=query).next_items()]
    assert found == [sandbox.sandbox_id], found
    other = SandboxQuery(metadata={"k": "w"})
    assert Sandbox.list(query=other).next_items() == []
    same = Sandbox.connect(sandbox.sandbox_id, request_timeout=PATIENCE)
    assert same.is_running() and run(same, "echo $A").stdout == "a\n"
    left = sandbox.get_info().end_at.timestamp() - time.time()
    assert left > 300, left
    sandbox.set_timeout(3000)
    assert sandbox.get_info().end_at.timestamp() - time.time() > 2000
    now = sandbox.get_metrics()[0]
    assert now.mem_total > now.mem_used > 0 and now.disk_total > 0 and now.cpu_count >= 1, now


def flow_paused_sandbox_goes_on_with_its_processes(_):
    from e2b import SandboxState

    with create() as sandbox:
        sandbox.run_code("x = 1")
        handle = run(sandbox, "read a; echo got $a", background=True, stdin=True)
        handle.disconnect()
        assert sandbox.pause() and not sandbox.pause()
        assert sandbox.get_info().state == SandboxState.PAUSED and not sandbox.is_running()
        sandbox.connect(timeout=900)
        assert sandbox.is_running() and sandbox.run_code("x + 1").text == "2"
        again = sandbox.commands.connect(handle.pid, timeout=PATIENCE)
        again.send_stdin("it\n")
        assert again.wait().stdout == "got it\n"


def flow_forks_and_snapshots_begin_where_their_sandbox_was(sandbox):
    from e2b_code_interpreter import Sandbox

    sandbox.files.write("/srv/state", "then")
    sandbox.run_code("x = 5")
    forks = sandbox.fork(timeout=900, count=2)
    assert [type(fork) for fork in forks] == [Sandbox, Sandbox], forks
    for fork in forks:
        assert fork.files.read("/srv/state") == "then" and fork.run_code("x").text == "5"
        assert fork.kill()
    snapshot = sandbox.create_snapshot()
    sandbox.files.write("/srv/state", "now")
    listed = [it.snapshot_id for it in sandbox.list_snapshots().next_items()]
    assert listed == [snapshot.snapshot_id], listed
    with Sandbox.create(snapshot.snapshot_id, timeout=900, request_timeout=PATIENCE) as other:
        assert other.files.read("/srv/state") == "then"
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)


def flow_refusals_are_the_clients_own_errors(sandbox):
    from e2b import AuthenticationException, SandboxException, SandboxNotFoundException
    from e2b_code_interpreter import Sandbox

    unknown = "00000000-0000-4000-8000-000000000000"
    raises(SandboxNotFoundException, lambda: Sandbox.get_info(unknown))
    raises(SandboxNotFoundException, lambda: Sandbox.connect(unknown))
    assert not Sandbox.kill(unknown)
    raises(AuthenticationException, lambda: Sandbox.list(api_key="wrong").next_items())
    missing = raises(SandboxException, lambda: Sandbox.create("no-such-template"))
    assert "there are: " in str(missing) and "base" in str(missing), missing
    absent = raises(SandboxException, lambda: Sandbox.create(TEMPLATE, mcp={"x": {}}))
    assert "501" in str(absent) and "gateway" in str(absent), absent
    request = urllib.request.Request(os.environ["E2B_API_URL"] + "/files?path=/etc/passwd")
    request.add_header("E2b-Sandbox-Id", sandbox.sandbox_id)
    for name, value in (("X-Other", ""), ("X-Access-Token", "wrong")):
        request.add_header(name, value)
        error = raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(request))
        assert error.code == 401, error.code


def flow_sandbox_that_has_ended_is_not_running(_):
    from e2b import TimeoutException

    sandbox = create()
    assert sandbox.kill() and not sandbox.kill()
    assert not sandbox.is_running()
    raises(TimeoutException, lambda: run(sandbox, "true"))
    raises(TimeoutException, lambda: sandbox.files.list("/"))


def main():
    pvmm, wanted = sys.argv[1], sys.argv[2:]
    with Server(pvmm) as server:
        os.environ.update(E2B_API_URL=server.url, E2B_SANDBOX_URL=server.url)
        os.environ["E2B_API_KEY"] = server.token
        run_flows(globals(), create(metadata={"k": "v é&="}, envs={"A": "a"}), wanted)


if __name__ == "__main__":
    main()
