//! The last steps of this process once the jail is ready: limits, a new session, exec of the
//! program.

use std::ffi::{CString, OsStr, OsString};
use std::fs::{File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::arguments::Options;
use crate::confine;
use crate::error::JailError;
use crate::sys::{self, Clock, Forked};

/// When the jailer started; passed to the program.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    wall_us: u64,
    cpu_us: u64,
}

impl Started {
    pub fn now() -> Self {
        Self { wall_us: sys::time_us(Clock::Monotonic), cpu_us: sys::time_us(Clock::Process) }
    }
}

/// Sets the resource limits of this process, which the program inherits.
pub fn limit(options: &Options) -> Result<(), JailError> {
    if let Some(bytes) = options.file_size {
        sys::limit(libc::RLIMIT_FSIZE, bytes).map_err(|error| {
            JailError::new(format!("cannot limit files to {bytes} bytes"), error)
        })?;
    }
    let count = options.no_file;
    sys::limit(libc::RLIMIT_NOFILE, count)
        .map_err(|error| JailError::new(format!("cannot limit open files to {count}"), error))
}

/// Opens /dev/null, for the output of a detached program.
pub fn open_nowhere() -> Result<File, JailError> {
    let nowhere = OpenOptions::new().read(true).write(true).open("/dev/null");
    nowhere.map_err(JailError::io("cannot open /dev/null"))
}

/// Executes the program, in this process or in a child. The root must already be the jail.
pub fn become_program(
    options: &Options,
    started: Started,
    nowhere: Option<File>,
) -> Result<(), JailError> {
    let mut cpu_us = sys::time_us(Clock::Process).saturating_sub(started.cpu_us);
    if let Some(nowhere) = nowhere {
        // The first fork is so that the child leads no process group, the second so that it leads
        // no session: then it can never acquire a terminal.
        if let Forked::Parent(_) = fork()? {
            return Ok(());
        }
        sys::new_session().map_err(JailError::io("cannot begin a session"))?;
        cpu_us += sys::time_us(Clock::Process);
        if let Forked::Parent(_) = fork()? {
            sys::end(0);
        }
        cpu_us += sys::time_us(Clock::Process);
        for standard in 0..3 {
            sys::put_in_place(&nowhere, standard)
                .map_err(JailError::io("cannot take input and output away"))?;
        }
    }
    let program = Path::new("/").join(options.exec_name());
    if !options.new_pid_ns {
        write_pid(&program, std::process::id())?;
        return Err(execute(options, &program, started, cpu_us));
    }
    // A session ends with its leader, and this process exits at once.
    let leads = options.daemonize || !sys::leads_session();
    match sys::fork_into(libc::CLONE_NEWPID, None)
        .map_err(JailError::io("cannot make a process namespace"))?
    {
        Forked::Parent(pid) => write_pid(&program, pid),
        Forked::Child => {
            if !leads {
                let _ = sys::new_session();
            }
            let error = execute(options, &program, started, cpu_us);
            eprintln!("pvmm-jailer: {error}");
            sys::end(1)
        }
    }
}

fn fork() -> Result<Forked, JailError> {
    sys::fork().map_err(JailError::io("cannot detach"))
}

/// Writes the pid file, where callers look for the process to watch or end.
fn write_pid(program: &Path, pid: u32) -> Result<(), JailError> {
    let path = PathBuf::from(format!("{}.pid", program.display()));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    let written = options.open(&path).and_then(|mut file| {
        file.set_permissions(Permissions::from_mode(0o644))?;
        write!(file, "{pid}")
    });
    written.map_err(|error| JailError::new(format!("{}: cannot write it", path.display()), error))
}

/// Drops all privileges and executes the program; returns only on failure.
fn execute(options: &Options, program: &Path, started: Started, cpu_us: u64) -> JailError {
    let words = words(options, program, started, cpu_us);
    let run = || -> std::io::Result<()> {
        let words = words.iter().map(|word| CString::new(word.as_bytes()));
        let words = words.collect::<Result<Vec<_>, _>>()?;
        if options.harden {
            confine::isolate()?;
        }
        sys::become_user(options.uid, options.gid)?;
        if options.harden {
            confine::forbid_privileges_and_network()?;
        }
        sys::forget_signals()?;
        Err(sys::execute(&words))
    };
    let hint = "it must be statically linked, for the jail has no libraries";
    let act = format!("{} in the jail: cannot run it ({hint})", program.display());
    match run() {
        Ok(()) => JailError::plain(act),
        Err(error) => JailError::new(act, error),
    }
}

/// Builds the program's command line: what Firecracker's jailer passes, then the caller's
/// arguments.
fn words(options: &Options, program: &Path, started: Started, cpu_us: u64) -> Vec<OsString> {
    let own_cpu_us = sys::time_us(Clock::Process);
    let mut words: Vec<OsString> = vec![program.into()];
    let pairs = [
        ("--id", options.id.clone()),
        ("--start-time-us", started.wall_us.to_string()),
        ("--start-time-cpu-us", own_cpu_us.to_string()),
        ("--parent-cpu-time-us", cpu_us.to_string()),
    ];
    for (name, value) in pairs {
        words.extend([OsStr::new(name).to_owned(), value.into()]);
    }
    words.extend(options.arguments.iter().cloned());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_told_its_name_and_the_times_before_the_callers_words() {
        let line = "--id one --exec-file /proc/self/exe --uid 1 --gid 1 --chroot-base-dir /tmp \
                    -- --api-sock /run/a.sock";
        let words = line.split_whitespace().map(Into::into);
        let Ok(crate::arguments::JailerCommand::Run(options)) = crate::arguments::parse(words)
        else {
            panic!("refused");
        };
        let words = self::words(&options, Path::new("/firecracker"), Started::now(), 5);
        assert_eq!(words[..3], ["/firecracker", "--id", "one"]);
        assert_eq!(words[3], "--start-time-us");
        assert_eq!(words[7..], ["--parent-cpu-time-us", "5", "--api-sock", "/run/a.sock"]);
    }
}
