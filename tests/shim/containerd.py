"""Containers by containerd's own client and the runtime io.containerd.pvmm.v1.

    containerd.py PVMM FOLDER_WITH_SHIM CONTAINERD_ROOT [NAME...]

The template `container` must be built; it is baked first.
"""

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time

import image

PVMM, SHIM, ROOT = sys.argv[1:4]
BUSYBOX = "/bin/busybox"
RUNTIME = "io.containerd.pvmm.v1"
IMAGE = "example.test/busybox:1"
CONFIG = """
version = 2
root = "{0}/root"
state = "{0}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{0}/containerd.sock"
"""


class Containerd:
    """A containerd with folders of its own."""

    def __init__(self):
        self.place = tempfile.mkdtemp(prefix="containerd-")
        with open(f"{self.place}/config.toml", "w") as file:
            file.write(CONFIG.format(self.place))
        self.env = dict(os.environ, PATH=f"{SHIM}:{ROOT}/usr/bin:{os.environ['PATH']}")
        self.daemon = None

    def start(self):
        words = [f"{ROOT}/usr/bin/containerd", "--config", f"{self.place}/config.toml"]
        log = open(f"{self.place}/log", "ab")
        self.daemon = subprocess.Popen(words, env=self.env, stdout=log, stderr=log)
        wait(lambda: self.ctr("version").returncode == 0, 60, "containerd to answer")

    def kill(self):
        self.daemon.kill()
        self.daemon.wait()

    def ctr(self, *words, **options):
        words = ["ctr", "--address", f"{self.place}/containerd.sock", *words]
        options = dict(dict(capture_output=True, text=True, timeout=180), **options)
        return subprocess.run(words, env=self.env, **options)

    def run(self, name, *command, flags=("--rm",), **options):
        words = ["run", "--runtime", RUNTIME, "--snapshotter", "native", *flags]
        return self.ctr(*words, IMAGE, name, *command, **options)

    def log(self):
        with open(f"{self.place}/log", errors="replace") as file:
            return file.read()


def wait(condition, seconds, what):
    end = time.time() + seconds
    while not condition():
        if time.time() > end:
            raise SystemExit(f"waited {seconds} s for {what}")
        time.sleep(0.2)


def expect(said, code, out=None):
    assert said.returncode == code, said
    if out is not None:
        assert said.stdout.strip() == out, said


def vms():
    said = subprocess.run([PVMM, "ps", "-q"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said
    return said.stdout.split()


def shims():
    said = subprocess.run(["pgrep", "-f", "containerd-shim-pvmm-v1 "], capture_output=True, text=True)
    return [int(pid) for pid in said.stdout.split()]


def has_state(containerd, name, state):
    return re.search(rf"{name}\s+\d+\s+{state}", containerd.ctr("task", "ls").stdout)


def end(containerd, name):
    """Kills a container and deletes it."""
    expect(containerd.ctr("task", "kill", "--signal", "SIGKILL", name), 0)
    wait(lambda: has_state(containerd, name, "STOPPED"), 30, "the container's end")
    delete(containerd, name)


def delete(containerd, name):
    assert "exit code 137" in containerd.ctr("task", "delete", name).stderr
    expect(containerd.ctr("container", "delete", name), 0)


def nothing_left():
    wait(lambda: not vms() and not shims(), 60, "the end of every VM and shim")


def flow_output_and_exit_code(containerd):
    expect(containerd.run("one", "sh", "-c", "echo $GREETING; pwd; exit 7"), 7, "hello from an image\n/")
    said = containerd.run("two", "sh", "-c", "echo out; echo err >&2")
    assert (said.returncode, said.stdout, said.stderr) == (0, "out\n", "err\n"), said
    # Another kernel than the host's.
    ours = os.uname().release
    assert containerd.run("three", "uname", "-r").stdout.strip() not in ("", ours)
    nothing_left()


def flow_input(containerd):
    said = containerd.run("input", "cat", input="some words\n")
    expect(said, 0, "some words")


def flow_program_that_is_not_there(containerd):
    said = containerd.run("missing", "no-such-program")
    assert said.returncode != 0, said
    nothing_left()


def flow_exec_pause_kill(containerd):
    expect(containerd.run("long", "sleep", "1000", flags=("--detach",)), 0)
    assert has_state(containerd, "long", "RUNNING")
    assert len(vms()) == 1
    # What a shim knows of its containers is in no core dump.
    for pid in shims():
        with open(f"/proc/{pid}/limits") as file:
            assert re.search(r"Max core file size\s+0\s+0", file.read())
    said = containerd.ctr("task", "exec", "--exec-id", "e1", "long", "sh", "-c", "hostname; exit 3")
    assert said.returncode == 3 and said.stdout.strip(), said
    said = containerd.ctr("task", "exec", "--exec-id", "e2", "--user", "1000", "long", "id", "-u")
    expect(said, 0, "1000")
    assert containerd.ctr("task", "exec", "--exec-id", "e1", "long", "true").returncode == 0

    expect(containerd.ctr("task", "pause", "long"), 0)
    assert has_state(containerd, "long", "PAUSED")
    expect(containerd.ctr("task", "resume", "long"), 0)
    expect(containerd.ctr("task", "exec", "--exec-id", "e3", "long", "echo", "on"), 0, "on")

    end(containerd, "long")
    nothing_left()


def flow_terminal(containerd):
    ours, theirs = pty.openpty()
    words = ["ctr", "--address", f"{containerd.place}/containerd.sock", "run", "--rm", "--tty"]
    words += ["--runtime", RUNTIME, "--snapshotter", "native", IMAGE, "terminal"]
    line = "test -t 0 && test -t 1 && echo a terminal; exit 5"
    process = subprocess.Popen([*words, "sh", "-c", line], env=containerd.env,
                               stdin=theirs, stdout=theirs, stderr=theirs)
    assert process.wait(timeout=180) == 5
    os.set_blocking(ours, False)
    assert b"a terminal" in os.read(ours, 4096)
    nothing_left()


def flow_containers_of_a_pod_share_a_vm(containerd):
    expect(containerd.run("pod", "sleep", "1000", flags=("--detach",)), 0)
    of_pod = ("--rm", "--annotation", "io.kubernetes.cri.sandbox-id=pod")
    said = containerd.run("member", "sh", "-c", "ps | grep -c '[s]leep'; echo > /mark", flags=of_pod)
    # It sees neither the processes nor the files of the other.
    expect(said, 0, "0")
    assert len(vms()) == 1
    said = containerd.ctr("task", "exec", "--exec-id", "e", "pod", "ls", "/")
    assert "mark" not in said.stdout and "bin" in said.stdout, said
    end(containerd, "pod")
    nothing_left()


def flow_killed_shim(containerd):
    expect(containerd.run("orphan", "sleep", "1000", flags=("--detach",)), 0)
    for pid in shims():
        os.kill(pid, signal.SIGKILL)
    wait(lambda: not vms(), 60, "the end of the killed shim's VM")
    wait(lambda: "orphan" not in containerd.ctr("task", "ls").stdout
         or "STOPPED" in containerd.ctr("task", "ls").stdout, 60, "containerd to notice")
    containerd.ctr("task", "delete", "--force", "orphan")
    expect(containerd.ctr("container", "delete", "orphan"), 0)
    nothing_left()


def flow_killed_containerd(containerd):
    expect(containerd.run("survivor", "sleep", "1000", flags=("--detach",)), 0)
    containerd.kill()
    containerd.start()
    assert has_state(containerd, "survivor", "RUNNING")
    said = containerd.ctr("task", "exec", "--exec-id", "e", "survivor", "echo", "here")
    expect(said, 0, "here")
    end(containerd, "survivor")
    nothing_left()


def flow_killed_vm(containerd):
    expect(containerd.run("victim", "sleep", "1000", flags=("--detach",)), 0)
    record = subprocess.run([PVMM, "kill", "--signal", "KILL", *vms()], capture_output=True, text=True)
    wait(lambda: has_state(containerd, "victim", "STOPPED"), 60, f"the container's end ({record})")
    delete(containerd, "victim")
    nothing_left()


def main():
    chosen = sys.argv[4:]
    subprocess.run([PVMM, "--quiet", "template", "bake", "container"], check=True)
    containerd = Containerd()
    containerd.start()
    archive = f"{containerd.place}/image.tar"
    image.write(archive, IMAGE, BUSYBOX)
    expect(containerd.ctr("image", "import", "--no-unpack", archive), 0)
    flows = [(name[5:], flow) for name, flow in globals().items() if name.startswith("flow_")]
    try:
        for name, flow in flows:
            if not chosen or any(word in name for word in chosen):
                begun = time.time()
                flow(containerd)
                print(f"{name}: ok ({time.time() - begun:.1f} s)", flush=True)
    except BaseException:
        print(containerd.log()[-4000:], flush=True)
        raise
    finally:
        containerd.kill()


main()
