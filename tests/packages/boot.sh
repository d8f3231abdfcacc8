#!/bin/sh
# Boots a clean Debian in namespaces of its own, with systemd as its first process, and runs flow.sh there. Everything
# that it writes is in memory and ends with it, but for the folder of results.
# Arguments: the clean system, the package, a newer package, the folder of Debian packages, the folder of results.
set -eu
clean=$1 package=$2 next=$3 mirror=$4 out=$5
here=$(dirname "$(readlink -f "$0")")

: >"$out/log"
tail -f "$out/log" &
trap 'kill $!' EXIT

top=$(mktemp -d)
mount -t tmpfs -o mode=755,size=75% tmpfs "$top"
mkdir "$top/upper" "$top/work" "$top/root"
mount -t overlay overlay -o "lowerdir=$clean,upperdir=$top/upper,workdir=$top/work" "$top/root"
cd "$top/root"
mkdir -p packages/mirror packages/out packages/old
cp "$package" packages/pvmm.deb
cp "$next" packages/next.deb
cp "$here/flow.sh" packages/flow.sh
mount --bind "$mirror" packages/mirror
mount --bind "$out" packages/out
# With this first letter apt copies the packages, as it does from a mirror.
rm -rf etc/apt/sources.list.d etc/apt/sources.list
echo 'deb [trusted=yes] copy:/packages/mirror ./' >etc/apt/sources.list
cat >etc/systemd/system/packages-test.service <<UNIT
[Unit]
After=basic.target
SuccessAction=exit-force
FailureAction=exit-force
FailureActionExitStatus=1

[Service]
Type=oneshot
ExecStart=/bin/bash /packages/flow.sh
StandardOutput=append:/packages/out/log
StandardError=inherit
TimeoutStartSec=infinity
UNIT
mkdir -p etc/systemd/system/multi-user.target.wants
ln -s ../packages-test.service etc/systemd/system/multi-user.target.wants/packages-test.service

unshare --mount --pid --cgroup --fork --kill-child --propagation private sh -eu -c '
mount -t proc proc proc
mount --rbind /sys sys
# As in a container: devices belong to the host, control groups do not.
mount -o remount,bind,ro sys
mount --rbind /dev dev
mount -t tmpfs -o mode=755 run run
mount -t tmpfs -o mode=1777 tmp tmp
pivot_root . packages/old
umount -l packages/old
exec env -i container=packages-test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --show-status=0 --log-target=null
' </dev/null
