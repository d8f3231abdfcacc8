//! The suite in several nested hosts at once: a nested host has one CPU, most machines have more.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::on_kvm::OWN_FAULT;
use crate::{checkout, progress, sys};

/// The memory that a nested host takes, with what the emulator adds, in KiB.
const HOST_KIB: u64 = 8 << 20;
/// Fewer tests than this are not worth the boot of another host.
const FEWEST_TESTS: usize = 8;
/// Modules whose tests take minutes. They come first, so that none of them runs alone at the end.
const SLOW: [&str; 3] = ["builds::", "secrets::", "serve::"];
/// The part of the remaining tests that a host takes at once, and the most.
const TAKEN_PART: usize = 16;
const MOST_TAKEN: usize = 6;
/// How many of the slowest tests are named at the end.
const SLOWEST: usize = 12;
/// The file with the seconds that each test took, below the scratch folder.
const TIMES: &str = "suite-times";

/// Returns in how many nested hosts this machine can run the tests at once.
pub fn hosts(tests: usize) -> usize {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let room = available_kib(&meminfo).map_or(1, |free| (free / HOST_KIB) as usize);
    cpus.min(room).min(tests / FEWEST_TESTS).max(1)
}

fn available_kib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A list of tests that several nested hosts take theirs from: a file with a name in each line,
/// read and written under a lock.
pub struct Queue {
    path: PathBuf,
}

impl Queue {
    /// Writes the queue of `tests`, slow ones first.
    pub fn write(path: PathBuf, tests: &[String]) -> io::Result<Self> {
        let is_slow = |test: &&String| SLOW.iter().any(|module| test.starts_with(module));
        let (slow, others): (Vec<_>, Vec<_>) = tests.iter().partition(is_slow);
        let lines = slow.into_iter().chain(others).map(|test| format!("{test}\n"));
        fs::write(&path, lines.collect::<String>())?;
        Ok(Self { path })
    }

    pub fn open(path: PathBuf) -> Self {
        Self { path }
    }

    /// Removes the file.
    pub fn remove(self) {
        let _ = fs::remove_file(self.path);
    }

    /// Takes the next tests, fewer towards the end, so that the hosts end at about the same time.
    /// There are none when all were taken.
    pub fn take(&self) -> io::Result<Vec<String>> {
        let mut file = File::options().read(true).write(true).open(&self.path)?;
        file.lock()?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let tests: Vec<&str> = text.lines().collect();
        let (taken, left) = tests.split_at(tests.len().div_ceil(TAKEN_PART).min(MOST_TAKEN));
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(left.iter().map(|test| format!("{test}\n")).collect::<String>().as_bytes())?;
        Ok(taken.iter().map(|&test| test.to_owned()).collect())
    }
}

/// Runs the tests of the queue in `hosts` nested hosts, each with a process of its own; `arguments`
/// are those of the suite. Returns the first exit code that is not 0.
pub fn run(suite: &Path, queue: &Queue, hosts: usize, arguments: &[OsString]) -> io::Result<u8> {
    let mut children = Vec::new();
    for _ in 0..hosts {
        let mut command = Command::new(checkout::program()?);
        command.arg("suite-share").arg(suite).arg(&queue.path).arg("--").args(arguments);
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
    let lines =
        tests.iter().rev().map(|(took, name)| format!("{:.1} {name}\n", took.as_secs_f64()));
    fs::write(checkout::scratch().join(TIMES), lines.collect::<String>())?;
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
    use std::iter;

    use super::*;

    #[test]
    fn every_test_is_taken_once_slow_ones_first_and_few_at_the_end() {
        let tests: Vec<String> = (0..90).map(|number| format!("m::{number}")).collect();
        let path = std::env::temp_dir().join(format!("suite-queue-{}", std::process::id()));
        let queue = Queue::write(path, &[tests.clone(), vec!["serve::s".into()]].concat()).unwrap();
        let shares: Vec<_> =
            iter::from_fn(|| Some(queue.take().unwrap()).filter(|taken| !taken.is_empty()))
                .collect();
        fs::remove_file(&queue.path).unwrap();
        assert_eq!(shares.concat()[0], "serve::s");
        assert_eq!(shares.concat()[1..], tests);
        assert_eq!([shares[0].len(), shares[shares.len() - 1].len()], [6, 1]);
        assert_eq!(hosts(9), 1);
    }

    #[test]
    fn memory_that_is_available_is_read() {
        assert_eq!(available_kib("MemFree: 1 kB\nMemAvailable:   2048 kB\n"), Some(2048));
        assert_eq!(available_kib(""), None);
    }
}
