//! Builds the guest agent as a static executable, for `lib.rs` to embed.
//! A build script does it because the agent needs other compiler flags than the crate it goes into.

use std::env;
use std::error::Error;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Static, with relocations packed: the table of a position-independent program is 60 kB without.
const FLAGS: &str = "-C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs";

/// The outer cargo's variables that the inner one may see: where things are, and how to fetch them.
const KEPT: [&str; 6] =
    ["CARGO_HOME", "CARGO_HTTP_", "CARGO_MAKEFLAGS", "CARGO_NET_", "CARGO_REGISTR", "CARGO_TERM_"];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let workspace = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../..");
    println!("cargo::rerun-if-env-changed=PVMM_AGENT_BIN");
    println!("cargo::rerun-if-changed=build.rs");
    let agent = match env::var_os("PVMM_AGENT_BIN") {
        Some(ready) => {
            println!("cargo::rerun-if-changed={}", Path::new(&ready).display());
            PathBuf::from(ready)
        }
        None => build(&workspace, &out)?,
    };
    fs::copy(&agent, out.join("pvmm-agent"))
        .map_err(|err| format!("cannot copy the agent from {}: {err}", agent.display()))?;
    // Here and not at run time: it names the agent in every start's look for a warm template.
    let mut hasher = DefaultHasher::new();
    fs::read(&agent)?.hash(&mut hasher);
    println!("cargo::rustc-env=PVMM_AGENT_KEY={:016x}", hasher.finish());
    Ok(())
}

fn build(workspace: &Path, out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    for source in ["guest-agent/src", "guest-agent/Cargo.toml", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", workspace.join(source).display());
    }
    let target_dir = target_dir(out);
    // Offline first: everything is mostly there already, and then no network is needed at all.
    if !cargo(workspace, &target_dir, true)?.success() {
        let status = cargo(workspace, &target_dir, false)?;
        if !status.success() {
            return Err(format!("cannot build the guest agent: cargo ended with {status}").into());
        }
    }
    Ok(target_dir.join(TARGET).join("agent").join("pvmm-agent"))
}

fn cargo(workspace: &Path, target_dir: &Path, offline: bool) -> std::io::Result<ExitStatus> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        let cargos = text.starts_with("CARGO_") || text.starts_with("RUST");
        let kept = KEPT.iter().any(|prefix| text.starts_with(prefix))
            || text.starts_with("RUSTUP_")
            || text == "RUST_BACKTRACE";
        if (cargos && !kept) || text == "TARGET" || text == "HOST" {
            cargo.env_remove(&name);
        }
    }
    cargo
        .current_dir(workspace)
        .env("RUSTFLAGS", FLAGS)
        .args(["build", "--package", "pvmm-guest-agent", "--bin", "pvmm-agent"])
        .args(["--profile", "agent", "--target", TARGET, "--target-dir"])
        .arg(target_dir);
    if workspace.join("Cargo.lock").exists() {
        cargo.arg("--locked");
    }
    if offline {
        cargo.arg("--offline");
    }
    cargo.status()
}

/// One directory for all profiles, so that debug, release and clippy builds share one agent.
/// Cargo marks the top of its target directory; where it does not, our own output directory does.
fn target_dir(out: &Path) -> PathBuf {
    let top = out.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists());
    top.unwrap_or(out).join("agent")
}
