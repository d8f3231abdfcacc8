//! `cargo xtask test-page`: the page of `pvmm serve` in a headless browser, with real sandboxes.
//!
//! The server runs where guests run, which may be a host without a network. The browser runs here,
//! and its connections go over standard input and output of the server's command.

use std::error::Error;
use std::process::{Command, ExitCode, Stdio};

use crate::{artifacts, cargo, checkout, compat, packages, progress, report, serve};

/// The packages that the test needs on this machine.
const PACKAGES: [&str; 3] = ["chromium", "fonts-dejavu-core", "python3"];

pub fn run() -> ExitCode {
    match test() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("test-page: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn test() -> Result<(), Box<dyn Error>> {
    packages::install(&PACKAGES)?;
    cargo::run(&cargo::BUILD_PVMM)?;
    artifacts::prepare()?;
    let pictures = cargo::target_dir().join("page");
    progress::step(format!("the page in a browser; pictures go to {}", pictures.display()));
    let mut python = Command::new("python3");
    python.arg(checkout::root().join("tests/serve/page.py")).arg(pictures);
    python.arg(std::env::current_exe()?).args(["on-kvm", "--"]);
    python.args(serve::program("page_relay.py", &[], &[]));
    compat::check(python.stdin(Stdio::null()).current_dir(checkout::root()), "the page's test")
}
