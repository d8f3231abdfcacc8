//! Starts the process that an exec describes: its user, environment, control group and limits.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::RawFd;

use pvmm_guest_agent::message::{Command, Exec, Limits, Stage};

use crate::agent::Agent;
use crate::cgroup::Cgroup;
use crate::spawn::{Plan, SpawnError};
use crate::stdio::Stdio;
use crate::users::{self, User};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Starts a process in a control group of its own, if there are any. `control` becomes its
/// descriptor 3.
pub fn launch(
    agent: &mut Agent,
    exec: &Exec,
    user: Option<User>,
    stdio: &Stdio,
    control: Option<RawFd>,
) -> Result<(libc::pid_t, Option<Cgroup>), SpawnError> {
    let cgroup = match &mut agent.settings.cgroups {
        Some(cgroups) => Some(cgroups.create().map_err(prepare)?),
        None => None,
    };
    let limited = exec.limits.as_ref().map_or(Ok(()), |it| limit(agent, cgroup.as_ref(), it));
    let spawned = limited
        .and_then(|()| plan(agent, exec, user, stdio, cgroup.as_ref()))
        .and_then(|plan| agent.spawner.spawn(&Plan { control, ..plan }));
    match spawned {
        Ok(pid) => Ok((pid, cgroup)),
        Err(e) => {
            agent.retire(cgroup);
            Err(e)
        }
    }
}

/// Applies limits. An exec that cannot be limited as requested is not started.
fn limit(agent: &mut Agent, cgroup: Option<&Cgroup>, limits: &Limits) -> Result<(), SpawnError> {
    let limited = match (&mut agent.settings.cgroups, cgroup) {
        (Some(cgroups), Some(cgroup)) => {
            cgroups.enable_limits().and_then(|()| cgroup.limit(limits))
        }
        _ => Err(io::Error::from_raw_os_error(libc::ENOTSUP)),
    };
    limited.map_err(|e| {
        let errno = e.raw_os_error().unwrap_or(libc::ENOTSUP);
        SpawnError { stage: Stage::Limits, errno }
    })
}

fn plan(
    agent: &Agent,
    exec: &Exec,
    user: Option<User>,
    stdio: &Stdio,
    cgroup: Option<&Cgroup>,
) -> Result<Plan, SpawnError> {
    let argv: Vec<Vec<u8>> = match &exec.command {
        Command::Argv(argv) => argv.iter().map(|arg| arg.to_vec()).collect(),
        Command::Shell(line) => vec![b"/bin/sh".into(), b"-c".into(), line.to_vec()],
    };
    let env = environment(exec, user.as_ref(), agent);
    let path = env.get(&b"PATH"[..]).map_or(DEFAULT_PATH.as_bytes(), |path| path);
    let programs = candidates(&argv[0], path);
    let entries = env.iter().map(|(name, value)| [name, &b"="[..], value].concat());
    let cwd = exec.cwd.as_ref().map(|cwd| &cwd[..]).or(agent.defaults.cwd.as_deref());
    Ok(Plan {
        programs: c_strings(programs)?,
        argv: c_strings(argv)?,
        env: c_strings(entries)?,
        cwd: c_string(cwd.unwrap_or(b"/").to_vec())?,
        credentials: user_name(agent, exec).and(user).map(|user| user.credentials),
        stdio: stdio.theirs(&agent.null),
        terminal: stdio.terminal.is_some(),
        control: None,
        open_files: agent.settings.open_files,
        cgroup: cgroup.map(Cgroup::fd),
    })
}

pub fn prepare(error: io::Error) -> SpawnError {
    SpawnError { stage: Stage::Prepare, errno: error.raw_os_error().unwrap_or(libc::EIO) }
}

/// Returns the user that the request or else the root filesystem names.
pub fn user_name<'a>(agent: &'a Agent, exec: &'a Exec) -> Option<&'a str> {
    exec.user.as_deref().or(agent.defaults.user.as_deref())
}

pub fn find_user(agent: &Agent, exec: &Exec) -> Result<Option<User>, SpawnError> {
    match user_name(agent, exec) {
        Some(spec) => users::find(spec)
            .map(Some)
            .ok_or(SpawnError { stage: Stage::User, errno: libc::ENOENT }),
        None => Ok(users::find_own()),
    }
}

/// Returns the default environment, overridden by that of the root filesystem, that of the last
/// refresh and then by the request's entries.
fn environment(exec: &Exec, user: Option<&User>, agent: &Agent) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let identity = &agent.identity;
    let mut env: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    if !exec.clear_env {
        let (name, home) = user.map_or(("root", "/"), |user| (&user.name, &user.home));
        let defaults = [
            ("PATH", DEFAULT_PATH),
            ("HOME", home),
            ("USER", name),
            ("TERM", "xterm"),
            ("LANG", "C.UTF-8"),
        ];
        env.extend(defaults.map(|(name, value)| (name.into(), value.into())));
        env.extend(agent.defaults.env.iter().cloned());
        if identity.generation > 0 {
            let generation = identity.generation.to_string();
            env.insert(b"PVMM_GENERATION".into(), generation.into());
        }
        let refreshed = identity.trust_env.iter().chain(&identity.env);
        env.extend(refreshed.map(|(name, value)| (name.to_vec(), value.to_vec())));
    }
    env.extend(exec.env.iter().map(|(name, value)| (name.to_vec(), value.to_vec())));
    env
}

/// Returns the paths where a program may be: itself if it contains a slash, else in each directory
/// of PATH.
fn candidates(program: &[u8], path: &[u8]) -> Vec<Vec<u8>> {
    if program.contains(&b'/') {
        return vec![program.to_vec()];
    }
    let directories = path.split(|byte| *byte == b':');
    let directories = directories.map(|dir| if dir.is_empty() { &b"."[..] } else { dir });
    directories.map(|dir| [dir, &b"/"[..], program].concat()).collect()
}

fn c_strings(words: impl IntoIterator<Item = Vec<u8>>) -> Result<Vec<CString>, SpawnError> {
    words.into_iter().map(c_string).collect()
}

fn c_string(word: Vec<u8>) -> Result<CString, SpawnError> {
    CString::new(word).map_err(|_| SpawnError { stage: Stage::Prepare, errno: libc::EINVAL })
}
