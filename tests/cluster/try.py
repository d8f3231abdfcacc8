import sys, os
if "PVMM_CLUSTER" not in os.environ:
    os.environ["PVMM_CLUSTER"] = "here"
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
exec(open(os.path.dirname(os.path.abspath(__file__))+"/cluster.py").read().replace("\nmain()\n","\n"))
def step(name, run):
    begun = time.time(); run(); print(f"{name}: ok ({time.time() - begun:.1f} s)", flush=True)
cluster = Cluster(ROOT, SHIM)
try:
    step("control plane", cluster.start_control_plane)
    cluster.start_controllers()
    step("containerd", cluster.start_node)
    import_images(cluster)
    step("node", cluster.start_kubelet)
    cluster.apply(manifest("runtimeclass.yaml"))
    make(cluster, pod("r", "echo hi; sleep 10000", None))
    step("runc", lambda: wait(lambda: is_ready(get(cluster, "r")), 300, "runc pod"))
    print(cluster.kubectl("exec","r","--","hostname").stdout)
    time.sleep(5)
    print(cluster.ready_seconds("r"))
except BaseException as e:
    print(repr(e))
    for name in cluster.running:
        print(f"--- {name}\n{cluster.log(name)[-6000:]}", flush=True)
    print(cluster.kubectl("describe", "pods", check=False).stdout[-6000:], flush=True)
    print(cluster.kubectl("get", "nodes", "-o", "yaml", check=False).stdout[-6000:], flush=True)
finally:
    cluster.stop_all()
