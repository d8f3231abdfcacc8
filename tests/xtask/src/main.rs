//! `cargo xtask`: the tool behind every `make` target.
//!
//! Each verb has its own file; this file selects the verb.

mod advisories;
mod artifacts;
mod bad_input;
mod bare;
mod bench;
mod cache;
mod cargo;
mod check;
mod checkout;
mod clocks;
mod cluster;
mod compat;
mod cycles;
mod deb;
mod demo;
mod dist;
mod fctools;
mod firecracker;
mod fuzz;
mod host;
mod kernel;
mod nested_host;
mod on_kvm;
mod package_test;
mod packages;
mod page;
mod probe;
mod progress;
mod removals;
mod report;
mod sbom;
mod serve;
mod shim_test;
mod site;
mod stock;
mod suite;
mod sys;
mod tarball;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's tool.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Check formatting, lints and the rules of this project
    Check,
    /// Run every test; arguments after `--` go to the suite of real guests
    Test {
        #[arg(last = true)]
        arguments: Vec<OsString>,
    },
    /// Run the suite's long tests: thousands of restores, forks and rollbacks, and figures
    Soak {
        /// Only tests with this in their names
        #[arg(default_value = "soak")]
        filter: OsString,
    },
    /// Run the tests of the jail, the system call filters and the network policy
    TestSecurity {
        /// Also the long ones: thousands of VMs, and kills at hundreds of system calls
        #[arg(long)]
        long: bool,
        /// Only take out each rule of the network policy in turn, which needs no guest
        #[arg(long, conflicts_with = "long")]
        rules: bool,
        /// Only take out some of them
        #[arg(long, requires = "rules")]
        short: bool,
    },
    /// Run examples, published clients and many clients at once against `pvmm serve`
    TestServe(serve::Options),
    /// Run containers in VMs by containerd's own client
    TestShim(shim_test::Options),
    /// Run pods of Kubernetes in VMs, with a control plane built from Debian's source package
    TestCluster(cluster::Options),
    /// Look at the page of `pvmm serve` in a headless browser, with real sandboxes
    TestPage,
    /// Build the documentation as a site: target/site/index.html
    Site,
    /// Load snapshots between two nested hosts whose clocks run at different rates
    Clocks,
    /// Measure every moment that is promised to be quick, and its peers
    Bench(bench::Options),
    /// Run every fuzz target for some time
    Fuzz {
        /// How many seconds each target runs
        #[arg(long, default_value_t = 60)]
        seconds: u32,
        /// Only targets with this in their names
        filter: Option<String>,
    },
    /// Run published clients of Firecracker, unmodified, against pvmm in its place
    Compat(compat::Options),
    /// Boot a guest, run a line of Python in it, and print how long it took
    Demo,
    /// Build what is shipped: static, optimised as a whole
    Build,
    /// Make the Debian package: target/packages
    Deb,
    /// Make an archive of programs, manual pages, completions and units: target/packages
    Tarball,
    /// Install, use, upgrade, remove and purge the Debian package in a clean Debian
    TestPackages,
    /// Build the guest kernel
    Kernel {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run a command where guests run: here, or in a nested host
    OnKvm {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
    /// Run a command in a minimal Debian with Rust and a copy of this checkout, and nothing else
    Bare {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
    /// Keep a nested host running, which on-kvm then uses
    #[command(subcommand)]
    Host(host::Verb),
    /// Print whether guests run here
    #[command(hide = true)]
    Probe,
    /// Run tests of a queue in a nested host
    #[command(hide = true)]
    SuiteShare {
        suite: PathBuf,
        queue: PathBuf,
        #[arg(last = true)]
        arguments: Vec<OsString>,
    },
    /// The first process of a nested host
    #[command(hide = true)]
    NestedServe,
    #[command(hide = true)]
    NestedServeWorker,
    /// The process that keeps a nested host
    #[command(hide = true)]
    NestedBackground,
}

fn main() -> ExitCode {
    progress::init();
    match Cli::parse().verb {
        Verb::Check => check::run(),
        Verb::Test { arguments } => suite::run(&arguments),
        Verb::Soak { filter } => suite::soak(filter),
        Verb::TestSecurity { rules: true, short, .. } => removals::only(short),
        Verb::TestSecurity { long, .. } => suite::security(long),
        Verb::TestServe(options) => serve::run(&options),
        Verb::TestShim(options) => shim_test::run(&options),
        Verb::TestCluster(options) => cluster::run(&options),
        Verb::TestPage => page::run(),
        Verb::Site => site::run(),
        Verb::Clocks => clocks::run(),
        Verb::Bench(options) => bench::run(&options),
        Verb::Fuzz { seconds, filter } => fuzz::run(seconds, filter.as_deref()),
        Verb::Compat(options) => compat::run(&options),
        Verb::Demo => demo::run(),
        Verb::Build => build(),
        Verb::Deb => dist::run(dist::Kind::Deb),
        Verb::Tarball => dist::run(dist::Kind::Tarball),
        Verb::TestPackages => package_test::run(),
        Verb::Kernel { arguments } => kernel::run(&arguments),
        Verb::OnKvm { command } => on_kvm::run(&command),
        Verb::Bare { command } => bare::run(&command),
        Verb::Host(verb) => host::run(verb),
        Verb::Probe => say_what_runs(),
        Verb::SuiteShare { suite, queue, arguments } => suite::share(&suite, queue, &arguments),
        Verb::NestedServe => nested_host::serve::first_process(),
        Verb::NestedServeWorker => match nested_host::serve::worker() {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("nested host: {e}");
                ExitCode::FAILURE
            }
        },
        Verb::NestedBackground => host::serve(),
    }
}

fn build() -> ExitCode {
    for (package, name) in dist::PROGRAMS {
        match cargo::ship(package, name) {
            Ok(program) => println!("{}", program.display()),
            Err(e) => {
                eprintln!("build: {}", report::chain(&e));
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn say_what_runs() -> ExitCode {
    match probe::find() {
        probe::Found::Here(what) => {
            println!("{what}");
            ExitCode::SUCCESS
        }
        probe::Found::NotHere(reason) => {
            println!("{reason}");
            ExitCode::FAILURE
        }
    }
}
