//! Firecracker's command line: its flags, and its exit codes for invalid arguments.
//!
//! Parsed by hand, because the rules differ from those of the other `pvmm` commands: long names
//! only, a value is the next argument, no flag may be given twice.

use std::path::PathBuf;

use super::bodies::Level;

/// Exit codes of the process, which supervisors match on.
pub mod code {
    pub const OK: u8 = 0;
    pub const GENERIC: u8 = 1;
    pub const BAD_SYSCALL: u8 = 148;
    pub const SIGBUS: u8 = 149;
    pub const SIGSEGV: u8 = 150;
    pub const SIGXFSZ: u8 = 151;
    pub const BAD_CONFIGURATION: u8 = 152;
    pub const ARGUMENTS: u8 = 153;
    pub const SIGXCPU: u8 = 154;
    pub const SIGHUP: u8 = 156;
    pub const SIGILL: u8 = 157;
}

/// The version that clients see. It contains the Firecracker release whose API is implemented, for
/// clients that search for it, and differs from every Firecracker version, for clients that
/// compare.
pub const VERSION: &str = concat!("1.16.0-pvmm-", env!("CARGO_PKG_VERSION"));

const DEFAULT_SOCKET: &str = "/run/firecracker.socket";
const DEFAULT_ID: &str = "anonymous-instance";
/// The largest request body in bytes, unless `--http-api-max-payload-size` sets another.
pub const BODY_MAX: usize = 51200;

/// The operation that a command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Run(Box<Args>),
    Help,
    Version,
    SnapshotVersion,
    DescribeSnapshot(PathBuf),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Args {
    pub api_sock: PathBuf,
    pub id: String,
    pub config_file: Option<PathBuf>,
    pub no_api: bool,
    pub metadata: Option<PathBuf>,
    pub log_path: Option<PathBuf>,
    pub level: Option<Level>,
    pub module: Option<String>,
    pub show_level: bool,
    pub show_log_origin: bool,
    pub metrics_path: Option<PathBuf>,
    /// Log how long the guest takes until it says that it has booted.
    pub boot_timer: bool,
    /// The folder in which drives must be that only a state file names, not a request to this
    /// process.
    pub drive_root: Option<PathBuf>,
    pub start_time_us: Option<u64>,
    pub start_time_cpu_us: Option<u64>,
    pub parent_cpu_time_us: Option<u64>,
    pub body_max: usize,
    pub mmds_max: usize,
    pub seccomp: SeccompChoice,
}

/// The system call filters of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SeccompChoice {
    /// The filters of pvmm.
    #[default]
    BuiltIn,
    /// The filters of a file.
    File(PathBuf),
    /// None.
    Off,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            api_sock: DEFAULT_SOCKET.into(),
            id: DEFAULT_ID.to_owned(),
            config_file: None,
            no_api: false,
            metadata: None,
            log_path: None,
            level: None,
            module: None,
            show_level: false,
            show_log_origin: false,
            metrics_path: None,
            boot_timer: false,
            drive_root: None,
            start_time_us: None,
            start_time_cpu_us: None,
            parent_cpu_time_us: None,
            body_max: BODY_MAX,
            mmds_max: BODY_MAX,
            seccomp: SeccompChoice::BuiltIn,
        }
    }
}

/// Why a command line is refused, and the exit code for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    pub code: u8,
    pub message: String,
}

fn wrong(message: impl Into<String>) -> Wrong {
    Wrong { code: code::ARGUMENTS, message: message.into() }
}

struct Flag {
    name: &'static str,
    takes_value: bool,
    help: &'static str,
}

const fn flag(name: &'static str, help: &'static str) -> Flag {
    Flag { name, takes_value: false, help }
}

const fn value(name: &'static str, help: &'static str) -> Flag {
    Flag { name, takes_value: true, help }
}

const FLAGS: &[Flag] = &[
    value("api-sock", "where the API listens [default: /run/firecracker.socket]"),
    flag("boot-timer", "log when the guest writes 123 to the byte at 0xc0000000"),
    value("config-file", "a machine in JSON, started at once"),
    value("describe-snapshot", "print the format of a snapshot's state file"),
    value("drive-root", "open drives that only a snapshot names below this folder alone"),
    flag("enable-pci", "refused: there is no PCI yet"),
    flag("help", "print this"),
    value("http-api-max-payload-size", "the most bytes of a request's body [default: 51200]"),
    value("id", "the machine's name [default: anonymous-instance]"),
    value("level", "Off, Error, Warn, Info, Debug or Trace [default: Info]"),
    value("log-path", "a file or named pipe for the log [default: standard output]"),
    value("metadata", "JSON for the metadata service"),
    value("metrics-path", "a file or named pipe for metrics"),
    value("mmds-size-limit", "the most bytes of metadata [default: as for a request's body]"),
    value("module", "log only what comes from modules whose names begin so"),
    flag("no-api", "no API socket; needs --config-file"),
    flag("no-seccomp", "no system call filters"),
    value("parent-cpu-time-us", "CPU time of the process that started this one"),
    value("seccomp-filter", "a file of system call filters, in place of pvmm's own"),
    flag("show-level", "the level in each line of the log"),
    flag("show-log-origin", "file and line in each line of the log"),
    flag("snapshot-version", "print the format of snapshots that are written"),
    value("start-time-cpu-us", "CPU time when the process was started"),
    value("start-time-us", "when the process was started"),
    flag("version", "print the version"),
];

pub fn help() -> String {
    let mut text = format!("Firecracker v{VERSION}\n\nOptions:\n");
    for flag in FLAGS {
        let name = if flag.takes_value {
            format!("--{} <{}>", flag.name, flag.name)
        } else {
            format!("--{}", flag.name)
        };
        text.push_str(&format!("  {name:<56} {}\n", flag.help));
    }
    text.push_str("\nThis is pvmm in the place of Firecracker: the same flags and the same API.\n");
    text
}

/// Parses the arguments after the program's name.
pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Command, Wrong> {
    let given = collect(words)?;
    let has = |name: &str| given.iter().any(|(flag, _)| *flag == name);
    let text = |name: &str| {
        given.iter().find(|(flag, _)| *flag == name).and_then(|(_, value)| value.clone())
    };
    if has("help") {
        return Ok(Command::Help);
    }
    if has("version") {
        return Ok(Command::Version);
    }
    if has("snapshot-version") {
        return Ok(Command::SnapshotVersion);
    }
    if let Some(path) = text("describe-snapshot") {
        return Ok(Command::DescribeSnapshot(path.into()));
    }
    check_together(&has)?;
    let number = |name: &str| -> Result<Option<u64>, Wrong> {
        let Some(text) = text(name) else { return Ok(None) };
        let wrong = |_| wrong(format!("The argument '{name}' needs a number, not '{text}'."));
        text.parse().map(Some).map_err(wrong)
    };
    let size = |name: &str| -> Result<Option<usize>, Wrong> {
        number(name)
            .map(|number| number.map(|number| usize::try_from(number).unwrap_or(usize::MAX)))
    };
    let level = |name: String| {
        let message = format!("level: '{name}' is none of Off, Error, Warn, Info, Debug, Trace");
        Level::of(&name).ok_or(Wrong { code: code::BAD_CONFIGURATION, message })
    };
    let path = |name: &str| text(name).map(PathBuf::from);
    let defaults = Args::default();
    let body_max = size("http-api-max-payload-size")?.unwrap_or(BODY_MAX).min(1 << 30);
    Ok(Command::Run(Box::new(Args {
        api_sock: path("api-sock").unwrap_or(defaults.api_sock),
        id: checked_id(text("id").unwrap_or(defaults.id))?,
        config_file: path("config-file"),
        no_api: has("no-api"),
        metadata: path("metadata"),
        log_path: path("log-path"),
        level: text("level").map(level).transpose()?,
        module: text("module"),
        show_level: has("show-level"),
        show_log_origin: has("show-log-origin"),
        metrics_path: path("metrics-path"),
        boot_timer: has("boot-timer"),
        drive_root: path("drive-root"),
        start_time_us: number("start-time-us")?,
        start_time_cpu_us: number("start-time-cpu-us")?,
        parent_cpu_time_us: number("parent-cpu-time-us")?,
        body_max,
        // A network device's metadata service serves at most 1 MiB.
        mmds_max: size("mmds-size-limit")?.unwrap_or(body_max).min(1 << 20),
        seccomp: match path("seccomp-filter") {
            Some(file) => SeccompChoice::File(file),
            None if has("no-seccomp") => SeccompChoice::Off,
            None => SeccompChoice::BuiltIn,
        },
    })))
}

type Given = Vec<(&'static str, Option<String>)>;

fn collect(words: impl IntoIterator<Item = String>) -> Result<Given, Wrong> {
    let mut given: Given = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        // The rest is not for this program.
        if word == "--" {
            break;
        }
        let name = if word == "-h" { "help" } else { word.strip_prefix("--").unwrap_or_default() };
        let Some(flag) = FLAGS.iter().find(|flag| flag.name == name) else {
            let text = "which wasn't expected, or isn't valid in this context.";
            return Err(wrong(format!("Found argument '{word}' {text}")));
        };
        if given.iter().any(|(name, _)| *name == flag.name) {
            return Err(wrong(format!("The argument '{name}' was provided more than once.")));
        }
        let value = flag.takes_value.then(|| words.next().filter(|value| !value.starts_with("--")));
        if value == Some(None) {
            let text = "requires a value, but none was supplied.";
            return Err(wrong(format!("The argument '{name}' {text}")));
        }
        given.push((flag.name, value.flatten()));
    }
    Ok(given)
}

fn check_together(has: &impl Fn(&str) -> bool) -> Result<(), Wrong> {
    if has("no-api") && !has("config-file") {
        return Err(wrong("Argument 'config-file' required, but not found."));
    }
    if has("no-seccomp") && has("seccomp-filter") {
        let text = "cannot be used together with argument 'no-seccomp'.";
        return Err(wrong(format!("Argument 'seccomp-filter' {text}")));
    }
    if has("enable-pci") {
        let message =
            "enable-pci: PCI is not supported yet; devices are virtio-mmio. Leave it out.";
        return Err(Wrong { code: code::GENERIC, message: message.to_owned() });
    }
    Ok(())
}

fn checked_id(id: String) -> Result<String, Wrong> {
    let good = id.chars().all(|c| c == '-' || c.is_alphanumeric()) && (1..=64).contains(&id.len());
    let message = "id: 1 to 64 letters, digits and hyphens are allowed";
    if good { Ok(id) } else { Err(Wrong { code: code::GENERIC, message: message.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, Wrong> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    fn args(line: &str) -> Args {
        match parsed(line) {
            Ok(Command::Run(args)) => *args,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn refused(line: &str) -> u8 {
        parsed(line).unwrap_err().code
    }

    #[test]
    fn flags_of_known_clients_are_taken() {
        assert_eq!(args(""), Args::default());
        let restore = args("--api-sock /tmp/a.socket --log-path /tmp/l --level Info");
        assert_eq!(restore.level, Some(Level::Info));
        assert_eq!(restore.api_sock, PathBuf::from("/tmp/a.socket"));
        let jailed = "--id=x";
        assert_eq!(refused(jailed), code::ARGUMENTS);
        let jailed = "--id vm-1 --start-time-us 1 --start-time-cpu-us 2 --parent-cpu-time-us 3";
        assert_eq!(args(jailed).parent_cpu_time_us, Some(3));
        let all = "--config-file c --no-api --metadata m --module x --show-level --show-log-origin \
                   --metrics-path p --boot-timer --no-seccomp --http-api-max-payload-size 9 -- --odd";
        assert_eq!(args(all).mmds_max, 9);
        assert_eq!(args(all).seccomp, SeccompChoice::Off);
        assert_eq!(args("--mmds-size-limit 7").mmds_max, 7);
        assert_eq!(args("--seccomp-filter f").seccomp, SeccompChoice::File("f".into()));
    }

    #[test]
    fn questions_come_before_everything_else() {
        assert_eq!(parsed("--no-api --version"), Ok(Command::Version));
        assert_eq!(parsed("-h"), Ok(Command::Help));
        assert_eq!(parsed("--snapshot-version"), Ok(Command::SnapshotVersion));
        let describe = parsed("--describe-snapshot /s");
        assert_eq!(describe, Ok(Command::DescribeSnapshot("/s".into())));
    }

    #[test]
    fn wrong_lines_end_with_the_code_of_wrong_arguments() {
        for line in [
            "--nothing",
            "word",
            "--api-sock",
            "--api-sock --id x",
            "--id a --id b",
            "--no-api",
            "--no-seccomp --seccomp-filter f",
            "--start-time-us soon",
        ] {
            assert_eq!(refused(line), code::ARGUMENTS, "{line}");
        }
        assert_eq!(refused("--level loud"), code::BAD_CONFIGURATION);
        assert_eq!(refused("--enable-pci"), code::GENERIC);
    }

    #[test]
    fn i9_id_of_odd_characters_or_length_is_refused() {
        let long = format!("--id {}", "a".repeat(65));
        // Letters of any script are allowed, as in Firecracker: an id becomes no path.
        for line in ["--id a_b", "--id a.b", "--id ../x", "--id a/b", &long] {
            assert_eq!(refused(line), code::GENERIC, "{line}");
        }
        assert!(matches!(parse(["--id".to_owned(), String::new()]), Err(Wrong { code: 1, .. })));
    }

    #[test]
    fn version_names_the_release_that_is_looked_for_and_is_not_it() {
        assert!(VERSION.contains("1.16.0") && VERSION != "1.16.0");
        assert!(help().lines().all(|line| line.len() < 140));
    }
}
