//! `pvmm-bench`: every moment that is promised to be quick or small, measured beside its peers.
//!
//! One program: it is the harness, and started again with `vmm` it is the process that holds a
//! machine. `cargo xtask bench` builds it and runs it where guests run.

mod board;
mod facts;
mod guest;
mod moments;
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

/// Tells this program, started again from tmpfs, where it is.
const PLACE: &str = "PVMM_BENCH_PLACE";
/// Names the mechanisms that are left out, for the library.
const WITHOUT: &str = "PVMM_WITHOUT";

/// Measures pvmm, and its peers in the same run.
#[derive(Parser)]
#[command(name = "pvmm-bench", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Every moment, or those that are named, with real guests
    Run(Options),
    /// What the host's part of a restore costs; no guest runs, so any /dev/kvm will do
    Native(Options),
}

#[derive(clap::Args)]
struct Options {
    /// Few samples
    #[arg(long)]
    quick: bool,
    /// How many samples of what is quick; overrides the number that goes with the run
    #[arg(long)]
    samples: Option<usize>,
    /// Where samples, report and picture go
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
    /// Leave out these mechanisms, with commas between them; needs the feature `ablation`
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    without: Vec<String>,
    /// Only these moments: create, load, live-fork, rollback, snapshot, fork-memory, rate, grow,
    /// api, boot, exec, overhead, throughput, run
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
    // A process that holds one machine is timed from its first instruction.
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

fn ended(done: Outcome<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Moves this program to a tmpfs of its own, in a network of its own, and starts it again from
/// there: what is timed is then neither a disk nor a share, and nothing stays behind.
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
        // An emulator translates a program anew for each address it finds it at. No processor does
        // anything like that, and it would be most of what a new process costs, whoever's it is.
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
    // The first machine on a host makes the kernel patch its own code, and so does the last one's
    // end: a host that serves anybody has long done that.
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
    finish(board, &options.out).and(done)
}

/// A moment that fails does not take the others with it.
fn told(error: board::Failure) -> board::Failure {
    eprintln!("bench: {error}");
    error
}

fn native(place: &Path, options: &Options) -> Outcome<()> {
    let facts = facts::of(serde_json::json!({}));
    eprintln!("bench: {facts}");
    let mut board = Board::new(&options.out, options.counts(), &facts)?;
    moments::set_up::run(place, &mut board)?;
    finish(board, &options.out)
}

fn finish(mut board: Board, out: &Path) -> Outcome<()> {
    print!("{}", board.report()?);
    if let Some(svg) = picture::draw(&board.cells) {
        fs::write(out.join("times.svg"), svg)?;
    }
    Ok(())
}
