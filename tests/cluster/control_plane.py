"""A Kubernetes cluster of one node, on a network namespace of its own.

Every program is started here with folders below one temporary folder, and ends with this process.
"""

import json
import os
import re
import secrets
import ssl
import subprocess
import tempfile
import time
import urllib.request

ADDRESS = "10.77.0.1"
NODE = "node"
SERVER = f"https://{ADDRESS}:6443"
PAUSE = "example.test/pause:1"
CONTAINERD = """
version = 2
root = "{place}/containerd"
state = "/run/pvmm-cluster/containerd"
imports = ["{place}/conf.d/*.toml"]
[grpc]
address = "{place}/containerd.sock"
[timeouts]
"io.containerd.timeout.shim.cleanup" = "120s"
"io.containerd.timeout.shim.load" = "120s"
"io.containerd.timeout.shim.shutdown" = "60s"
"io.containerd.timeout.task.state" = "60s"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{root}/usr/lib/cni"
conf_dir = "{place}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""
PODS = """{
  "cniVersion": "0.4.0", "name": "pods", "plugins": [{
    "type": "bridge", "bridge": "pods0", "isGateway": true,
    "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]], "dataDir": "%s/addresses"}
  }]
}"""
# The programs of a nested host are slow, so nothing here is given up early.
KUBELET = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
cgroupDriver: cgroupfs
failSwapOn: false
runtimeRequestTimeout: 10m
nodeLeaseDurationSeconds: 600
nodeStatusUpdateFrequency: 30s
nodeStatusReportFrequency: 5m
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {{}}
enforceNodeAllocatable: []
volumeStatsAggPeriod: 10m
kubeAPIQPS: 100
kubeAPIBurst: 100
serializeImagePulls: false
"""
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}", certificate-authority: "{authority}"}}}}]
users: [{{name: u, user: {{token: "{token}"}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
current-context: c
"""
# How long anything may take: processors are emulated, and ten VMs share one.
LONG = 1800
CONTROLLERS = ("serviceaccount,serviceaccount-token,root-ca-cert-publisher,deployment,replicaset,"
               "daemonset,garbagecollector,nodelifecycle")


def wait(condition, seconds, what):
    end = time.time() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.time() > end:
            raise SystemExit(f"waited {seconds} s for {what}")
        time.sleep(1)


class Cluster:
    """The programs of a node and of a control plane."""

    def __init__(self, root):
        self.root = root
        self.place = tempfile.mkdtemp(prefix="cluster-")
        self.kubeconfig = f"{self.place}/kubeconfig"
        # Where the runtime is installed.
        self.programs = self.path("programs")
        os.mkdir(self.programs)
        self.running = {}

    def path(self, name):
        return f"{self.place}/{name}"

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w") as file:
            file.write(text)
        return self.path(name)

    def log(self, name):
        with open(self.path(f"{name}.log"), errors="replace") as file:
            return file.read()

    def start(self, name, *words):
        path = f"{self.programs}:{self.root}/usr/sbin:{self.root}/usr/bin:{os.environ['PATH']}"
        env = dict(os.environ, PATH=path)
        log = open(self.path(f"{name}.log"), "ab")
        words = [f"{self.root}/usr/bin/{words[0]}", *words[1:]]
        self.running[name] = subprocess.Popen(words, env=env, stdout=log, stderr=log)

    def stop(self, name):
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop_all(self):
        for name in reversed(list(self.running)):
            self.stop(name)

    def ctr(self, *words):
        program = f"{self.root}/usr/bin/ctr"
        words = [program, "--address", self.path("containerd.sock"), "-n", "k8s.io", *words]
        return subprocess.run(words, capture_output=True, text=True, timeout=600)

    def kubectl(self, *words, check=True, **options):
        words = [f"{self.root}/usr/bin/kubectl", "--kubeconfig", self.kubeconfig, *words]
        options = dict(dict(capture_output=True, text=True, timeout=900), **options)
        said = subprocess.run(words, **options)
        if check and said.returncode != 0:
            raise SystemExit(f"{' '.join(words[3:])}: {said.stdout}{said.stderr}")
        return said

    def get(self, path):
        """Returns what the API server has under a path; `None` if it does not answer with that.
        For what is asked often: a kubectl takes seconds of an emulated processor to start."""
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{SERVER}{path}", headers=headers)
        try:
            trusted = ssl.create_default_context(cafile=self.path("server.crt"))
            with urllib.request.urlopen(request, timeout=120, context=trusted) as answer:
                text = answer.read()
        except OSError:
            return None
        return json.loads(text) if text[:1] == b"{" else text.decode()

    def apply(self, text):
        self.kubectl("apply", "-f", "-", input=text)

    def start_containerd(self):
        self.start("containerd", "containerd", "--config", self.path("containerd.toml"))
        wait(lambda: self.ctr("version").returncode == 0, LONG, "containerd to answer")

    def start_node(self):
        self.write("containerd.toml", CONTAINERD.format(place=self.place, root=self.root, pause=PAUSE))
        self.write("cni/pods.conflist", PODS % self.place)
        self.start_containerd()

    def make_key(self, name):
        """Makes a key and a certificate; of a curve, because RSA is slow where processors are
        emulated."""
        subprocess.run(
            ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-days", "2",
             "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", f"/CN={name}",
             "-addext", f"subjectAltName=IP:{ADDRESS}",
             "-keyout", self.path(f"{name}.key"), "-out", self.path(f"{name}.crt")],
            check=True, capture_output=True)

    def start_control_plane(self):
        network()
        self.token = secrets.token_hex(16)
        self.write("tokens.csv", f'{self.token},admin,admin,"system:masters"\n')
        for name in ["server", "accounts"]:
            self.make_key(name)
        key, authority = self.path("accounts.key"), self.path("server.crt")
        text = KUBECONFIG.format(server=SERVER, authority=authority, token=self.token)
        self.write("kubeconfig", text)
        etcd = "http://127.0.0.1:2379"
        self.start("etcd", "etcd", "--data-dir", self.path("etcd"),
                   "--heartbeat-interval=1000", "--election-timeout=20000",
                   "--listen-client-urls", etcd, "--advertise-client-urls", etcd)
        self.start("apiserver", "kube-apiserver", "--etcd-servers", etcd,
                   "--advertise-address", ADDRESS, "--cert-dir", self.path("certificates"),
                   "--tls-cert-file", authority, "--tls-private-key-file", self.path("server.key"),
                   "--token-auth-file", self.path("tokens.csv"), "--authorization-mode=AlwaysAllow",
                   "--service-cluster-ip-range=10.96.0.0/24", "--allow-privileged=true",
                   "--service-account-issuer=https://kubernetes.default.svc",
                   "--service-account-signing-key-file", key,
                   "--service-account-key-file", self.path("accounts.crt"),
                   "--request-timeout=10m", "--enable-priority-and-fairness=false",
                   "--kubelet-preferred-address-types=InternalIP", "-v=1")
        wait(lambda: self.get("/readyz") == "ok", LONG, "the API server")

    def start_controllers(self):
        self.start("controllers", "kube-controller-manager", "--kubeconfig", self.kubeconfig,
                   "--leader-elect=false", "--controllers", CONTROLLERS,
                   "--service-account-private-key-file", self.path("accounts.key"),
                   "--root-ca-file", self.path("server.crt"),
                   "--node-monitor-grace-period=20m", "--kube-api-qps=100", "--kube-api-burst=100")
        self.start("scheduler", "kube-scheduler", "--kubeconfig", self.kubeconfig,
                   "--leader-elect=false")

    def start_kubelet(self):
        self.write("kubelet.yaml", KUBELET.format(address=ADDRESS))
        socket = f"unix://{self.path('containerd.sock')}"
        # At this level the kubelet says when it has reported which status.
        self.start("kubelet", "kubelet", "--config", self.path("kubelet.yaml"),
                   "--kubeconfig", self.kubeconfig, "--root-dir", self.path("kubelet"),
                   "--container-runtime=remote", "--container-runtime-endpoint", socket,
                   "--image-service-endpoint", socket, "--hostname-override", NODE,
                   "--node-ip", ADDRESS, "--cert-dir", self.path("kubelet-certificates"), "-v=3")
        wait(lambda: is_ready(self.get(f"/api/v1/nodes/{NODE}")), LONG, "the node")
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait(lambda: (self.get(account) or {}).get("secrets"), LONG, "the default service account")

    def ready_seconds(self, pod):
        """How long a pod took by the kubelet's clock: from its first sight of the pod to the report
        that the pod is Ready, in seconds; `None` if its log does not say so yet."""
        log = self.log("kubelet")
        stamp = r"^[IWE]\d{4} (\d\d):(\d\d):(\d\d\.\d+) "
        seen = re.search(stamp + rf'.*SyncLoop \(ADD, "api"\): .*\b{pod}_default\(', log, re.M)
        told = re.search(
            stamp + rf'.*Status for pod "{pod}_default\(.*updated successfully.*'
            r"Type:Ready Status:True", log, re.M)
        if not (seen and told):
            return None
        first, last = ((int(h) * 60 + int(m)) * 60 + float(s)
                       for h, m, s in (seen.groups(), told.groups()))
        return (last - first) % 86400


def is_ready(one):
    """Whether a node or a pod is Ready."""
    conditions = (one or {}).get("status", {}).get("conditions", [])
    return any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)


def network():
    """Gives this process's network namespace the node's address."""
    for line in ["link set lo up", "link add node0 type bridge",
                 f"address add {ADDRESS}/24 dev node0", "link set node0 up",
                 f"route add default via 10.77.0.254 dev node0"]:
        subprocess.run(["ip", *line.split()], check=True)
