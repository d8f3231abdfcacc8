//! The command line: every subcommand, flag and example, and how an invalid one is refused.
//!
//! Help, shell completions and manual pages are all generated from these definitions, so that they
//! agree.

mod balloon;
mod checkpoints;
mod code;
mod copies;
mod host;
mod keep;
mod look;
mod mcp;
mod net;
mod prune;
mod run;
mod serve;
pub mod start;
mod top;
mod travel;
mod watch;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueHint};

use crate::args::{self, Place};
use crate::exit::{Failure, Outcome, USAGE};
use pvmm_sandbox::ports::{self, PortSpec};

pub use balloon::Balloon;
pub use checkpoints::{Checkout, Checkpoint, Diff, Log};
pub use code::{Code, CodeLanguage};
pub use copies::{Fork, OneVm, Restore, Snapshot, Snapshots, SnapshotsVerb, SyncMode};
pub use host::{
    Completions, Doctor, Firecracker, Man, MigrateTemplates, SnapshotEditor, SourceFlags, Template,
    TemplateVerb, VolumeMode,
};
pub use keep::{Hibernate, Ttl, Volume, VolumeVerb, Wake};
pub use look::{Events, Kill, KillSignal, Logs, Ps, Rm, Stats};
pub use mcp::Mcp;
pub use net::NetArgs;
pub use prune::Prune;
pub use run::{Attach, CommandFlags, Exec, Run};
pub use serve::{Env, LogFormat, Serve};
pub use top::Top;
pub use travel::{PullFlags, PushFlags};
pub use watch::Watch;

const TEMPLATE: &str =
    "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

const EXIT_CODES: &str = "\
Exit codes:
  0-255  the guest command's own code
  2      the command line or its input is wrong
  124    --timeout passed
  125    pvmm or its host failed
  126    the command cannot be executed
  127    the command was not found
  128+n  the command was ended by signal n

Environment:
  PVMM_RUNTIME_DIR   where running VMs are kept [default: $XDG_RUNTIME_DIR/pvmm, /run/pvmm, /tmp/pvmm-UID]
  XDG_CACHE_HOME     kernels and templates are kept in its pvmm folder [default: ~/.cache]
  XDG_DATA_HOME      snapshots and volumes are kept in its pvmm folder [default: ~/.local/share]
  PVMM_BOOT_TIMEOUT  how long a guest may take to answer [default: 60s]
  NO_COLOR           no colour on a terminal";

/// Disposable computers with their own kernel, for code you do not trust
#[derive(Debug, Parser)]
#[command(name = "pvmm", version, help_template = TEMPLATE, after_help = EXIT_CODES)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
#[command(before_help = "\
Examples:
  pvmm run -- python3 -c 'print(6*7)'     run one command in a fresh VM, which is gone afterwards
  pvmm run -d --name web                  start a VM that stays
  pvmm exec web -- uname -a               run a command in it
  pvmm cp ./app web:/srv                  copy a folder into it
  pvmm kill web                           end it
  pvmm doctor                             what can this host do?
")]
pub struct Cli {
    /// No progress, no remarks: only errors and the command's output
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// End when standard input is closed, as it is when the program that started this one is gone
    #[arg(long, global = true, hide = true)]
    pub end_with_stdin: bool,
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    Run(Box<Run>),
    Exec(Exec),
    Code(Code),
    Attach(Attach),
    Cp(Cp),
    Watch(Watch),
    Events(Events),
    Port(Port),
    Fork(Fork),
    Snapshot(Snapshot),
    Snapshots(Snapshots),
    Restore(Restore),
    Checkpoint(Checkpoint),
    Log(Log),
    Checkout(Checkout),
    /// Take a VM back to the checkpoint that it stands on: memory, devices, disk
    #[command(before_help = "\
Examples:
  pvmm checkpoint web
  pvmm exec web -- rm -rf /srv
  pvmm rollback web                    it did not happen
")]
    Rollback(OneVm),
    Diff(Diff),
    /// Let a VM's processors stand still
    #[command(before_help = "\
Examples:
  pvmm pause web
  pvmm resume web
")]
    Pause(OneVm),
    /// Let a paused VM go on
    #[command(before_help = "\
Examples:
  pvmm pause web
  pvmm resume web
")]
    Resume(OneVm),
    Hibernate(Hibernate),
    Wake(Wake),
    Ttl(Ttl),
    Volume(Volume),
    Ps(Ps),
    Stats(Stats),
    Top(Top),
    Balloon(Balloon),
    Net(NetArgs),
    Logs(Logs),
    Kill(Kill),
    Rm(Rm),
    Template(Template),
    Prune(Prune),
    Serve(Box<Serve>),
    Env(Env),
    Mcp(Mcp),
    Doctor(Doctor),
    Firecracker(Firecracker),
    SnapshotEditor(SnapshotEditor),
    MigrateTemplates(MigrateTemplates),
    Completions(Completions),
    Man(Man),
}

/// Copy files and folders into or out of a VM
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm cp notes.txt web:/root/
  pvmm cp ./app web:/srv               the folder becomes /srv/app
  pvmm cp web:/var/log ./logs

A target that is an existing folder receives the source inside it; otherwise the target is the copy.
")]
pub struct Cp {
    // Folders are always copied whole; the flag is accepted out of habit.
    #[arg(short, long, hide = true)]
    pub recursive: bool,
    /// Keep owners, by their numbers; out of a VM that takes root
    #[arg(short, long)]
    pub archive: bool,
    /// Out of a VM: the most that may come, before the copy is given up
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = args::copy_mib)]
    pub max_size: u64,
    /// Out of a VM: the most files and folders that may come
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub max_files: u64,
    /// Path here, or VM:PATH
    #[arg(value_name = "SOURCE", value_hint = ValueHint::AnyPath, value_parser = OsStringValueParser::new().try_map(|text| args::place(&text)))]
    pub source: Place,
    /// Path here, or VM:PATH
    #[arg(value_name = "TARGET", value_hint = ValueHint::AnyPath, value_parser = OsStringValueParser::new().try_map(|text| args::place(&text)))]
    pub target: Place,
}

/// Lead ports of this host into a running VM, until Ctrl-C
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm port web 8080:80                port 8080 here is port 80 in the VM
  pvmm port web 8080:80 5432:5432
  pvmm port web 0:80                   any free port here; the first line printed says which
  pvmm port web 0.0.0.0:8080:80        also for other hosts; without an address only for this one

The guest needs no network: its agent connects to the port on the guest's own loopback.
")]
pub struct Port {
    /// Id, the start of an id, or name
    pub vm: String,
    /// [ADDRESS:]HOST:GUEST, or one number for both
    #[arg(required = true, value_name = "HOST:GUEST", value_parser = ports::port_spec)]
    pub ports: Vec<PortSpec>,
}

/// Converts an error of clap to one line; help and version are printed to standard output.
pub fn refuse(error: clap::Error) -> Outcome {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            error.print()?;
            Ok(0)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            error.print()?;
            Ok(USAGE)
        }
        kind => Err(one_line(kind, &error.render().to_string())),
    }
}

/// Keeps the first paragraph of clap's text, with its tip or a pointer to the help.
fn one_line(kind: ErrorKind, text: &str) -> Failure {
    let paragraph: Vec<&str> =
        text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let message = paragraph.join(" ");
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    let tip = text.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    // An invalid value comes without usage, and its message already says what to write.
    let usage = text.lines().find_map(|line| line.strip_prefix("Usage: "));
    let hint = tip.map(str::to_owned).or_else(|| usage.map(|usage| way_on(kind, usage)));
    Failure { hint, ..Failure::usage(message) }
}

/// Returns what to try next, from the usage line of the refused subcommand.
fn way_on(kind: ErrorKind, usage: &str) -> String {
    let is_verb = |word: &&str| word.starts_with(|c: char| c.is_ascii_lowercase());
    let verb = usage.split(' ').take_while(is_verb).collect::<Vec<_>>().join(" ");
    if kind == ErrorKind::UnknownArgument && usage.contains("-- <CMD>") {
        format!("the command goes after '--', as in: {verb} … -- CMD ARG…")
    } else {
        format!("see '{verb} --help'")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn refusal(line: &str) -> Failure {
        refuse(Cli::try_parse_from(line.split(' ')).unwrap_err()).unwrap_err()
    }

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn refusal_of_bad_value_names_flag_and_fix() {
        let failure = refusal("pvmm run --cpus 33 -- true");
        assert_eq!(failure.code, USAGE);
        assert_eq!(
            failure.message,
            "invalid value '33' for '--cpus <N>': use a number from 1 to 32"
        );
        assert_eq!(refusal("pvmm ps x y").hint.as_deref(), Some("see 'pvmm ps --help'"));
    }

    #[test]
    fn refusal_of_command_without_dashes_says_where_it_goes() {
        let failure = refusal("pvmm run python3");
        assert!(failure.message.contains("'python3'"), "{failure:?}");
        assert!(failure.hint.unwrap().contains("after '--'"));
    }

    #[test]
    fn refusal_of_missing_arguments_is_one_line() {
        let failure = refusal("pvmm exec");
        assert!(failure.message.contains("<VM>"), "{failure:?}");
        assert!(!failure.message.contains('\n'));
    }

    #[test]
    fn help_of_every_verb_starts_with_examples() {
        for verb in Cli::command().get_subcommands_mut() {
            let help = verb.render_long_help().to_string();
            let examples = help.find("Examples:").expect("examples");
            assert!(examples < help.find("Usage:").unwrap(), "{help}");
        }
    }
}
