//! Programs that users bring to a sandbox, in real guests: Node, git, wheels, a kernel of their
//! own.

use std::time::Duration;

use pvmm::exec::ExecRequest;
use pvmm_tests::cli::User;
use pvmm_tests::guest::{self, Guest};

/// A template with Debian's nodejs, git and curl, made before the suite runs.
pub const TEMPLATE: &str = "suite-tools";

#[test]
fn node_and_git_run_in_a_guest() {
    let user = User::new();
    let id = user.detached(&["--template", TEMPLATE, "--cpus", "2"]);
    let shell = |line: &str| {
        let said = user.pvmm(["exec", &id, "--", "sh", "-ec", line]);
        assert_eq!(said.code, Some(0), "{line}: {said:?}");
        said.text().to_owned()
    };
    let script = "const { createHash } = require('crypto'); const fs = require('fs/promises'); \
                  (async () => { await fs.writeFile('/tmp/n', 'x'.repeat(1 << 20)); \
                  const b = await fs.readFile('/tmp/n'); \
                  console.log(b.length, createHash('sha256').update('a').digest('hex').slice(0, 8)); })()";
    assert_eq!(shell(&format!("node -e \"{script}\"")), "1048576 ca978112");
    let session = |code: &str| user.pvmm(["code", &id, "--lang", "node", "-c", code]);
    let said = session("let x = 6 * 7; console.log('set')");
    assert_eq!((said.code, said.text()), (Some(0), "set"), "{said:?}");
    assert_eq!(session("x").text(), "42");
    let commit = "cd /tmp; git init -q -b main r; cd r; git config user.name a; \
                  git config user.email a@b; echo one > f; git add f; git commit -qm first; \
                  echo two > f; git commit -qam second; cd ..; git clone -q r c; cd c; \
                  git log --format=%s; git diff HEAD~1 --stat | tail -n 1; git fsck";
    assert_eq!(shell(commit), "second\nfirst\n 1 file changed, 1 insertion(+), 1 deletion(-)");
    assert_eq!(user.pvmm(["kill", "--signal", "KILL", &id]).code, Some(0));
}

#[test]
fn pip_installs_a_wheel_from_a_file() {
    let guest = Guest::boot();
    let make = "import zipfile
with zipfile.ZipFile('/tmp/greet-1.2-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('greet.py', 'def hello(): return 42\\n')
    info = 'greet-1.2.dist-info/'
    wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: greet\\nVersion: 1.2\\n')
    wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr(info + 'RECORD', ''.join(f'{name},,\\n' for name in wheel.namelist()))
";
    guest.agent.write_file("/tmp/make.py", make.as_bytes(), &Default::default()).unwrap();
    let install = "python3 /tmp/make.py && python3 -m pip install --quiet --no-index --no-compile \
                   --no-cache-dir --disable-pip-version-check --break-system-packages \
                   --root-user-action=ignore /tmp/greet-1.2-py3-none-any.whl";
    // pip loads half of Python's library, which takes minutes on an emulated processor.
    let install = ExecRequest::shell(install).timeout(Duration::from_secs(600));
    let output = guest.agent.exec(&install).unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(guest.prints("cd /; python3 -c 'import greet; print(greet.hello())'"), "42");
    let version = "import importlib.metadata as m; print(m.version('greet'))";
    assert_eq!(guest.prints(&format!("python3 -c \"{version}\"")), "1.2");
}

#[test]
fn run_with_a_kernel_a_rootfs_and_four_cpus_has_them_all() {
    let user = User::new();
    let (kernel, rootfs) = (guest::default_kernel().vmlinux, guest::base().rootfs);
    let (kernel, rootfs) = (kernel.to_str().unwrap(), rootfs.to_str().unwrap());
    let own = ["--kernel", kernel, "--rootfs", rootfs, "--cpus", "4"];
    let command =
        ["--", "sh", "-c", "nproc; for cpu in 0 1 2 3; do taskset -c $cpu echo $cpu; done"];
    let said = user.pvmm([&["run"][..], &own, &command].concat());
    assert_eq!((said.code, said.text()), (Some(0), "4\n0\n1\n2\n3"), "{said:?}");
}
