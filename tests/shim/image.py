"""Makes a small image as `docker save` writes it: busybox, and what a container needs of /etc."""

import hashlib
import io
import json
import tarfile

APPLETS = "cat chmod chroot cp dirname echo env false grep head hostname id kill ls mkdir mv nproc ps pwd sh sleep stat sync test true tty uname yes"


def layer(busybox, files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        def add(name, content=None, mode=0o755, link=None):
            entry = tarfile.TarInfo(name)
            entry.mode = mode
            if link:
                entry.type, entry.linkname = tarfile.SYMTYPE, link
            elif content is None:
                entry.type = tarfile.DIRTYPE
            else:
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content or b""))

        for folder in ["bin", "dev", "etc", "proc", "root", "sys"]:
            add(folder)
        add("tmp", mode=0o1777)
        add("bin/busybox", open(busybox, "rb").read())
        for name in APPLETS.split():
            add(f"bin/{name}", link="busybox")
        for path, content in files.items():
            add(path, content)
        add("etc/passwd", b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n", 0o644)
        add("etc/group", b"root:x:0:\nuser:x:1000:\n", 0o644)
    return out.getvalue()


def write(path, name, busybox, command=("sh",), files=None):
    """Writes an archive with the image `name`, with more `files` by their paths in it."""
    files = layer(busybox, files or {})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin", "GREETING=hello from an image"], "Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(files).hexdigest()]},
    }
    config = json.dumps(config).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        for file, content in [(config_name, config), ("layer.tar", files),
                              ("manifest.json", json.dumps(manifest).encode())]:
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
