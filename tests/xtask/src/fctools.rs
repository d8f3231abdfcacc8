//! The tests that fctools publishes with its crate, run unmodified against pvmm in the place of
//! Firecracker.
//!
//! The tests expect a kernel, a root file system and programs in a folder of a fixed layout, which
//! is made here. Some tests cannot pass: `tests/compat/fctools.txt` names each with its reason, and
//! every other failure is an error.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use serde_json::{Value, json};

use crate::compat::{CRATE, build, check, on_kvm, replace, target};
use crate::{artifacts, cache, cargo, checkout, packages, progress};

const VERSION: &str = "0.6.0";
/// The test programs that use a VM; `other` does not.
const PROGRAMS: [&str; 4] = ["vm", "vm_api", "process", "extensions"];

/// The total number of tests in these programs.
const TESTS: usize = 58;
/// The exit code of a test program after its last test, if a test has failed.
const SOME_FAILED: u8 = 101;

/// Runs the tests with `filter` in their names. Returns 0 if exactly the expected tests pass.
pub fn run(filter: &str) -> Result<u8, Box<dyn Error>> {
    // The tests make their networks with nftables.
    packages::install(&["nftables"])?;
    let programs = programs()?;
    let data = test_data()?;
    fs::create_dir_all(checkout::scratch())?;
    let mut said = String::new();
    for program in &programs {
        // Each program is a separate run: if the nested host is lost, only one program runs again.
        let log = checkout::scratch().join("fctools.log");
        let script = format!(
            "mkdir -p /srv/jailer /tmp; export FCTOOLS_TESTDATA_PATH={}; \
             {{ {} --test-threads=1 {filter} 2>&1; echo $? > /tmp/code; }} | tee {}; exit $(cat /tmp/code)",
            data.display(),
            program.display(),
            log.display()
        );
        let code = on_kvm(&["sh".into(), "-c".into(), script.into()])?;
        if code != 0 && code != SOME_FAILED {
            return Err(format!("{} ended with {code}, not at its end", program.display()).into());
        }
        said += &fs::read_to_string(log)?;
    }
    Ok(judge(&said, &expected()?, filter, TESTS))
}

/// Prints the outcome of each test. Returns 0 if all `count` tests ended with the expected
/// outcomes.
fn judge(log: &str, expected: &BTreeMap<String, String>, filter: &str, count: usize) -> u8 {
    let outcomes: BTreeMap<&str, bool> = log.lines().filter_map(outcome).collect();
    let passed = outcomes.values().filter(|passed| **passed).count();
    println!("fctools: {passed} of {} tests pass", outcomes.len());
    let mut code = u8::from(outcomes.is_empty());
    if filter.is_empty() && outcomes.len() != count {
        println!("fctools: {} tests ended, not {count}", outcomes.len());
        code = 1;
    }
    for (name, passed) in &outcomes {
        match (passed, expected.get(*name)) {
            (true, None) => {}
            (true, Some(_)) => println!("fctools: {name} passes now; take it off the list"),
            (false, Some(reason)) => println!("fctools: {name} does not: {reason}"),
            (false, None) => {
                println!("fctools: {name} FAILED");
                code = 1;
            }
        }
    }
    let missing = expected.keys().filter(|name| name.contains(filter));
    for name in missing.filter(|name| !outcomes.contains_key(name.as_str())) {
        println!("fctools: {name} was not run");
        code = 1;
    }
    code
}

/// Parses a line `test NAME ... ok` or `test NAME ... FAILED`.
fn outcome(line: &str) -> Option<(&str, bool)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    match rest.trim() {
        "ok" => Some((name, true)),
        "FAILED" => Some((name, false)),
        _ => None,
    }
}

/// Returns the tests that cannot pass, with their reasons.
fn expected() -> Result<BTreeMap<String, String>, Box<dyn Error>> {
    let text = fs::read_to_string(checkout::root().join(CRATE).join("fctools.txt"))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let entry = |line: &str| {
        let (name, reason) = line.split_once(": ").ok_or("fctools.txt: NAME: REASON")?;
        Ok((name.to_owned(), reason.to_owned()))
    };
    lines.map(entry).collect()
}

/// Builds the published tests and returns their programs.
fn programs() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let source = source()?;
    progress::step(format!("the tests of fctools {VERSION}"));
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["test", "--no-run", "--locked", "--features", "full,nix-syscall-backend"])
        .args(["--message-format=json-render-diagnostics"])
        // Optimised dependencies would take minutes longer and test nothing more.
        .args(["--config", "profile.dev.package.\"*\".opt-level=0"])
        .args(["--config", "profile.dev.build-override.opt-level=0"])
        .env("CARGO_TARGET_DIR", target())
        .current_dir(source)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = cargo.output()?;
    if !output.status.success() {
        return Err(format!("the tests of fctools were not built ({})", output.status).into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let find = |name: &&str| {
        let found = text.lines().find_map(|line| cargo::test_program(line, name));
        found.ok_or_else(|| format!("fctools has no test called {name}"))
    };
    Ok(PROGRAMS.iter().map(find).collect::<Result<_, _>>()?)
}

/// Returns a copy of the published crate, in a folder where its tests can be built.
fn source() -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join("compat").join(format!("fctools-{VERSION}"));
    if place.join("Cargo.toml").exists() {
        return Ok(place);
    }
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["metadata", "--locked", "--format-version", "1"]);
    let output = cargo.current_dir(checkout::root().join(CRATE)).output()?;
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    let package = packages.iter().find(|p| p["name"] == "fctools" && p["version"] == VERSION);
    let manifest = package.and_then(|p| p["manifest_path"].as_str());
    let folder =
        manifest.and_then(|path| Path::new(path).parent()).ok_or("no source of fctools")?;
    let new = place.with_extension("new");
    let _ = fs::remove_dir_all(&new);
    fs::create_dir_all(new.parent().ok_or("no parent")?)?;
    check(Command::new("cp").arg("-r").arg(folder).arg(&new), "cp")?;
    fs::rename(new, &place)?;
    Ok(place)
}

/// Makes the folder that the tests expect, and returns its path.
fn test_data() -> Result<PathBuf, Box<dyn Error>> {
    let data = cache::dir().join("compat/testdata");
    for folder in ["assets", "configs", "toolchain"] {
        fs::create_dir_all(data.join(folder))?;
    }
    let artifacts = artifacts::prepare()?;
    replace(&artifacts.kernel.vmlinux, &data.join("assets/kernel"))?;
    root_file_system(&data.join("assets/rootfs.ext4"))?;
    let pvmm = cargo::build_static("pvmm-launcher", "pvmm")?;
    replace(&pvmm, &data.join("toolchain/firecracker"))?;
    replace(&pvmm, &data.join("toolchain/snapshot-editor"))?;
    let jailer = cargo::build_static("pvmm-jailer", "pvmm-jailer")?;
    replace(&jailer, &data.join("toolchain/jailer"))?;
    let here = |name: &str| data.join("assets").join(name).display().to_string();
    let flat = |name: &str| format!("/{name}");
    let config = |path: &dyn Fn(&str) -> String, read_only: bool| {
        json!({
            "boot-source": {
                "kernel_image_path": path("kernel"),
                "boot_args": "console=ttyS0 reboot=k panic=1 pci=off"
            },
            "drives": [{
                "drive_id": "rootfs", "path_on_host": path("rootfs.ext4"),
                "is_root_device": true, "is_read_only": read_only
            }],
            "machine-config": { "vcpu_count": 1, "mem_size_mib": 128 }
        })
    };
    write(&data.join("configs/unrestricted.json"), &config(&here, true))?;
    write(&data.join("configs/jailed.json"), &config(&flat, false))?;
    // Guests boot slowly on an emulated processor.
    let options = json!({
        "toolchain": { "version": "1.16.0", "snapshot_version": "v1" },
        "waits": { "shutdown_timeout_ms": 15000, "boot_wait_ms": 20000, "boot_socket_timeout_ms": 10000 },
        "network_interface": "lo", "jailer_uid": 1000, "jailer_gid": 1000
    });
    write(&data.join("options.json"), &options)?;
    Ok(data)
}

/// Makes a file system that contains only the guest's first process.
fn root_file_system(image: &Path) -> Result<(), Box<dyn Error>> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let static_program = Some("-C target-feature=+crt-static");
    build(&["--release", "--bin", "fctools-guest", "--target", TARGET], static_program)?;
    let tree = image.with_extension("tree");
    for folder in ["sbin", "dev", "proc", "sys", "tmp"] {
        fs::create_dir_all(tree.join(folder))?;
    }
    let guest = target().join(TARGET).join("release/fctools-guest");
    replace(&guest, &tree.join("sbin/init"))?;
    let new = image.with_extension("new");
    let _ = fs::remove_file(&new);
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&new).arg("16M");
    check(&mut mke2fs, "mke2fs")?;
    Ok(fs::rename(new, image)?)
}

fn write(path: &Path, value: &Value) -> Result<(), Box<dyn Error>> {
    Ok(fs::write(path, serde_json::to_string_pretty(value)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_that_should_pass_and_does_not_is_a_failure() {
        let log = "test a ... ok\ntest b ... FAILED\ntest c ... \nnoise";
        let known = |names: &[&str]| names.iter().map(|n| ((*n).into(), "why".into())).collect();
        assert_eq!(judge(log, &known(&["b"]), "", 2), 0);
        assert_eq!(judge(log, &known(&[]), "", 2), 1);
        assert_eq!(judge(log, &known(&["b", "gone"]), "", 2), 1);
        assert_eq!(judge(log, &known(&["b", "gone"]), "b", 2), 0);
        assert_eq!(judge("", &known(&[]), "", 0), 1);
    }

    #[test]
    fn run_that_ends_before_its_last_test_is_a_failure() {
        let log = "test a ... ok\ntest b ... ok\n";
        assert_eq!(judge(log, &BTreeMap::new(), "", 2), 0);
        assert_eq!(judge(log, &BTreeMap::new(), "", 3), 1);
    }
}
