//! Refuses requests that can never work, before anything is created for them.

use pvmm_guest_agent::limits::{MAX_ARGS, MAX_PATH, MAX_TAIL, MIN_MEMORY};
use pvmm_guest_agent::message::{ByteBuf, Command, Exec, Request};

use crate::{interpreter, refresh};

/// Refuses a request that can never work, before anything is created for it.
pub fn check(request: &Request) -> Result<(), &'static str> {
    match request {
        Request::Exec(exec) => check_exec(exec),
        Request::Refresh(request) => {
            refresh::check(request)?;
            check_env(&request.env)?;
            let total = |(name, value): &(ByteBuf, ByteBuf)| name.len() + value.len() + 2;
            let total: usize = request.env.iter().map(total).sum();
            if total > MAX_ARGS / 2 { Err("env is too long") } else { Ok(()) }
        }
        Request::Connect(connect) if connect.port == 0 => Err("port is 0"),
        Request::OpenSession(open) => interpreter::check_open(open).and(check_env(&open.env)),
        Request::RunCode(run) => {
            interpreter::check_name(&run.session).and(interpreter::check_code(&run.code))
        }
        Request::CloseSession(close) => interpreter::check_name(&close.session),
        Request::WriteFile(it) if it.sparse && it.in_place => {
            Err("sparse does not go with in_place")
        }
        Request::Symlink(it) if it.target.is_empty() || it.target.contains(&0) => {
            Err("a link's target is empty or contains NUL")
        }
        Request::SignalProcess(it) if !(1..=libc::SIGRTMAX()).contains(&it.signal) => {
            Err("there is no such signal")
        }
        other => paths(other).into_iter().try_for_each(|path| match path {
            [] => Err("a path is empty"),
            path if path.len() > MAX_PATH => Err("a path is too long"),
            path if path.contains(&0) => Err("a path contains NUL"),
            [b'/', ..] => Ok(()),
            _ => Err("a path is not absolute"),
        }),
    }
}

fn check_exec(exec: &Exec) -> Result<(), &'static str> {
    let words: Vec<&[u8]> = match &exec.command {
        Command::Argv(argv) if argv.is_empty() => return Err("argv is empty"),
        Command::Argv(argv) if argv[0].is_empty() => return Err("argv[0] is empty"),
        Command::Argv(argv) => argv.iter().map(|arg| &arg[..]).collect(),
        Command::Shell(line) => vec![line],
    };
    let names = exec.env.iter().flat_map(|(name, value)| [&name[..], &value[..]]);
    let total: usize = words.iter().copied().chain(names).map(|word| word.len() + 1).sum();
    if total > MAX_ARGS {
        return Err("arguments and environment are too long together");
    }
    if words.iter().any(|word| word.contains(&0)) {
        return Err("an argument contains NUL");
    }
    check_env(&exec.env)?;
    if exec.cwd.as_ref().is_some_and(|cwd| cwd.is_empty() || cwd.contains(&0)) {
        return Err("cwd is empty or contains NUL");
    }
    if let Some(limits) = &exec.limits {
        if limits.memory.is_some_and(|bytes| bytes < MIN_MEMORY) {
            return Err("limits.memory is too little for any program");
        }
        if limits.pids == Some(0) || limits.cpu_milli == Some(0) {
            return Err("a limit of nothing at all lets nothing run");
        }
    }
    if exec.output_limit.is_some_and(|limit| limit.tail > MAX_TAIL) {
        return Err("output_limit.tail is too large");
    }
    Ok(())
}

fn check_env(env: &[(ByteBuf, ByteBuf)]) -> Result<(), &'static str> {
    if env.iter().any(|(name, value)| name.contains(&0) || value.contains(&0)) {
        return Err("an environment entry contains NUL");
    }
    if env.iter().any(|(name, _)| name.is_empty() || name.contains(&b'=')) {
        return Err("an environment name is empty or contains '='");
    }
    Ok(())
}

/// Returns the paths in a request. Every request is listed, so that no path goes unchecked.
fn paths(request: &Request) -> Vec<&[u8]> {
    match request {
        Request::ReadFile(it) => vec![&it.path],
        Request::WriteFile(it) => vec![&it.path],
        Request::Stat(it) => vec![&it.path],
        Request::List(it) => vec![&it.path],
        Request::Remove(it) => vec![&it.path],
        Request::Mkdir(it) => vec![&it.path],
        Request::Move(it) => vec![&it.from, &it.to],
        Request::Symlink(it) => vec![&it.path],
        Request::Watch(it) => vec![&it.path],
        Request::ReadTar(it) => vec![&it.path],
        Request::WriteTar(it) => vec![&it.path],
        Request::Freeze(_) | Request::Refresh(_) | Request::Thaw {} => vec![],
        Request::Processes {} | Request::Attach(_) | Request::Metrics {} => vec![],
        Request::SignalProcess(_) | Request::ForgetProcess(_) => vec![],
        Request::Exec(_)
        | Request::Connect(_)
        | Request::OpenSession(_)
        | Request::RunCode(_)
        | Request::CloseSession(_)
        | Request::ListSessions {}
        | Request::Shutdown(_)
        | Request::Info {}
        | Request::Ping {} => vec![],
    }
}
