//! `cargo xtask`: the one tool behind every `make` target.
//!
//! Each verb is a file of its own; this one only finds it.

mod artifacts;
mod cache;
mod cargo;
mod check;
mod checkout;
mod demo;
mod host;
mod nested_host;
mod on_kvm;
mod packages;
mod progress;
mod report;
mod suite;
mod sys;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

const HELP: &str = "\
usage: cargo xtask VERB [ARGUMENT…]

  check                formatting, lints and the rules of the house
  test [-- ARGUMENT…]  every test; the arguments go to the suite of real guests
  demo                 boot a guest, run a line of Python in it, say what it took
  on-kvm -- COMMAND…   run COMMAND where guests run: here, or in a nested host
  host up|down|status  keep a nested host running, which on-kvm then uses
";

fn main() -> ExitCode {
    progress::init();
    let mut arguments: Vec<OsString> = env::args_os().skip(1).collect();
    if arguments.is_empty() {
        eprint!("{HELP}");
        return ExitCode::from(2);
    }
    let verb = arguments.remove(0);
    match verb.to_str() {
        Some("check") => check::run(&arguments),
        Some("test") => suite::run(&arguments),
        Some("demo") => demo::run(&arguments),
        Some("on-kvm") => on_kvm::run(after_dashes(&arguments)),
        Some("host") => host::run(&arguments),
        Some("--help" | "-h" | "help") => {
            print!("{HELP}");
            ExitCode::SUCCESS
        }
        // Not in the help: what the nested host runs, and a look at the probe alone.
        Some("nested-serve") => nested_host::serve::first_process(),
        Some("nested-serve-worker") => match nested_host::serve::worker() {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("nested host: {e}");
                ExitCode::FAILURE
            }
        },
        Some("nested-background") => host::serve(),
        Some("probe") => probe(),
        _ => {
            eprint!("xtask: no verb {}\n\n{HELP}", verb.display());
            ExitCode::from(2)
        }
    }
}

fn after_dashes(arguments: &[OsString]) -> &[OsString] {
    match arguments.split_first() {
        Some((first, rest)) if first == "--" => rest,
        _ => arguments,
    }
}

fn probe() -> ExitCode {
    match pvmm::kvm::host::probe() {
        Ok(host) => {
            println!("{host:?}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            println!("{}", report::chain(&e));
            ExitCode::FAILURE
        }
    }
}
