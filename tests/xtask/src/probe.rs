//! Determines whether guests run on this machine.
//!
//! Only a monitor can try this, and this tool contains none, so that it builds in seconds before
//! everything else. On most machines without a usable KVM the features of the processor are
//! sufficient. On other machines the built `pvmm` is asked, which runs guest code.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::{cargo, report};

/// Where guests run.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// On this machine, with a description.
    Here(String),
    /// Not on this machine, with the reason.
    NotHere(String),
}

/// The part of the output of `pvmm doctor --json` that is used here.
#[derive(Deserialize)]
struct Report {
    checks: Vec<Check>,
}

#[derive(Deserialize)]
struct Check {
    name: String,
    status: String,
    detail: String,
}

/// Returns whether guests run here. Builds `pvmm` if it is needed and missing.
pub fn find() -> Found {
    if let Some(reason) = without_virtualization() {
        return Found::NotHere(reason);
    }
    match ask() {
        Ok(found) => found,
        Err(reason) => Found::NotHere(reason),
    }
}

/// Returns why no unmodified guest can run here, if that is known without running one.
pub fn without_virtualization() -> Option<String> {
    if !Path::new("/dev/kvm").exists() {
        return Some("/dev/kvm does not exist".into());
    }
    let processor = fs::read_to_string("/proc/cpuinfo").ok()?;
    lacks_virtualization(&processor)
        .then(|| "the processor offers neither VMX nor SVM (see /proc/cpuinfo)".into())
}

/// Returns whether /proc/cpuinfo lists features of the processor, but not virtualization.
fn lacks_virtualization(cpuinfo: &str) -> bool {
    let mut flags = cpuinfo.lines().filter_map(|line| line.strip_prefix("flags")).peekable();
    flags.peek().is_some()
        && !flags.flat_map(str::split_whitespace).any(|flag| flag == "vmx" || flag == "svm")
}

fn ask() -> Result<Found, String> {
    let pvmm = cargo::target_dir().join("release/pvmm");
    if !pvmm.exists() {
        cargo::run(&cargo::BUILD_PVMM).map_err(|e| report::chain(&e))?;
    }
    let mut doctor = Command::new(&pvmm);
    let output = doctor.args(["doctor", "--json"]).stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("cannot run {}: {e}", pvmm.display()))?;
    answer(&output.stdout).ok_or_else(|| "pvmm doctor --json says nothing of KVM".into())
}

/// Returns the result in the output of `pvmm doctor --json`.
fn answer(json: &[u8]) -> Option<Found> {
    let report: Report = serde_json::from_slice(json).ok()?;
    let kvm = report.checks.into_iter().find(|check| check.name == "kvm")?;
    Some(if kvm.status == "ok" { Found::Here(kvm.detail) } else { Found::NotHere(kvm.detail) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_without_vmx_or_svm_is_told_without_a_monitor() {
        assert!(lacks_virtualization("processor : 0\nflags\t\t: fpu sse\n"));
        assert!(!lacks_virtualization("flags\t\t: fpu vmx sse\n"));
        assert!(!lacks_virtualization("flags\t\t: fpu svm\n"));
        // Without a list of features nothing is known.
        assert!(!lacks_virtualization(""));
    }

    #[test]
    fn tool_that_starts_things_has_no_monitor_in_it() {
        let has = |package: &str, name: &str| {
            let crates = crate::cargo::features(package).unwrap();
            crates.keys().any(|key| key.split(' ').next() == Some(name))
        };
        assert!(has("pvmm-launcher", "kvm-ioctls") && has("xtask", "clap"));
        for name in ["pvmm", "pvmm-devices", "kvm-ioctls"] {
            assert!(!has("xtask", name), "{name}");
        }
    }

    #[test]
    fn answer_of_the_doctor_is_that_of_its_kvm_check() {
        let json = |status: &str| {
            format!(
                r#"{{"can_run":true,"checks":[{{"name":"kvm","status":"{status}","detail":"d","fix":null}}]}}"#
            )
        };
        assert_eq!(answer(json("ok").as_bytes()), Some(Found::Here("d".into())));
        assert_eq!(answer(json("missing").as_bytes()), Some(Found::NotHere("d".into())));
        assert_eq!(answer(b"{\"checks\":[]}"), None);
    }
}
