//! `cargo xtask clocks`: loads a snapshot on a host with another clock rate, and on its own host
//! after another boot.
//!
//! Three nested hosts run one after the other: the first with the clock of the outer machine, the
//! second with another, the third like the first. Each runs one test of the suite, and leaves its
//! files for the next.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::process::ExitCode;

use crate::nested_host::Clock;
use crate::on_kvm::{self, NestedPlace};
use crate::{cargo, checkout, progress, report};

const STEPS: [(Clock, &str); 3] = [
    (Clock::Outer, "other_host::clocks_first_host_writes_a_snapshot"),
    (Clock::OneGhz, "other_host::clocks_other_host_refuses_it_and_writes_its_own"),
    (Clock::Outer, "other_host::clocks_first_host_refuses_that_and_goes_on_with_its_own"),
];

pub fn run() -> ExitCode {
    match steps() {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("clocks: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn steps() -> Result<u8, Box<dyn Error>> {
    let suite = cargo::build_test("pvmm-tests", "suite")?;
    std::env::set_current_dir(checkout::root())?;
    fs::create_dir_all(checkout::scratch())?;
    for (clock, test) in STEPS {
        progress::step(format!("{clock:?}: {test}"));
        let mut argv = vec![suite.as_os_str().to_owned()];
        argv.extend(["--ignored", "--nocapture", "--exact", test].map(OsString::from));
        let code = on_kvm::code(NestedPlace::own(clock).and_then(|place| place.run(&argv)));
        if code != 0 {
            return Ok(code);
        }
    }
    Ok(0)
}
