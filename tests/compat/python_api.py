"""firecracker-python's Api: boots, snapshots, loads in a second process with another tap, puts another image
behind the root drive of the paused machine, resumes."""

import os
import subprocess
import sys
import time

from firecracker.api import Api

firecracker, folder, kernel, initrd, rootfs, other_rootfs, data, boot_args, tap = sys.argv[1:]
vsock = f"{folder}/v.sock"


def process(name):
    sock = f"{folder}/{name}.sock"
    child = subprocess.Popen(
        [firecracker, "--api-sock", sock, "--id", name],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 10
    while not os.path.exists(sock):
        assert time.time() < deadline, "no socket"
        time.sleep(0.01)
    return child, Api(sock)


def look(moment):
    print("look", moment, flush=True)
    assert sys.stdin.readline().strip() == "good", moment


child, api = process("one")
try:
    assert api.describe.get().json()["state"] == "Not started"
    api.machine_config.put(vcpu_count=1, mem_size_mib=256)
    api.boot.put(kernel_image_path=kernel, initrd_path=initrd, boot_args=boot_args)
    api.drive.put(drive_id="rootfs", path_on_host=rootfs, is_root_device=True, is_read_only=True)
    api.drive.put(drive_id="data", path_on_host=data, is_root_device=False, is_read_only=False)
    api.network.put(iface_id="eth0", host_dev_name=tap, guest_mac="02:00:00:00:00:07")
    api.mmds_config.put(version="V2", network_interfaces=["eth0"])
    api.mmds.put(id="python")
    api.vsock.put(guest_cid=3, uds_path=vsock)
    api.actions.put(action_type="InstanceStart")
    assert api.vm_config.get().json()["drives"][0]["drive_id"] == "rootfs"
    look("booted")
    api.vm.patch(state="Paused")
    # Without a type, as it does.
    api.create_snapshot.put(mem_file_path=f"{folder}/vm.mem", snapshot_path=f"{folder}/vm.state")
finally:
    child.kill()
    child.wait()
os.remove(vsock)

child, api = process("two")
try:
    api.load_snapshot.put(
        snapshot_path=f"{folder}/vm.state", resume_vm=False,
        mem_backend={"backend_type": "File", "backend_path": f"{folder}/vm.mem"},
        network_overrides=[{"iface_id": "eth0", "host_dev_name": f"{tap}-2"}])
    api.drive.patch(drive_id="rootfs", path_on_host=other_rootfs)
    api.mmds.put(id="copy")
    api.vm.patch(state="Resumed")
    look("loaded")
    assert api.describe.get().json()["state"] == "Running"
    api.actions.put(action_type="SendCtrlAltDel")
finally:
    child.kill()
    child.wait()
