"""Pods of Kubernetes in VMs: a control plane, a kubelet, containerd and the runtime class pvmm.

    cluster.py PVMM FOLDER_WITH_SHIM CLUSTER_ROOT [NAME...]

The template `container` must be built; the installer of shim/kubernetes bakes it, and installs the
programs.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, f"{HERE}/../shim")

import image
from control_plane import LONG, NODE, PAUSE, Cluster, is_ready, wait

PVMM, SHIM, ROOT = sys.argv[1:4]
MANIFESTS = f"{HERE}/../../shim/kubernetes"
BUSYBOX = "/bin/busybox"
IMAGE = "example.test/busybox:1"
INSTALLER = "example.test/installer:1"
PODS_AT_ONCE = 10


def manifest(name):
    with open(f"{MANIFESTS}/{name}") as file:
        return file.read()


def pod(name, script, runtime="pvmm", **more):
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                 "command": ["sh", "-c", script]}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "containers": [container], **more}
    if runtime:
        spec["runtimeClassName"] = runtime
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def make(cluster, *pods):
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}))


def get(cluster, name):
    return wait(lambda: cluster.get(f"/api/v1/namespaces/default/pods/{name}"), 300, "the API server")


def all_pods(cluster, namespace="default"):
    path = f"/api/v1/namespaces/{namespace}/pods"
    return wait(lambda: cluster.get(path), 300, "the API server")["items"]


def wait_ready(cluster, *names):
    def ready():
        there = {one["metadata"]["name"] for one in all_pods(cluster) if is_ready(one)}
        return there.issuperset(names)
    wait(ready, LONG, f"pods {' '.join(names)} to be Ready")


def wait_ended(cluster, name):
    """Waits for the end of a pod, and returns its phase and its container's exit code."""
    def ended():
        status = get(cluster, name)["status"]
        states = [one["state"].get("terminated") for one in status.get("containerStatuses", [])]
        if status["phase"] in ("Succeeded", "Failed") and all(states):
            return status["phase"], states[0]["exitCode"]
    return wait(ended, LONG, f"the end of pod {name}")


def delete(cluster, *names):
    cluster.kubectl("delete", "pod", "--wait=false", *names)
    wait(lambda: not {one["metadata"]["name"] for one in all_pods(cluster)} & set(names),
         LONG, f"pods {' '.join(names)} to be gone")


def vms():
    said = subprocess.run([PVMM, "ps", "-q"], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said
    return said.stdout.split()


def no_vms():
    wait(lambda: not vms(), 300, "the end of every VM")


def flow_one_pod(cluster):
    make(cluster, pod("one", "echo hello; uname -r; hostname"))
    assert wait_ended(cluster, "one") == ("Succeeded", 0)
    hello, release, hostname = cluster.kubectl("logs", "one").stdout.split()
    # Another kernel than the node's.
    assert hello == "hello" and hostname == "one" and release != os.uname().release, release
    delete(cluster, "one")
    no_vms()


def flow_ten_pods(cluster):
    codes = {f"ten-{number}": code for number, code in
             enumerate([0, 3, 1, 2, 7, 42, 126, 137, 255, 0])}
    assert len(codes) == PODS_AT_ONCE
    # They wait without a look at anything: ten that looked each second would fill the processor.
    script = "mkfifo /tmp/go; echo I am {0}; echo error of {0} >&2; read go </tmp/go; exit {1}"
    begun = time.time()
    names = list(codes)
    # Two at a time: one emulated processor does not start ten guests before the first is given up.
    for some in (names[at:at + 2] for at in range(0, PODS_AT_ONCE, 2)):
        make(cluster, *(pod(name, script.format(name, codes[name])) for name in some))
        wait_ready(cluster, *some)
        print(f"{' '.join(some)}: Ready after {time.time() - begun:.0f} s", flush=True)
    ready = {one["metadata"]["name"] for one in all_pods(cluster) if is_ready(one)}
    assert ready.issuperset(codes), ready
    print(f"ten pods run at once after {time.time() - begun:.0f} s", flush=True)
    assert len(vms()) == PODS_AT_ONCE
    for name in codes:
        cluster.kubectl("exec", name, "--", "sh", "-c", "echo > /tmp/go")
    ended = {name: wait_ended(cluster, name) for name in codes}
    wrong = {name: end for name, end in ended.items()
             if end != ("Failed" if codes[name] else "Succeeded", codes[name])}
    assert not wrong, wrong
    for name in codes:
        lines = sorted(cluster.kubectl("logs", name).stdout.splitlines())
        assert lines == [f"I am {name}", f"error of {name}"], lines
    delete(cluster, *codes)
    no_vms()


def flow_exec_and_kill(cluster):
    make(cluster, pod("long", "echo begun; sleep 100000"))
    wait_ready(cluster, "long")
    line = "echo out; echo err >&2; exit 5"
    said = cluster.kubectl("exec", "long", "--", "sh", "-c", line, check=False)
    assert said.stdout == "out\n" and said.stderr.startswith("err\n"), said
    assert "exit code 5" in said.stderr and said.returncode in (1, 5), said
    said = cluster.kubectl("exec", "-i", "long", "--", "cat", input="some words\n")
    assert said.stdout == "some words\n", said
    said = cluster.kubectl("exec", "long", "--", "ps")
    assert "sleep 100000" in said.stdout, said
    # What ignores SIGTERM is killed.
    cluster.kubectl("patch", "pod", "long", "-p", '{"spec": {"activeDeadlineSeconds": 1}}')
    assert wait_ended(cluster, "long") == ("Failed", 137)
    delete(cluster, "long")
    no_vms()


def flow_containers_of_a_pod(cluster):
    two = pod("two", "until test -e /shared/word; do sleep 1; done; cat /shared/word; hostname; "
              "ls /var/run/secrets/kubernetes.io/serviceaccount; cat /config/greeting; "
              "grep -c two /etc/hosts")
    first = two["spec"]["containers"][0]
    first["volumeMounts"] = [{"name": "shared", "mountPath": "/shared"},
                             {"name": "config", "mountPath": "/config"}]
    other = dict(first, name="other", command=["sh", "-c", "hostname > /shared/word; exit 4"])
    two["spec"]["containers"].append(other)
    two["spec"]["volumes"] = [{"name": "shared", "emptyDir": {}},
                              {"name": "config", "configMap": {"name": "words"}}]
    words = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "words"},
             "data": {"greeting": "good day\n"}}
    make(cluster, words, two)
    wait_ended(cluster, "two")
    codes = {one["name"]: one["state"]["terminated"]["exitCode"]
             for one in get(cluster, "two")["status"]["containerStatuses"]}
    assert codes == {"main": 0, "other": 4}, codes
    said = cluster.kubectl("logs", "two", "-c", "main").stdout.split("\n")
    assert said == ["two", "two", "ca.crt", "namespace", "token", "good day", "1", ""], said
    delete(cluster, "two")
    no_vms()


def flow_ready_times(cluster):
    """Pods one after another, by turns: each alone on the node."""
    took = {"runc": [], "pvmm": []}
    for turn in range(3):
        for runtime, seconds in took.items():
            name = f"ready-{runtime}-{turn}"
            make(cluster, pod(name, "sleep 100000", runtime if runtime == "pvmm" else None))
            wait_ready(cluster, name)
            seconds.append(wait(lambda: cluster.ready_seconds(name), 60, "the kubelet's log"))
            print(f"{name}: Ready after {seconds[-1]:.2f} s", flush=True)
            delete(cluster, name)
    for runtime, seconds in took.items():
        each = " ".join(f"{one:.2f}" for one in seconds)
        print(f"ready by the kubelet's clock, {runtime}: median {statistics.median(seconds):.2f} s"
              f" of {each}", flush=True)
    no_vms()


def import_images(cluster):
    ours = {}
    for name in ["pvmm", "containerd-shim-pvmm-v1"]:
        with open(f"{SHIM}/{name}", "rb") as file:
            ours[f"opt/pvmm/{name}"] = file.read()
    images = [(IMAGE, ["sh"], {}), (PAUSE, ["sleep", "2147483647"], {}), (INSTALLER, ["sh"], ours)]
    for name, command, files in images:
        archive = cluster.path("image.tar")
        image.write(archive, name, BUSYBOX, command, files)
        said = cluster.ctr("image", "import", archive)
        assert said.returncode == 0, said
        os.unlink(archive)


def refused(cluster):
    """Ends the test if a container of the installer cannot be made, which another try does not
    change."""
    for one in all_pods(cluster, "pvmm"):
        for container in one["status"].get("initContainerStatuses", []):
            waiting = container["state"].get("waiting", {})
            if waiting.get("reason") in ("CreateContainerError", "CrashLoopBackOff"):
                raise SystemExit(f"the installer: {waiting}")


def install(cluster):
    """Prepares the node as install.yaml does anywhere, but for where things are here."""
    text = manifest("install.yaml")
    for there, here in [("image: pvmm-installer", f"image: {INSTALLER}"),
                        ("value: /usr/local/bin", f"value: {cluster.programs}"),
                        ("value: /etc/containerd/config.toml", f"value: {cluster.path('containerd.toml')}"),
                        ("value: systemctl restart containerd", f"value: touch {cluster.path('restart')}"),
                        ("value: /root", f"value: {os.environ.get('HOME', '/root')}")]:
        assert text.count(there) >= 1, there
        text = text.replace(there, here)
    cluster.apply(manifest("runtimeclass.yaml"))
    cluster.apply(text)
    cluster.kubectl("label", "node", NODE, "pvmm=true")
    wait(lambda: os.path.exists(cluster.path("restart")) or refused(cluster), LONG, "the installer")
    cluster.stop("containerd")
    cluster.start_containerd()
    wait(lambda: any(map(is_ready, all_pods(cluster, "pvmm"))), LONG, "the installer's pod")


def main():
    # A network of its own: addresses and bridges end with this process. Mounts are shared with
    # containers that ask for it, as on a node that systemd has booted.
    if "PVMM_CLUSTER" not in os.environ:
        os.environ["PVMM_CLUSTER"] = "here"
        own = ["--net", "--mount", "--propagation", "shared"]
        os.execvp("unshare", ["unshare", *own, sys.executable, *sys.argv])
    chosen = sys.argv[4:]
    flows = [(name[5:], flow) for name, flow in globals().items() if name.startswith("flow_")]
    cluster = Cluster(ROOT)

    def step(name, run):
        begun = time.time()
        run()
        print(f"{name}: ok ({time.time() - begun:.1f} s)", flush=True)

    try:
        step("control plane", cluster.start_control_plane)
        cluster.start_controllers()
        step("containerd", cluster.start_node)
        import_images(cluster)
        step("node", cluster.start_kubelet)
        step("install", lambda: install(cluster))
        for name, flow in flows:
            if not chosen or any(word in name for word in chosen):
                step(name, lambda: flow(cluster))
    except BaseException:
        for name in cluster.running:
            print(f"--- {name}\n{cluster.log(name)[-4000:]}", flush=True)
        print(cluster.kubectl("describe", "pods", "-A", check=False).stdout[-6000:], flush=True)
        raise
    finally:
        cluster.stop_all()
        shutil.rmtree(cluster.place, ignore_errors=True)


main()
