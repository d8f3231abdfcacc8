"""Containers by containerd's own client and the runtime io.containerd.pvmm.v1.

    containerd.py PVMM FOLDER_WITH_SHIM CONTAINERD_ROOT [NAME...]

The template `container` must be built; it is baked first.
"""

import json
import os
import pty
import re
import shutil
import signal
import socket
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


class Far:
    """A server with two ports in a network namespace of its own."""

    ADDRESS = "198.51.100.2"

    def __init__(self):
        for line in ("netns add far", "link add near0 type veth peer name far0 netns far",
                     "addr add 198.51.100.1/24 dev near0", "link set near0 up",
                     f"-n far addr add {self.ADDRESS}/24 dev far0", "-n far link set far0 up"):
            subprocess.run(["ip", *line.split()], check=True, timeout=30)
        self.place = tempfile.mkdtemp(prefix="far-")
        with open(f"{self.place}/word", "w") as file:
            file.write("far\n")
        serve = ["ip", "netns", "exec", "far", sys.executable, "-m", "http.server", "-d", self.place]
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.servers = [subprocess.Popen([*serve, port], **options) for port in ("8000", "8001")]
        for port in (8000, 8001):
            wait(lambda: self.answers(port), 60, f"port {port}")

    def answers(self, port):
        try:
            socket.create_connection((self.ADDRESS, port), 5).close()
        except OSError:
            return False
        return True

    def close(self):
        for server in self.servers:
            server.kill()
            server.wait()
        subprocess.run(["ip", "netns", "del", "far"], check=True, timeout=30)
        shutil.rmtree(self.place)


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


def pvmm(*words):
    """Runs a command of pvmm and returns its output."""
    said = subprocess.run([PVMM, *words], capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said
    return said.stdout


def vms():
    return pvmm("ps", "-q").split()


def image_digest(containerd, name):
    for line in containerd.ctr("image", "ls").stdout.splitlines():
        if line.split()[0] == name:
            return re.search(r"sha256:[0-9a-f]{64}", line).group()
    raise SystemExit(f"there is no image {name}")


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


def flow_checkpoint(containerd):
    line = "echo kept >/mark; while sleep 1; do :; done"
    expect(containerd.run("saved", "sh", "-c", line, flags=("--detach",)), 0)
    said = containerd.ctr("task", "checkpoint", "saved", timeout=900)
    expect(said, 0)
    # The container goes on.
    wait(lambda: has_state(containerd, "saved", "RUNNING"), 30, "the container to go on")
    said_in = containerd.ctr("task", "exec", "--exec-id", "e", "saved", "cat", "/mark")
    expect(said_in, 0, "kept")
    end(containerd, "saved")
    nothing_left()

    # What containerd packed is a VM that goes on where the container was.
    name = said.stdout.strip()
    index = json.loads(containerd.ctr("content", "get", image_digest(containerd, name)).stdout)
    (packed,) = [part["digest"] for part in index["manifests"]
                 if part["mediaType"].endswith("checkpoint.criu.tar")]
    folder = f"{containerd.place}/checkpoint"
    os.mkdir(folder)
    blob = f"{containerd.place}/root/io.containerd.content.v1.content/blobs/sha256/{packed[7:]}"
    for archive in (blob, f"{folder}/snapshot.tar"):
        subprocess.run(["tar", "-C", folder, "-xf", archive], check=True, timeout=300)
    pvmm("restore", folder, "--name", "again")
    mark = "cat /var/lib/containers/saved/rootfs/mark"
    assert pvmm("exec", "again", "--", "sh", "-c", mark) == "kept\n"
    pvmm("kill", "again")
    shutil.rmtree(folder)
    expect(containerd.ctr("image", "rm", name), 0)
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


def flow_pod_from_a_snapshot(containerd):
    pvmm("run", "--quiet", "--detach", "--template", "container", "--name", "warmed")
    pvmm("exec", "warmed", "--", "sh", "-c", "echo 54321 >/proc/sys/kernel/pid_max")
    pvmm("snapshot", "warmed", "shim-warm")
    pvmm("kill", "warmed")
    flags = ("--rm", "--annotation", "pvmm/from=shim-warm")
    expect(containerd.run("warm", "cat", "/proc/sys/kernel/pid_max", flags=flags), 0, "54321")
    pvmm("snapshots", "rm", "shim-warm")
    said = containerd.run("lost", "true", flags=("--rm", "--annotation", "pvmm/from=/etc"))
    assert said.returncode != 0 and "no name of a snapshot" in said.stderr, said
    nothing_left()


def flow_pod_with_a_network(containerd):
    """A pod reaches what its annotation says, and nothing else."""
    pvmm("--quiet", "template", "bake", "container", "--net")
    far = Far()
    try:
        flags = ("--rm", "--annotation", f"pvmm/egress={Far.ADDRESS}:8000, far.test:8000")
        line = f"cat /etc/resolv.conf; wget -qO- http://{Far.ADDRESS}:8000/word"
        said = containerd.run("reaches", "sh", "-c", line, flags=flags)
        assert said.returncode == 0 and said.stdout.endswith("far\n"), said
        assert "nameserver 10.0.2.1" in said.stdout, said
        line = f"wget -T 20 -qO- http://{Far.ADDRESS}:8001/word"
        said = containerd.run("denied", "sh", "-c", line, flags=flags)
        assert said.returncode != 0 and "far" not in said.stdout, said
    finally:
        far.close()
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
