//! `pvmm doctor`: reports what this host has and lacks, with a fix for each problem.
//!
//! The exit code is 1 when no VM can run, so that scripts can check a host.

mod checks;

use std::io;

use serde::Serialize;

use crate::cli::Doctor;
use crate::exit::Outcome;
use crate::output;

/// The exit code when no VM can run on this host.
const CANNOT_RUN: u8 = 1;

/// The result of one check.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    detail: String,
    /// How to fix the problem.
    fix: Option<String>,
    /// The features that need it.
    needed_for: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    /// A feature works less well or not at all, but a VM can run.
    Lacking,
    /// No VM can run without it.
    Missing,
}

/// The results of all checks.
#[derive(Debug, Serialize)]
struct Report {
    can_run: bool,
    checks: Vec<Check>,
}

pub fn doctor(args: Doctor) -> Outcome {
    let checks = checks::all();
    let can_run = checks.iter().all(|check| check.status != Status::Missing);
    let report = Report { can_run, checks };
    if args.json {
        output::json(&report)?
    } else {
        print(&report)?
    }
    Ok(if report.can_run { 0 } else { CANNOT_RUN })
}

fn print(report: &Report) -> io::Result<()> {
    let colour = output::stdout_has_colour();
    let width = report.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for check in &report.checks {
        let (word, sgr) = match check.status {
            Status::Ok => ("ok     ", "32"),
            Status::Lacking => ("lacking", "33"),
            Status::Missing => ("MISSING", "1;31"),
        };
        let word = if colour { format!("\x1b[{sgr}m{word}\x1b[0m") } else { word.to_owned() };
        let detail = crate::output::one_line(&check.detail);
        text += &format!("{:width$}  {word}  {detail}\n", check.name);
        let indent = width + 11;
        if check.status != Status::Ok {
            text += &format!("{:indent$}needed for {}\n", "", check.needed_for);
        }
        if let Some(fix) = &check.fix {
            text += &format!("{:indent$}fix: {}\n", "", crate::output::one_line(fix));
        }
    }
    text += if report.can_run {
        "\nVMs can run on this host.\n"
    } else {
        "\nNo VM can run on this host; see what is MISSING.\n"
    };
    output::raw(text.as_bytes())
}
