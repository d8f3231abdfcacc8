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

/// Small before fast. The agent aborts on a panic, because a guest whose agent lost a thread is
/// worse than none, and because unwinding costs a twentieth of its size.
const PROFILE: [&str; 7] = [
    "profile.agent.inherits='release'",
    "profile.agent.overflow-checks=true",
    "profile.agent.strip='symbols'",
    "profile.agent.opt-level='z'",
    "profile.agent.lto='fat'",
    "profile.agent.codegen-units=1",
    "profile.agent.panic='abort'",
];

/// The outer cargo's variables that the inner one may see: where things are, and how to fetch them.
const KEPT: [&str; 6] =
    ["CARGO_HOME", "CARGO_HTTP_", "CARGO_MAKEFLAGS", "CARGO_NET_", "CARGO_REGISTR", "CARGO_TERM_"];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let source = PathBuf::from(env::var("DEP_PVMM_GUEST_AGENT_SOURCE")?);
    println!("cargo::rerun-if-env-changed=PVMM_AGENT_BIN");
    println!("cargo::rerun-if-changed=build.rs");
    let agent = match env::var_os("PVMM_AGENT_BIN") {
        Some(ready) => {
            println!("cargo::rerun-if-changed={}", Path::new(&ready).display());
            PathBuf::from(ready)
        }
        None => build(&source, &out)?,
    };
    fs::copy(&agent, out.join("pvmm-agent"))
        .map_err(|err| format!("cannot copy the agent from {}: {err}", agent.display()))?;
    // Here and not at run time: it names the agent in every start's look for a warm template.
    let mut hasher = DefaultHasher::new();
    fs::read(&agent)?.hash(&mut hasher);
    println!("cargo::rustc-env=PVMM_AGENT_KEY={:016x}", hasher.finish());
    Ok(())
}

fn build(source: &Path, out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    // In the workspace the lock file is its own, in a registry the package's.
    for file in ["src", "Cargo.toml", "Cargo.lock", "../Cargo.toml", "../Cargo.lock"] {
        let path = source.join(file);
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    let target_dir = target_dir(out);
    // Offline first: everything is mostly there already, and then no network is needed at all.
    if !cargo(source, &target_dir, true)?.success() {
        let status = cargo(source, &target_dir, false)?;
        if !status.success() {
            return Err(format!("cannot build the guest agent: cargo ended with {status}").into());
        }
    }
    Ok(target_dir.join(TARGET).join("agent").join("pvmm-agent"))
}

fn cargo(source: &Path, target_dir: &Path, offline: bool) -> std::io::Result<ExitStatus> {
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
        .current_dir(source)
        .env("RUSTFLAGS", FLAGS)
        .args(["build", "--package", "pvmm-guest-agent", "--bin", "pvmm-agent"])
        .args(["--profile", "agent", "--target", TARGET, "--target-dir"])
        .arg(target_dir)
        .args(PROFILE.iter().flat_map(|setting| ["--config", setting]))
        .arg("--locked");
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
