//! `pvmm balloon`: how much memory a guest is to give back, and how much it has.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::cli::Balloon;
use crate::control::{self, Request};
use crate::exit::Outcome;
use crate::output::{self, Table};
use crate::vm_dir::Base;

/// How long a guest gets to follow before it is shown how far it is.
const PATIENCE: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(100);

pub fn balloon(args: Balloon) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    if let Some(target_mib) = args.size {
        control::ask(&vm, Request::SetBalloon { target_mib })?;
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
    match args.json {
        true => output::json(&size)?,
        false => {
            let mut table = Table::new(&["GIVEN UP", "ASKED FOR", "FREE IN THE GUEST"]);
            table.row(vec![
                output::bytes(size.actual_bytes),
                output::bytes(size.target_bytes),
                size.guest_free_bytes.map_or("-".to_owned(), output::bytes),
            ]);
            table.print()?;
        }
    }
    Ok(0)
}

/// How far a balloon is; what the guest has free is its own word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct BalloonSize {
    pub target_bytes: u64,
    pub actual_bytes: u64,
    pub guest_free_bytes: Option<u64>,
    pub guest_total_bytes: Option<u64>,
}
