//! `pvmm-egress`: takes its descriptors, confines itself, and carries one sandbox's traffic.

use std::process::ExitCode;

use pvmm_egress::arguments::{self, EgressCommand};

const FAILED: u8 = 1;
const WRONG: u8 = 2;

fn main() -> ExitCode {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let options = match arguments::parse(words) {
        Ok(EgressCommand::Help) => {
            print!("{}", arguments::HELP);
            return ExitCode::SUCCESS;
        }
        Ok(EgressCommand::Version) => {
            println!("pvmm-egress {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Ok(EgressCommand::Run(options)) => options,
        Err(error) => {
            eprintln!("pvmm-egress: {error}");
            return ExitCode::from(WRONG);
        }
    };
    match pvmm_egress::run(*options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvmm-egress: {error}");
            ExitCode::from(FAILED)
        }
    }
}
