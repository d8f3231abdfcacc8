//! `cargo xtask`: the one tool behind every `make` target.

mod kernel;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((verb, rest)) if verb == "kernel" => kernel::run(rest),
        _ => {
            eprintln!("usage: cargo xtask kernel");
            ExitCode::from(2)
        }
    }
}
