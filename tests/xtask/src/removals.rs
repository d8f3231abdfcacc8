//! Takes each rule of the network policy out of a copy of its source, and checks that a named test
//! fails without it. A rule whose removal no test notices is a rule that a change can lose.

mod rules;

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use self::rules::RULES;
use crate::{cargo, checkout, compat, progress, report};

const PACKAGE: &str = "pvmm-egress";
/// The time for a build and its tests, in seconds.
const DEADLINE: &str = "900";

/// A rule, how it is taken out, and the test that must fail without it.
struct Rule {
    what: &'static str,
    file: &'static str,
    /// A text that is in the file once.
    text: &'static str,
    /// The text in its place without the rule.
    without: &'static str,
    /// The test: of the crate itself below `lib::`, or of its process.
    test: &'static str,
}

impl Rule {
    /// Returns the source without the rule, if its text is there once.
    fn removed_from(&self, source: &str) -> Result<String, String> {
        match source.matches(self.text).count() {
            1 => Ok(source.replacen(self.text, self.without, 1)),
            count => Err(format!("{}: {} has its text {count} times", self.what, self.file)),
        }
    }
}

/// Of the rules, the short form takes out one in this many.
const SHORT: usize = 8;

/// Does what [`run`] does, as a command of its own; with `short` for some of the rules.
pub fn only(short: bool) -> ExitCode {
    match run(if short { SHORT } else { 1 }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("test-security: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Takes out each `every`th rule in turn, and prints how many there were. The copy has build
/// results of its own, so that no other command runs a program without a rule.
pub fn run(every: usize) -> Result<(), Box<dyn Error>> {
    let place = cargo::target_dir().join("removals");
    let copy = place.join("checkout");
    let _ = fs::remove_dir_all(&copy);
    fs::create_dir_all(&copy)?;
    compat::check(&mut checkout::copy_to(&copy), "the copy")?;
    let rules = || RULES.iter().step_by(every);
    let count = rules().count();
    progress::step(format!("{count} rules of the network policy are taken out in turn"));
    let target = place.join("target");
    let all = test(&copy, &target).status()?;
    if !all.success() {
        return Err("a test fails with every rule in its place".into());
    }
    let mut unmissed = 0;
    for rule in rules() {
        match misses(rule, &copy, &target) {
            Ok(()) => println!("{}: {} fails without it", rule.what, rule.test),
            Err(e) => {
                println!("{}: {}", rule.what, report::chain(e.as_ref()));
                unmissed += 1;
            }
        }
    }
    fs::remove_dir_all(&copy)?;
    println!("rules: {count} removed, {} noticed by their tests", count - unmissed);
    if unmissed == 0 { Ok(()) } else { Err("a rule can be lost unnoticed".into()) }
}

/// Returns the command that builds the copy and runs its tests.
fn test(copy: &Path, target: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args([DEADLINE, "cargo", "test", "--quiet", "--package", PACKAGE]);
    command.current_dir(copy).env("CARGO_TARGET_DIR", target).stdin(Stdio::null());
    command
}

/// Takes a rule out, checks that its test fails, and puts the rule back.
fn misses(rule: &Rule, copy: &Path, target: &Path) -> Result<(), Box<dyn Error>> {
    let file = copy.join(rule.file);
    let source = fs::read_to_string(&file)?;
    fs::write(&file, rule.removed_from(&source)?)?;
    let (kind, name) = match rule.test.strip_prefix("lib::") {
        Some(name) => (&["--lib"][..], name),
        None => (&["--test", "egress"][..], rule.test),
    };
    let output = test(copy, target).args(kind).args(["--", "--exact", name]).output()?;
    fs::write(&file, source)?;
    let said = String::from_utf8_lossy(&output.stdout);
    if said.contains("1 passed") && output.status.success() {
        return Err(format!("{} PASSES WITHOUT IT", rule.test).into());
    }
    if !said.contains("1 failed") {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} did not run: {said}{why}", rule.test).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_that_is_removed_is_in_its_file_once_and_its_test_is_there() {
        let sources = ["egress/src", "egress/tests/egress"].map(|dir| checkout::root().join(dir));
        let mut all = String::new();
        let mut folders = sources.to_vec();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
                if entry.file_type().unwrap().is_dir() {
                    folders.push(entry.path());
                } else {
                    all.push_str(&fs::read_to_string(entry.path()).unwrap());
                }
            }
        }
        for rule in RULES {
            let source = fs::read_to_string(checkout::root().join(rule.file)).unwrap();
            assert_ne!(rule.removed_from(&source).unwrap(), source, "{}", rule.what);
            let name = rule.test.rsplit("::").next().unwrap();
            assert!(all.contains(&format!("fn {name}()")), "{}: no test {name}", rule.what);
        }
    }
}
