//! The suite in several nested hosts at once: a nested host has one CPU, most machines have more.

use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::on_kvm::OWN_FAULT;
use crate::{checkout, progress, sys};

/// The memory that a nested host takes, with what the emulator adds, in KiB.
const HOST_KIB: u64 = 8 << 20;
/// Fewer tests than this are not worth the boot of another host.
const FEWEST_TESTS: usize = 8;
/// How many of the slowest tests are named at the end.
const SLOWEST: usize = 12;

/// Returns how many nested hosts this machine can run at once.
pub fn hosts() -> usize {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    cpus.min(available_kib(&meminfo).map_or(1, |free| (free / HOST_KIB) as usize)).max(1)
}

fn available_kib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Deals the tests out to at most `hosts` hosts. Tests of one module, which often take about the
/// same time, go to different ones.
pub fn split(tests: &[String], hosts: usize) -> Vec<Vec<&String>> {
    let hosts = hosts.min(tests.len() / FEWEST_TESTS).max(1);
    (0..hosts).map(|host| tests.iter().skip(host).step_by(hosts).collect()).collect()
}

/// Runs the suite once for each list of arguments, each in a nested host and a process of its own.
/// Returns the first exit code that is not 0.
pub fn run(suite: &Path, arguments: &[Vec<OsString>]) -> io::Result<u8> {
    let mut children = Vec::new();
    for share in arguments {
        let mut command = Command::new(checkout::program()?);
        command.arg("suite-share").arg(suite).arg("--").args(share);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        sys::die_with_parent(&mut command, Vec::new());
        children.push(command.spawn()?);
    }
    let mut tests = thread::scope(|scope| {
        let mut copying = Vec::new();
        for child in &mut children {
            let (out, err) = (child.stdout.take(), child.stderr.take());
            copying.push(scope.spawn(|| out.map(|from| copy_lines(from, io::stdout()))));
            scope.spawn(|| err.map(|from| copy_lines(from, io::stderr())));
        }
        let copied = copying.into_iter().filter_map(|thread| thread.join().ok().flatten());
        copied.flatten().flatten().collect::<Vec<_>>()
    });
    tests.sort();
    let slowest = tests
        .iter()
        .rev()
        .take(SLOWEST)
        .map(|(took, name)| format!("{:.0} s {name}", took.as_secs_f64()));
    progress::step(format!("slowest: {}", slowest.collect::<Vec<_>>().join(", ")));
    let mut code = 0;
    for mut child in children {
        let ended = child.wait()?.code().map_or(OWN_FAULT, |code| code as u8);
        code = if code == 0 { ended } else { code };
    }
    Ok(code)
}

/// Copies whole lines, so that those of different hosts do not mix. Returns how long each test
/// took.
fn copy_lines(from: impl Read, mut to: impl Write) -> io::Result<Vec<(Duration, String)>> {
    let mut from = BufReader::new(from);
    let (mut line, mut tests, mut since) = (Vec::new(), Vec::new(), Instant::now());
    while from.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        let mut words = line.split(|byte| *byte == b' ');
        if words.next() == Some(b"test")
            && let Some(name) = words.next()
        {
            tests.push((since.elapsed(), String::from_utf8_lossy(name).into_owned()));
            since = Instant::now();
        }
        line.clear();
    }
    Ok(tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_goes_to_one_host_and_few_tests_to_one() {
        let tests: Vec<String> = (0..33).map(|number| number.to_string()).collect();
        let shares = split(&tests, 2);
        assert_eq!([shares[0].len(), shares[1].len()], [17, 16]);
        assert_eq!([shares[0][1], shares[1][1]], ["2", "3"]);
        assert_eq!(split(&tests[..9], 2).len(), 1);
        assert_eq!(split(&[], 2), [Vec::<&String>::new()]);
    }

    #[test]
    fn memory_that_is_available_is_read() {
        assert_eq!(available_kib("MemFree: 1 kB\nMemAvailable:   2048 kB\n"), Some(2048));
        assert_eq!(available_kib(""), None);
    }
}
