//! The commands of `pvmm`, one file each.
//!
//! A command gets its parsed arguments and returns the exit code or a failure; nothing else depends
//! on the command line.

mod attach;
pub mod balloon;
mod checkpoints;
mod code;
mod completions;
mod cp;
mod diff;
mod doctor;
mod env;
mod events;
mod exec;
mod fork;
mod hibernate;
mod image;
mod kill;
mod logs;
mod man;
mod mcp;
mod migrate_templates;
mod net;
mod pause;
mod port;
mod prune;
mod ps;
mod ps_commands;
mod run;
mod serve;
mod snapshot;
mod stats;
mod template;
mod template_source;
mod top;
mod travel;
mod volume;
mod watch;

use std::os::fd::AsFd;

use pvmm_sandbox::sys::signals;

use crate::cli::{Cli, Verb};
use crate::exit::Outcome;
use crate::firecracker::{self, Program};

/// Runs the command of `cli`.
pub fn dispatch(cli: Cli) -> Outcome {
    if cli.end_with_stdin {
        signals::terminate_when_closed(std::io::stdin().as_fd())?;
    }
    match cli.verb {
        Verb::Run(args) => run::run(*args, cli.quiet),
        Verb::Exec(args) => exec::exec(args),
        Verb::Attach(args) => attach::attach(args, cli.quiet),
        Verb::Code(args) => code::code(args),
        Verb::Cp(args) => cp::cp(args, cli.quiet),
        Verb::Watch(args) => watch::watch(args),
        Verb::Events(args) => events::events(args, cli.quiet),
        Verb::Logs(args) => logs::logs(args),
        Verb::Kill(args) => kill::kill(args),
        Verb::Rm(args) => kill::rm(args),
        Verb::Port(args) => port::port(args),
        Verb::Fork(args) => fork::fork(args),
        Verb::Snapshot(args) => snapshot::snapshot(args, cli.quiet),
        Verb::Snapshots(args) => snapshot::snapshots(args, cli.quiet),
        Verb::Restore(args) => fork::restore(args),
        Verb::Checkpoint(args) => checkpoints::checkpoint(args),
        Verb::Log(args) => checkpoints::log(args),
        Verb::Checkout(args) => checkpoints::checkout(args),
        Verb::Rollback(args) => checkpoints::rollback(args),
        Verb::Diff(args) => diff::diff(args),
        Verb::Pause(args) => pause::pause(args),
        Verb::Resume(args) => pause::resume(args),
        Verb::Hibernate(args) => hibernate::hibernate(args),
        Verb::Wake(args) => hibernate::wake(args),
        Verb::Ttl(args) => hibernate::ttl(args),
        Verb::Volume(args) => volume::volume(args),
        Verb::Prune(args) => prune::prune(&args, cli.quiet),
        Verb::Ps(args) => ps::ps(args, cli.quiet),
        Verb::Stats(args) => stats::stats(args),
        Verb::Top(args) => top::top(args),
        Verb::Balloon(args) => balloon::balloon(args),
        Verb::Net(args) => net::net(args),
        Verb::Template(args) => template::template(args, cli.quiet),
        Verb::Serve(args) => serve::serve(*args, cli.quiet),
        Verb::Env(args) => env::env(args),
        Verb::Mcp(args) => mcp::mcp(args),
        Verb::Doctor(args) => doctor::doctor(args),
        // Usually handled in `main` already, because its exit codes are Firecracker's.
        Verb::Firecracker(args) => Ok(firecracker::run(Program::Firecracker, args.words)),
        Verb::SnapshotEditor(args) => Ok(firecracker::run(Program::SnapshotEditor, args.words)),
        Verb::MigrateTemplates(args) => migrate_templates::migrate_templates(args),
        Verb::Completions(args) => completions::completions(args),
        Verb::Man(args) => man::man(args),
    }
}
