//! `pvmm-bench`: measures each moment that is promised to be quick or small, for pvmm and its
//! peers.
//!
//! The program is the harness. Started again with the argument `vmm`, it is a process that holds
//! one VM. `cargo xtask bench` builds the program and runs it where guests run.

mod board;
mod facts;
mod guest;
mod moments;
mod page;
mod peers;
mod picture;
mod stage;
mod stats;
mod sys;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ::pvmm::ablation::Mechanism;
use clap::{Parser, Subcommand};

use board::{Board, Counts, Outcome};
use moments::{BAKED, BOOTED};
use stage::Stage;

/// The environment variable that tells this program, executed from tmpfs, where the tmpfs is.
const PLACE: &str = "PVMM_BENCH_PLACE";
/// The environment variable that names, for the library, the mechanisms to leave out.
const WITHOUT: &str = "PVMM_WITHOUT";

/// Measures pvmm and its peers in one run.
#[derive(Parser)]
#[command(name = "pvmm-bench", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Measure every moment, or the named ones, with real guests
    Run(Options),
    /// Measure the host's part of a restore; no guest runs, so any /dev/kvm will do
    Native(Options),
}

#[derive(clap::Args)]
struct Options {
    /// Take few samples
    #[arg(long)]
    quick: bool,
    /// Take this many samples of quick moments, instead of the number that goes with the run
    #[arg(long)]
    samples: Option<usize>,
    /// The folder for samples, report and picture
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
    /// When and of which commit the run is, for the page of results
    #[arg(long, value_name = "TEXT", default_value = "Date and commit unknown")]
    made: String,
    /// Leave out these mechanisms, separated by commas; needs the feature `ablation`
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    without: Vec<String>,
    /// Measure only these moments: create, load, live-fork, rollback, snapshot, fork-memory, rate,
    /// grow, api, boot, exec, overhead, throughput, run
    moments: Vec<String>,
}

impl Options {
    fn counts(&self) -> Counts {
        let mut counts = if self.quick { Counts::QUICK } else { Counts::FULL };
        if let Some(samples) = self.samples {
            counts.quick = samples.max(1);
        }
        counts
    }

    fn check_without(&self) -> Outcome<()> {
        let known = Mechanism::ALL.map(|(name, _)| name);
        match self.without.iter().find(|name| !known.contains(&name.as_str())) {
            Some(name) => {
                Err(format!("{name}: no such mechanism; there are {}", known.join(", ")).into())
            }
            None if !self.without.is_empty() && !cfg!(feature = "ablation") => {
                Err("--without: this program was built without the feature `ablation`".into())
            }
            None => Ok(()),
        }
    }

    fn wants(&self, moment: &str) -> bool {
        self.moments.is_empty() || self.moments.iter().any(|wanted| wanted == moment)
    }

    fn check(&self) -> Outcome<()> {
        self.check_without()?;
        let known = || BAKED.iter().map(|(name, _)| *name).chain(BOOTED.iter().map(|(n, _)| *n));
        match self.moments.iter().find(|name| !known().any(|known| known == *name)) {
            Some(name) => {
                let known: Vec<_> = known().collect();
                Err(format!("{name}: no such moment; there are {}", known.join(", ")).into())
            }
            None => Ok(()),
        }
    }
}

fn main() -> ExitCode {
    sys::keep_one_heap();
    // A process that holds one VM is timed from its first instruction, so its arguments are handled
    // before the command line is parsed.
    if let [_, verb, job] = &std::env::args().collect::<Vec<_>>()[..]
        && verb == peers::pvmm::VERB
    {
        return ended(peers::pvmm::work(job));
    }
    ended(match Cli::parse().verb {
        Verb::Run(options) => {
            options.check().and_then(|()| on_tmpfs(&options.without)).and_then(|place| {
                let done = run(&place, &options);
                let _ = fs::remove_dir_all(place);
                done
            })
        }
        Verb::Native(options) => {
            options.check().and_then(|()| on_tmpfs(&options.without)).and_then(|place| {
                let done = native(&place, &options);
                let _ = fs::remove_dir_all(place);
                done
            })
        }
    })
}

/// Writes an error and its causes in one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    std::iter::successors(error.source(), |error| error.source())
        .fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

fn ended(done: Outcome<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {}", chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Copies this program to a new tmpfs, in a new network namespace, and executes the copy. In the
/// copy, returns the place of the tmpfs. Neither a disk nor a share is then part of a measured
/// time, and nothing stays behind. If the host refuses the namespace or the tmpfs, a message says
/// so, and an ordinary directory is used.
fn on_tmpfs(without: &[String]) -> Outcome<PathBuf> {
    if let Some(place) = std::env::var_os(PLACE) {
        return Ok(PathBuf::from(place));
    }
    let place = PathBuf::from(format!("/tmp/pvmm-bench-{}", std::process::id()));
    fs::create_dir(&place)?;
    let isolated = sys::unshare().and_then(|()| sys::mount_tmpfs(&place));
    if let Err(e) = isolated {
        eprintln!("bench: no network and tmpfs of its own ({e}); using {}", place.display());
    }
    if facts::emulated() {
        // An emulator translates a program again for each address at which it is loaded. A
        // processor has no such cost. On an emulator it would be most of the cost of a new process,
        // for every contender.
        sys::fix_addresses()?;
    }
    let program = place.join("pvmm-bench");
    fs::copy(std::env::current_exe()?, &program)?;
    let failed = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(PLACE, &place)
        .env(WITHOUT, without.join(","))
        .exec();
    Err(failed.into())
}

fn run(place: &Path, options: &Options) -> Outcome<()> {
    // The kernel patches its own code when the first VM on a host is made, and again when the last
    // VM ends. A host in use always has a VM, so one VM exists during the whole run.
    let _first = kvm_ioctls::Kvm::new().and_then(|kvm| kvm.create_vm());
    let (stage, guest) = Stage::new(place)?;
    let facts = facts::of(guest);
    eprintln!("bench: {facts}");
    let mut board = Board::new(&options.out, options.counts(), &facts)?;
    let mut done = Ok(());
    if BAKED.iter().any(|(name, _)| options.wants(name)) {
        board.say("baking a template");
        let baking = stage.bake()?;
        for (_, moment) in BAKED.iter().filter(|(name, _)| options.wants(name)) {
            done = done.and(moment(&stage, &baking, &mut board).map_err(told));
        }
    }
    for (_, moment) in BOOTED.iter().filter(|(name, _)| options.wants(name)) {
        done = done.and(moment(&stage, &mut board).map_err(told));
    }
    finish(board, options, &facts).and(done)
}

/// Prints the error and returns it. The other moments are still measured.
fn told(error: board::Failure) -> board::Failure {
    eprintln!("bench: {}", chain(error.as_ref()));
    error
}

fn native(place: &Path, options: &Options) -> Outcome<()> {
    let facts = facts::of(serde_json::json!({}));
    eprintln!("bench: {facts}");
    let mut board = Board::new(&options.out, options.counts(), &facts)?;
    moments::set_up::run(place, &mut board)?;
    finish(board, options, &facts)
}

fn finish(mut board: Board, options: &Options, facts: &serde_json::Value) -> Outcome<()> {
    print!("{}", board.report()?);
    if let Some(svg) = picture::draw(&board.cells) {
        fs::write(options.out.join("times.svg"), svg)?;
    }
    fs::write(options.out.join("results.md"), page::write(&options.made, facts, &board.cells))?;
    Ok(())
}
