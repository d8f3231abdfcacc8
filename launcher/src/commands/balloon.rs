//! `pvmm balloon`: sets and shows how much memory a guest gives back to the host.

use std::time::{Duration, Instant};

use crate::cli::Balloon;
use crate::exit::Outcome;
use crate::output::{self, Table};
use pvmm_sandbox::control::{self, ControlRequest};
use pvmm_sandbox::vm_dir::Base;

/// How long the guest may take to reach a new size before its progress is shown.
const PATIENCE: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(100);

pub fn balloon(args: Balloon) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    if let Some(target_mib) = args.size {
        control::ask(&vm, ControlRequest::SetBalloon { target_mib })?;
    }
    let until = Instant::now() + PATIENCE;
    let size = loop {
        let size = control::balloon(&vm)?;
        let is_there = size.actual_bytes == size.target_bytes;
        if is_there || args.size.is_none() || Instant::now() >= until {
            break size;
        }
        std::thread::sleep(LOOK);
    };
    if args.json {
        output::json(&size)?
    } else {
        let mut table = Table::new(&["GIVEN UP", "ASKED FOR", "FREE IN THE GUEST"]);
        table.row(vec![
            output::bytes(size.actual_bytes),
            output::bytes(size.target_bytes),
            size.guest_free_bytes.map_or("-".to_owned(), output::bytes),
        ]);
        table.print()?;
    }
    Ok(0)
}
