//! `pvmm-jailer`: the command line of Firecracker's jailer, around any monitor that answers to its flags.

use std::process::ExitCode;

use pvmm_jailer::arguments::{self, Request};

fn main() -> ExitCode {
    let started = pvmm_jailer::Started::now();
    let done = pvmm_jailer::forget_caller().and_then(|()| {
        let request = arguments::parse(std::env::args_os().skip(1))?;
        match request {
            Request::Help => print!("{}", arguments::HELP),
            Request::Version => println!("Jailer v{}", env!("CARGO_PKG_VERSION")),
            Request::Run(options) => pvmm_jailer::run(*options, started)?,
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
