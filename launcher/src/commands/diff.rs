//! `pvmm diff`: the files that differ between two moments of a VM.

use std::io::IsTerminal;

use crate::cli::Diff;
use crate::exit::{Failure, Outcome};
use crate::interrupt;
use crate::output;
use pvmm_sandbox::file_diff::{self, DiffOptions};
use pvmm_sandbox::vm_dir::Base;

pub fn diff(args: Diff) -> Outcome {
    if !args.path.is_absolute() {
        return Err(Failure::usage("--path: use an absolute path of the guest, such as /etc"));
    }
    let base = Base::open()?;
    let vm = base.find(&args.vm)?;
    let options = DiffOptions {
        root: args.path,
        patch: args.patch,
        unjailed: args.no_jail,
        ..DiffOptions::between(&args.from, args.to.as_deref())
    };
    let diff = interrupt::interruptible(|| file_diff::diff(&base, &vm, &options))?;
    if args.json {
        output::json(&diff)?;
    } else {
        // The content of a guest's file may control a terminal; a program gets it unchanged.
        let to_people = std::io::stdout().is_terminal();
        let clean = |line: &str| if to_people { visible(line) } else { line.to_owned() };
        output::raw(diff.text(clean).as_bytes())?;
    }
    Ok(0)
}

/// Escapes the control characters of a line, except tabs.
fn visible(line: &str) -> String {
    let escape = |c: char| c.is_control() && c != '\t';
    line.chars().fold(String::new(), |mut text, c| {
        if escape(c) {
            text.extend(c.escape_default())
        } else {
            text.push(c)
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_a_hostile_file_cannot_control_the_terminal() {
        assert_eq!(visible("+\ta\x1b[2Jb\u{9b}c\r"), "+\ta\\u{1b}[2Jb\\u{9b}c\\r");
    }
}
