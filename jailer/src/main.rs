//! `pvmm-jailer`: the command line of Firecracker's jailer, for any monitor with Firecracker's
//! flags.

use std::process::ExitCode;

use pvmm_jailer::arguments::{self, JailerCommand};

fn main() -> ExitCode {
    let started = pvmm_jailer::Started::now();
    let done = pvmm_jailer::forget_caller().and_then(|()| {
        let request = arguments::parse(std::env::args_os().skip(1))?;
        match request {
            JailerCommand::Help => print!("{}", arguments::HELP),
            JailerCommand::Version => println!("Jailer v{}", env!("CARGO_PKG_VERSION")),
            JailerCommand::Run(options) => pvmm_jailer::run(*options, started)?,
        }
        Ok(())
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvmm-jailer: {error}");
            ExitCode::FAILURE
        }
    }
}
