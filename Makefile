# Short names for `cargo xtask`, which does the work and has `--help`.

.PHONY: help build demo test test-security test-serve test-shim test-cluster test-page test-packages deb tarball site soak soak-serve clocks compat check fuzz bench bench-quick bench-native kernel clean

help:
	@echo "make demo    boot a guest, run a line of Python in it, say what it took"
	@echo "make build   pvmm as it is shipped: static files, target/shipped/pvmm and pvmm-jailer"
	@echo "make deb     the Debian package, in target/packages; make tarball: an archive for other hosts"
	@echo "make test    every test, with real guests"
	@echo "make test-security  the jail, the filters and the network policy, with counts"
	@echo "make test-serve  examples and published clients against the service; soak-serve: 50 clients, 10 minutes"
	@echo "make test-shim  containers in VMs by Debian's containerd and the runtime io.containerd.pvmm.v1"
	@echo "make test-cluster  pods of Kubernetes in VMs: a control plane from Debian's source, a kubelet, containerd"
	@echo "make test-page  the page of the service in a headless Chromium, with pictures in target/page"
	@echo "make test-packages  the Debian package in a clean Debian: install, use, upgrade, remove, purge"
	@echo "make site    the documentation as a site, in target/site"
	@echo "make soak    the long tests: thousands of restores, forks and rollbacks"
	@echo "make clocks  snapshots between two hosts whose clocks run at different rates"
	@echo "make compat  published clients of Firecracker, unmodified, against pvmm"
	@echo "make check   formatting, lints and the rules of the house"
	@echo "make fuzz    every fuzz target for a minute"
	@echo "make bench   measure pvmm beside its peers; bench-quick takes few samples,"
	@echo "             bench-native needs no guest and so any /dev/kvm"
	@echo "make kernel  build the guest kernel"
	@echo "make clean   remove what was built here"

# The tool is built where its progress is seen, then run without a word of cargo's.
build deb tarball demo test test-security test-serve test-shim test-cluster test-page test-packages site soak clocks compat check fuzz bench kernel:
	@cargo build --release --package xtask
	@cargo xtask $@

bench-quick bench-native:
	@cargo build --release --package xtask
	@cargo xtask bench --$(patsubst bench-%,%,$@)

soak-serve:
	@cargo build --release --package xtask
	@cargo xtask test-serve --soak

clean:
	@cargo clean
