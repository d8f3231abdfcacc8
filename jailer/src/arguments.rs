//! The command line, validated before anything is created, so that names that become paths cannot
//! lead elsewhere.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::error::JailError;

pub const HELP: &str = "\
Puts a monitor into a jail of its own and becomes it.

Usage: pvmm-jailer --id ID --exec-file FILE --uid UID --gid GID [OPTIONS] [-- ARGUMENTS]

  --id ID                     name of the jail: 1 to 64 letters, digits and hyphens
  --exec-file FILE            program to run, statically linked: the jail is empty otherwise
  --uid UID, --gid GID        who runs it, as numbers; 0 is taken, and said aloud
  --chroot-base-dir DIR       where jails are made, as DIR/<name of FILE>/ID/root [default: /srv/jailer]
  --netns PATH                network namespace to join
  --cgroup FILE=VALUE         value of a control group's file, such as cpu.max=50000; any number of times
  --cgroup-version 1|2        which control groups [default: 1]
  --parent-cgroup PATH        where the jail's own control group is made [default: name of FILE]
  --resource-limit NAME=N     fsize (bytes of a file) or no-file (open files) [default: no-file=2048]
  --daemonize                 detach: a session of its own, no input or output
  --new-pid-ns                run in a process namespace of its own
  --harden                    not in Firecracker's jailer: ipc, uts and cgroup namespaces too, no
                              capability in any set, no new privileges, no TCP, no core file
  --version                   print the version
  --help                      print this

ARGUMENTS go to the program, after --id and the times that it is told.
";

/// The default limit of open files of a jailed program.
const NO_FILE: u64 = 2048;

/// The operation that a command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum JailerCommand {
    Help,
    Version,
    Run(Box<Options>),
}

/// The settings of a jail.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    pub id: String,
    /// The program's path, with symbolic links resolved.
    pub exec_file: PathBuf,
    pub uid: u32,
    pub gid: u32,
    /// Whether uid and gid may be 0, with which the program keeps much of what a jail should take
    /// away. True for a command line, because Firecracker's jailer accepts them and callers rely on
    /// that.
    pub allows_root: bool,
    /// An existing folder, with symbolic links resolved.
    pub chroot_base: PathBuf,
    pub netns: Option<PathBuf>,
    /// Files of a control group, and the values to write there.
    pub cgroups: Vec<(String, String)>,
    pub cgroup_version: u8,
    /// A relative path without `..`.
    pub parent_cgroup: PathBuf,
    pub file_size: Option<u64>,
    pub no_file: u64,
    pub daemonize: bool,
    pub new_pid_ns: bool,
    pub harden: bool,
    /// Arguments for the program.
    pub arguments: Vec<OsString>,
}

impl Options {
    /// Returns the program's file name, which is also used in folder names.
    pub fn exec_name(&self) -> &OsStr {
        self.exec_file.file_name().unwrap_or_default()
    }

    /// Returns a warning if the program keeps root's user or group, or an error if that is not
    /// allowed.
    pub(crate) fn as_root(&self) -> Result<Option<&'static str>, JailError> {
        let line = match (self.uid, self.gid) {
            (0, _) => "--uid 0: the program keeps root's rights; give it a user of its own",
            (_, 0) => "--gid 0: the program keeps root's group; give it a group of its own",
            _ => return Ok(None),
        };
        if self.allows_root { Ok(Some(line)) } else { Err(JailError::plain(line)) }
    }
}

/// Parses a command line, without the name of this program.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<JailerCommand, JailError> {
    let mut words = words.into_iter();
    let mut given = Given::default();
    while let Some(word) = words.next() {
        let Some(word) = word.to_str() else { return Err(unknown(&word)) };
        let (name, joined) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word, None),
        };
        match name {
            "--" if joined.is_none() => {
                given.arguments = words.collect();
                break;
            }
            "--help" | "-h" => return Ok(JailerCommand::Help),
            "--version" | "-V" => return Ok(JailerCommand::Version),
            "--daemonize" if joined.is_none() => once(&mut given.daemonize, name)?,
            "--new-pid-ns" if joined.is_none() => once(&mut given.new_pid_ns, name)?,
            "--harden" if joined.is_none() => once(&mut given.harden, name)?,
            _ => {
                let place = given.place(name).ok_or_else(|| unknown(word.as_ref()))?;
                let next = || words.next().and_then(|word| word.into_string().ok());
                let value = joined.or_else(next);
                let missing = || JailError::plain(format!("{name} needs a value; see --help"));
                let many = matches!(name, "--cgroup" | "--resource-limit");
                if !many && !place.is_empty() {
                    return Err(JailError::plain(format!("{name} is given twice")));
                }
                place.push(value.filter(|value| !value.is_empty()).ok_or_else(missing)?);
            }
        }
    }
    given.check().map(|options| JailerCommand::Run(Box::new(options)))
}

/// The values as they were given.
#[derive(Default)]
struct Given {
    id: Vec<String>,
    exec_file: Vec<String>,
    uid: Vec<String>,
    gid: Vec<String>,
    chroot_base: Vec<String>,
    netns: Vec<String>,
    cgroups: Vec<String>,
    cgroup_version: Vec<String>,
    parent_cgroup: Vec<String>,
    limits: Vec<String>,
    daemonize: bool,
    new_pid_ns: bool,
    harden: bool,
    arguments: Vec<OsString>,
}

impl Given {
    fn place(&mut self, name: &str) -> Option<&mut Vec<String>> {
        Some(match name {
            "--id" => &mut self.id,
            "--exec-file" => &mut self.exec_file,
            "--uid" => &mut self.uid,
            "--gid" => &mut self.gid,
            "--chroot-base-dir" => &mut self.chroot_base,
            "--netns" => &mut self.netns,
            "--cgroup" => &mut self.cgroups,
            "--cgroup-version" => &mut self.cgroup_version,
            "--parent-cgroup" => &mut self.parent_cgroup,
            "--resource-limit" => &mut self.limits,
            _ => return None,
        })
    }

    fn check(self) -> Result<Options, JailError> {
        let id = required(&self.id, "--id")?;
        check_id(id)?;
        let exec_file = check_program(required(&self.exec_file, "--exec-file")?)?;
        let exec_name = exec_file.file_name().unwrap_or_default().to_owned();
        let base = self.chroot_base.first().map_or("/srv/jailer", String::as_str);
        let chroot_base = fs::canonicalize(base)
            .map_err(|error| JailError::new(format!("--chroot-base-dir {base}"), error))?;
        if !chroot_base.is_dir() {
            return Err(JailError::plain(format!("--chroot-base-dir {base}: is not a folder")));
        }
        let cgroup_version = match self.cgroup_version.first().map(String::as_str) {
            None | Some("1") => 1,
            Some("2") => 2,
            Some(other) => {
                return Err(JailError::plain(format!("--cgroup-version {other}: is not 1 or 2")));
            }
        };
        let parent_cgroup = match self.parent_cgroup.first() {
            Some(path) => check_inner(path, "--parent-cgroup")?,
            None => PathBuf::from(&exec_name),
        };
        let cgroups = self.cgroups.iter().map(|one| check_cgroup(one)).collect::<Result<_, _>>()?;
        let (mut file_size, mut no_file) = (None, NO_FILE);
        for limit in &self.limits {
            let bad = || {
                let what = format!("--resource-limit {limit}: write fsize=BYTES or no-file=COUNT");
                JailError::plain(what)
            };
            let (name, value) = limit.split_once('=').ok_or_else(bad)?;
            let value = value.parse().map_err(|_| bad())?;
            match name {
                "fsize" => file_size = Some(value),
                "no-file" => no_file = value,
                _ => return Err(bad()),
            }
        }
        Ok(Options {
            id: id.to_owned(),
            exec_file,
            uid: number(required(&self.uid, "--uid")?, "--uid")?,
            gid: number(required(&self.gid, "--gid")?, "--gid")?,
            allows_root: true,
            chroot_base,
            netns: self.netns.first().map(PathBuf::from),
            cgroups,
            cgroup_version,
            parent_cgroup,
            file_size,
            no_file,
            daemonize: self.daemonize,
            new_pid_ns: self.new_pid_ns,
            harden: self.harden,
            arguments: self.arguments,
        })
    }
}

fn once(flag: &mut bool, name: &str) -> Result<(), JailError> {
    if std::mem::replace(flag, true) {
        Err(JailError::plain(format!("{name} is given twice")))
    } else {
        Ok(())
    }
}

fn required<'a>(values: &'a [String], name: &str) -> Result<&'a str, JailError> {
    let missing = || JailError::plain(format!("{name} is missing; see --help"));
    values.first().map(String::as_str).ok_or_else(missing)
}

fn unknown(word: &OsStr) -> JailError {
    JailError::plain(format!("{}: no such option; see --help", word.display()))
}

fn number(text: &str, name: &str) -> Result<u32, JailError> {
    let bad = |_| JailError::plain(format!("{name} {text}: is not a number of a user or group"));
    // The kernel takes all ones as "unchanged", which would leave the program with this process's
    // privileges.
    match text.parse::<u32>().map_err(bad)? {
        u32::MAX => Err(JailError::plain(format!("{name} {text}: nobody has that number"))),
        number => Ok(number),
    }
}

/// Validates the id, which becomes a folder's name.
fn check_id(id: &str) -> Result<(), JailError> {
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if (1..=64).contains(&id.len()) && id.bytes().all(sane) {
        Ok(())
    } else {
        Err(JailError::plain("--id: use 1 to 64 letters, digits and hyphens"))
    }
}

fn check_program(path: &str) -> Result<PathBuf, JailError> {
    let found = fs::canonicalize(path)
        .map_err(|error| JailError::new(format!("--exec-file {path}"), error))?;
    if found.is_file() && found.file_name().is_some_and(|name| name.to_str().is_some()) {
        Ok(found)
    } else {
        Err(JailError::plain(format!("--exec-file {path}: is not a file")))
    }
}

/// Validates a relative path that does not leave its base.
fn check_inner(path: &str, name: &str) -> Result<PathBuf, JailError> {
    let path = Path::new(path);
    let inner = path.components().all(|part| matches!(part, Component::Normal(_)));
    // `components` skips a dot in the middle, which is harmless, and reports one at the start.
    if inner && path.components().next().is_some() {
        Ok(path.to_owned())
    } else {
        let path = path.display();
        let what = format!("{name} {path}: write a relative path without . and ..");
        Err(JailError::plain(what))
    }
}

fn check_cgroup(text: &str) -> Result<(String, String), JailError> {
    let bad = || {
        let what = format!("--cgroup {text}: write the file and its value, such as cpu.weight=50");
        JailError::plain(what)
    };
    let (file, value) = text.split_once('=').ok_or_else(bad)?;
    let (controller, _) = file.split_once('.').ok_or_else(bad)?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let sane = !controller.is_empty() && file.bytes().all(plain) && !file.contains("..");
    if sane && !value.is_empty() && !value.contains(['=', '\n', '\0']) {
        Ok((file.to_owned(), value.to_owned()))
    } else {
        Err(bad())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = "/proc/self/exe";

    fn parse(line: &str) -> Result<JailerCommand, JailError> {
        super::parse(line.split_whitespace().map(OsString::from))
    }

    fn least() -> String {
        format!("--id a-1 --exec-file {PROGRAM} --uid 123 --gid=100 --chroot-base-dir /tmp")
    }

    fn options(more: &str) -> Options {
        match parse(&format!("{} {more}", least())).unwrap() {
            JailerCommand::Run(options) => *options,
            other => panic!("{other:?}"),
        }
    }

    fn refused(line: &str) -> String {
        parse(line).unwrap_err().to_string()
    }

    #[test]
    fn least_command_line_has_the_defaults_of_the_original() {
        let options = options("");
        assert_eq!((options.id.as_str(), options.uid, options.gid), ("a-1", 123, 100));
        assert_eq!((options.cgroup_version, options.no_file, options.file_size), (1, 2048, None));
        assert_eq!(options.parent_cgroup.as_os_str(), options.exec_name());
        assert!(!options.daemonize && !options.new_pid_ns && options.arguments.is_empty());
        assert_eq!(parse("--id x --version").unwrap(), JailerCommand::Version);
        assert_eq!(parse("--help").unwrap(), JailerCommand::Help);
    }

    #[test]
    fn every_option_is_taken_and_the_rest_is_the_programs() {
        let options = options(
            "--netns /run/n --cgroup cpu.max=5 --cgroup memory.max=1G --cgroup-version 2 \
             --parent-cgroup all/mine --resource-limit fsize=7 --resource-limit no-file=99 \
             --daemonize --new-pid-ns -- --api-sock /a.sock --id other",
        );
        assert_eq!(options.netns.as_deref(), Some(Path::new("/run/n")));
        assert_eq!(options.cgroups[1], ("memory.max".into(), "1G".into()));
        assert_eq!(options.parent_cgroup, Path::new("all/mine"));
        assert_eq!((options.file_size, options.no_file), (Some(7), 99));
        assert!(options.daemonize && options.new_pid_ns);
        assert_eq!(options.arguments, ["--api-sock", "/a.sock", "--id", "other"]);
    }

    #[test]
    fn k4_root_is_taken_from_a_command_line_only_and_said() {
        let with = |uid: u32, gid: u32, allows_root: bool| {
            let options = Options { uid, gid, allows_root, ..options("") };
            options.as_root().map_err(|error| error.to_string())
        };
        assert_eq!(with(1, 1, false), Ok(None));
        assert!(with(0, 1, true).unwrap().unwrap().starts_with("--uid 0"));
        assert!(with(1, 0, true).unwrap().unwrap().starts_with("--gid 0"));
        assert!(with(0, 0, false).is_err() && with(1, 0, false).is_err());
        let line = least().replace("--uid 123", "--uid 0");
        assert!(matches!(parse(&line), Ok(JailerCommand::Run(options)) if options.allows_root));
    }

    #[test]
    fn k7_names_that_would_lead_elsewhere_are_refused() {
        for id in ["..", "a/b", ".", "a_b", "a b", &"x".repeat(65), "é"] {
            let words = ["--id", id].map(OsString::from);
            let rest = least().replace("--id a-1", "");
            let rest = rest.split_whitespace().map(OsString::from);
            let error = super::parse(words.into_iter().chain(rest)).unwrap_err();
            assert!(error.to_string().starts_with("--id"), "{id}: {error}");
        }
        for parent in ["/abs", "../up", "a/../b", ".."] {
            let error = refused(&format!("{} --parent-cgroup {parent}", least()));
            assert!(error.contains("relative path"), "{error}");
        }
        for cgroup in
            ["cpu", "cpu.max", "cpu.max=", "../x.y=1", "a/b.c=1", ".x=1", "a..b=1", "a.b=1=2"]
        {
            let error = refused(&format!("{} --cgroup {cgroup}", least()));
            assert!(error.starts_with("--cgroup"), "{cgroup}: {error}");
        }
    }

    #[test]
    fn mistakes_are_told_by_the_name_of_their_option() {
        for (line, told) in [
            ("--exec-file /proc/self/exe --uid 1 --gid 1", "--id is missing"),
            ("--id a --uid 1 --gid 1", "--exec-file is missing"),
            ("--id a --exec-file /no/such --uid 1 --gid 1", "--exec-file /no/such"),
            ("--id a --exec-file /proc --uid 1 --gid 1", "is not a file"),
            ("--id a --exec-file /proc/self/exe --uid x --gid 1 --chroot-base-dir /tmp", "--uid x"),
            (
                "--id a --exec-file /proc/self/exe --uid 4294967295 --gid 1 --chroot-base-dir /tmp",
                "--uid 4294967295",
            ),
            ("--id a --id b", "--id is given twice"),
            ("--id", "--id needs a value"),
            ("--id=", "--id needs a value"),
            ("--daemonize --daemonize", "--daemonize is given twice"),
            ("--jail", "--jail: no such option"),
            ("word", "word: no such option"),
        ] {
            assert!(refused(line).contains(told), "{line}: {}", refused(line));
        }
        for more in ["--resource-limit x=1", "--resource-limit fsize", "--cgroup-version 3"] {
            assert!(refused(&format!("{} {more}", least())).contains(more), "{more}");
        }
        let nowhere = least().replace("/tmp", "/no/such");
        assert!(refused(&nowhere).contains("--chroot-base-dir /no/such"));
    }
}
