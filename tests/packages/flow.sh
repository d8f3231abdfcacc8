#!/bin/bash
# Installs the package, uses it as an ordinary user and as a service, upgrades it while VMs run, removes and purges it.
set -euo pipefail
trap 'status=$?; echo "FAILED at line $LINENO: $BASH_COMMAND"; journalctl -q --no-pager -u pvmm-serve.service | tail -n 40; exit $status' ERR
export HOME=/root DEBIAN_FRONTEND=noninteractive
cd /

step() { echo "== $*"; }
expect() { # WANTED COMMAND...
    local wanted=$1 got
    shift
    got=$("$@")
    [ "$got" = "$wanted" ] || { echo "FAILED: $*: '$got' is not '$wanted'"; return 1; }
}
as_user() { runuser -u dev -- env -C /home/dev HOME=/home/dev "$@"; }
# Files that are neither apt's own nor the user's.
listed() {
    find / -xdev \( -path /packages -o -path /var/cache/apt -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/log \
        -o -path /home/dev -o -path /tmp -o -path /run -o -path /var/lib/systemd/random-seed -o -path /var/cache/ldconfig \) -prune -o -print | sort
}
users() { cut -d: -f1 /etc/passwd /etc/group | sort; }

step "a host with an ordinary user"
systemd-sysusers
useradd --create-home --groups kvm dev
chgrp kvm /dev/kvm
chmod 0660 /dev/kvm
# udev gives /dev/kvm to the group, so that the package needs no rule of its own.
grep -q 'KERNEL=="kvm", GROUP="kvm", MODE="0660"' /usr/lib/udev/rules.d/50-udev-default.rules
apt-get -qq update
listed >/packages/before
users >/packages/users-before

step "install"
apt-get -qq install --no-install-recommends /packages/pvmm.deb >/dev/null
for unit in pvmm-serve.socket pvmm-serve.service; do
    expect disabled sh -c "systemctl is-enabled $unit || true"
    expect inactive sh -c "systemctl is-active $unit || true"
done
remarks=$(systemd-analyze verify --man=no /usr/lib/systemd/system/pvmm-serve.{socket,service} 2>&1 | grep -v DelegateSubgroup || true)
expect "" echo "$remarks"
getent passwd pvmm

step "the first run of an ordinary user"
time expect 1 as_user pvmm run -- python3 -c 'print(1)'
vm=$(as_user pvmm run -d)
as_user pvmm exec "$vm" -- sh -c 'echo kept >/tmp/kept'

step "control groups beside that of a server, as DelegateSubgroup= makes it"
group=/sys/fs/cgroup/given
mkdir -p $group/pvmm-server
echo "+cpu +memory +pids" >/sys/fs/cgroup/cgroup.subtree_control
chown -R dev $group
said=$(sh -c 'echo $$ >/sys/fs/cgroup/given/pvmm-server/cgroup.procs
    exec runuser -u dev -- env -C /home/dev HOME=/home/dev pvmm run -- true' 2>&1)
echo "$said"
[[ $said == *"user of its own"* && $said != *"control group"* ]]
[ ! -e $group/pvmm ]
rmdir $group/pvmm-server $group

step "the service starts with its first client"
install -d -m 0700 -o pvmm -g pvmm /var/cache/pvmm
# The kernel that the user has; the template is built by the service.
cp -a /home/dev/.cache/pvmm/kernels /var/cache/pvmm/
chown -R pvmm:pvmm /var/cache/pvmm
systemctl enable --quiet --now pvmm-serve.socket
expect inactive sh -c 'systemctl is-active pvmm-serve.service || true'
curl -sS --fail --max-time 120 http://127.0.0.1:8088/healthz
expect active systemctl is-active pvmm-serve.service
token=$(cat /var/lib/pvmm/service/token)
api() { curl -sS --max-time 600 -H "Authorization: Bearer $token" -H 'Content-Type: application/json' "$@"; }
created=
for _ in $(seq 60); do
    created=$(api -d '{"template": "base"}' http://127.0.0.1:8088/v1/sandboxes)
    case $created in *'"id"'*) break ;; esac
    echo "not yet: $created"
    # Anything but a template that is being made is a fault.
    case $created in *'"unavailable"'*) ;; *) false ;; esac
    sleep 10
done
echo "$created"
sandbox=$(expr "$created" : '.*"id": *"\([^"]*\)"')
run_in_sandbox() { api -d "{\"cmd\": \"$1\"}" "http://127.0.0.1:8088/v1/sandboxes/$sandbox/exec"; }
run_in_sandbox 'echo $((6*7)); echo kept >/tmp/kept' | grep -q '"stdout": *"42\\n"'
systemd-analyze security --no-pager pvmm-serve.service | tail -n 1
server=$(systemctl show -P MainPID pvmm-serve.service)

step "upgrade while both VMs run"
apt-get -qq install --no-install-recommends /packages/next.deb >/dev/null
expect 99.0-1 dpkg-query -W -f '${Version}' pvmm
expect kept as_user pvmm exec "$vm" -- cat /tmp/kept
[ "$(systemctl show -P MainPID pvmm-serve.service)" != "$server" ]
run_in_sandbox 'cat /tmp/kept' | grep -q '"stdout": *"kept\\n"'

step "the service as its socket unit's command, without systemd"
systemctl stop pvmm-serve.socket pvmm-serve.service
setpriv --reuid dev --regid dev --init-groups env -C /home/dev HOME=/home/dev systemd-socket-activate \
    --listen=127.0.0.1:8099 --setenv=HOME=/home/dev pvmm serve &
activator=$!
curl -sS --fail --retry 20 --retry-connrefused --max-time 120 http://127.0.0.1:8099/healthz
kill $activator
wait $activator || true

step "remove"
# The service's sandbox goes on without its server until the package is removed.
[ -n "$(find /run/pvmm-serve -name '*.sock' | head -n 1)" ]
as_user pvmm kill "$vm"
apt-get -qq remove pvmm >/dev/null
for process in /proc/[0-9]*; do
    [ "$(stat -c %U "$process" 2>/dev/null || true)" != pvmm ]
done
[ ! -e /run/pvmm-serve ] && [ ! -e /usr/bin/pvmm ] && [ -e /var/lib/pvmm/service/token ]

step "purge"
apt-get -qq purge pvmm >/dev/null
apt-get -qq autoremove --purge >/dev/null
listed >/packages/after
users >/packages/users-after
diff /packages/before /packages/after
diff /packages/users-before /packages/users-after
step "passed"
