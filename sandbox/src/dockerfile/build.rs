//! Runs the steps of a Dockerfile in a sandbox, and makes a template of the result.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, FileKind, FileWriteOptions};
use pvmm::exec::{ExecRequest, ExecStatus, ProcessEvent};
use pvmm_images::template::TemplateError;
use pvmm_images::{Cache, Import, ImportError, Origin, Recipe, Settings, SourceKind, Template};

use super::context::Context;
use super::copy_in;
use super::kept;
use super::log::{Log, stop_if_interrupted};
use super::parse::{Command, parse};
use super::plan::{self, Act, Plan, Planned};
use crate::failure::Failure;
use crate::guest_agent::{self, Names};
use crate::prepare;
use crate::sandboxes::{CreateOptions, Sandbox, Sandboxes};
use crate::vm_dir::Egress;
use crate::warm::Shape;

/// How long a sandbox may live if nobody ends it, because the builder was killed.
const TTL: Duration = Duration::from_secs(4 * 3600);
/// How long one command may run.
const RUN_TIME: Duration = Duration::from_secs(3600);
/// How often an interrupt is looked for while a command runs.
const LOOK: Duration = Duration::from_millis(100);
/// A longer line of output is shown in pieces.
const MAX_LINE: usize = 4096;
/// Directories of the guest's root that are no part of an image.
const LEFT_OUT: [&str; 5] = ["dev", "proc", "run", "sys", "tmp"];

/// A build.
#[derive(Clone, Debug)]
pub struct BuildOptions<'a> {
    /// The name of the template.
    pub name: &'a str,
    /// The text of the Dockerfile.
    pub dockerfile: &'a str,
    /// The folder that COPY takes files from.
    pub context: Option<&'a Path>,
    /// Values for ARG.
    pub args: Vec<(String, String)>,
    /// The network of RUN; none by default.
    pub egress: Option<Egress>,
}

/// Builds a template from a Dockerfile. `bake` makes the warm template of a shape, in which the
/// steps run. Nothing is left behind if the build fails or is interrupted, except steps that are
/// kept.
pub fn build(
    cache: &Cache,
    sandboxes: &Sandboxes,
    options: &BuildOptions<'_>,
    bake: &mut dyn FnMut(&Shape) -> Result<(), Failure>,
    log: &mut dyn Log,
) -> Result<Template, Failure> {
    let wrong = |error: super::parse::DockerfileError| Failure::usage(error.to_string());
    pvmm_images::template::check_name(options.name).map_err(prepare::refuse)?;
    if options.name == pvmm_images::template::BASE {
        return Err(prepare::refuse(TemplateError::BaseImport));
    }
    let file = parse(options.dockerfile).map_err(wrong)?;
    let image = plan::image(&file, &options.args).map_err(wrong)?;
    let context = options.context.map(Context::open).transpose()?;
    let template = begin_with(cache, &image, file.from.line, log)?;
    let digest = &template.manifest.digest;
    let net = options.egress.is_some();
    let plan = plan::plan(&file, context.as_ref(), digest, net, &options.args)?;
    let create = CreateOptions {
        ttl: Some(TTL),
        egress: options.egress.clone(),
        ..CreateOptions::of(template.name())
    };
    let key = plan.key()?;
    let mut build = Build { cache, sandboxes, create, plan, log };
    if let Ok(template) = Template::find(cache, options.name)
        && template
            .manifest
            .source
            .as_ref()
            .is_some_and(|made| made.build_key.as_ref() == Some(&key))
    {
        build.say_kept(build.plan.steps.len());
        return Ok(template);
    }
    let (room, done) = build.room(bake)?;
    build.steps(&room, done)?;
    build.finish(&room, options.name, key)
}

/// Returns the template that FROM names. One of pvmm's own is built if it is missing.
fn begin_with(
    cache: &Cache,
    image: &str,
    line: usize,
    log: &mut dyn Log,
) -> Result<Template, Failure> {
    if let Ok(template) = Template::find(cache, image) {
        return Ok(template);
    }
    let alias = plan::alias(image);
    if let Some(name) = alias {
        log.line(&format!("FROM {image}: the template '{name}' is used"));
    }
    if let Some(recipe) = Recipe::built_in(alias.unwrap_or(image)) {
        return Template::ensure(cache, &recipe, log).map_err(prepare::refuse);
    }
    let mut names: Vec<String> = Recipe::built_in_names().map(str::to_owned).collect();
    let built = Template::list(cache).map_err(prepare::refuse)?;
    names.extend(built.into_iter().map(|template| template.manifest.name));
    names.sort();
    names.dedup();
    let message = format!("line {line} of the Dockerfile: there is no template {image:?}");
    let hint = format!(
        "there are: {}; debian, ubuntu and python stand for base; images are not downloaded",
        names.join(", ")
    );
    Err(Failure::usage(message).hint(hint))
}

struct Build<'a> {
    cache: &'a Cache,
    sandboxes: &'a Sandboxes,
    create: CreateOptions,
    plan: Plan,
    log: &'a mut dyn Log,
}

/// The sandbox of a build, which is ended with it.
struct Room(Sandbox);

impl Drop for Room {
    fn drop(&mut self) {
        if let Err(failure) = self.0.end() {
            ::log::warn!("the sandbox of a build stays: {}", failure.message);
        }
    }
}

impl Build<'_> {
    /// Makes the sandbox, from the last step that is kept. Returns the number of steps that need
    /// not be done.
    fn room(
        &mut self,
        bake: &mut dyn FnMut(&Shape) -> Result<(), Failure>,
    ) -> Result<(Room, usize), Failure> {
        for number in (0..self.plan.steps.len()).rev() {
            let Planned { key, act, .. } = &self.plan.steps[number];
            let Some(folder) = act.as_ref().and_then(|_| kept::find(self.cache, key)) else {
                continue;
            };
            match self.sandboxes.restore(&folder, &self.create) {
                Ok(sandbox) => {
                    let room = Room(sandbox);
                    self.say_kept(number + 1);
                    return Ok((room, number + 1));
                }
                Err(failure) => {
                    ::log::info!("a kept step cannot be used: {}", failure.message);
                    let _ = std::fs::remove_dir_all(folder);
                }
            }
        }
        let shape = self.create.shape();
        if !self.sandboxes.is_warm(&shape) {
            self.log.step("Baking a warm template");
            bake(&shape)?;
            self.log.done();
        }
        self.stop_if_interrupted()?;
        Ok((Room(self.sandboxes.create(&self.create)?), 0))
    }

    /// Returns the line that announces a step.
    fn heading(&self, number: usize) -> String {
        let steps = &self.plan.steps;
        format!("Step {}/{}: {}", number + 1, steps.len(), steps[number].text)
    }

    /// Says that the first steps need not be done.
    fn say_kept(&mut self, steps: usize) {
        for number in 0..steps {
            let heading = self.heading(number);
            self.log.line(&format!("{heading} (kept)"));
        }
    }

    fn steps(&mut self, room: &Room, done: usize) -> Result<(), Failure> {
        let needed: Vec<String> = self.plan.steps.iter().map(|step| step.key.clone()).collect();
        for number in done..self.plan.steps.len() {
            self.stop_if_interrupted()?;
            let heading = self.heading(number);
            self.log.step(&heading);
            let Planned { act, line, key, .. } = &self.plan.steps[number];
            let Some(act) = act else { continue };
            let agent = room.0.agent()?;
            let acted = match act {
                Act::Run { command, env, workdir, user } => {
                    let workdir = workdir.as_deref().unwrap_or("/");
                    run(&agent, command, env, workdir, user.as_deref(), self.log)
                }
                Act::Copy { found, target, is_folder, copy } => {
                    copy_in::put(&agent, found, target, *is_folder, copy, self.log)
                }
                Act::MakeDirectory(path) => {
                    agent.mkdir(path, None, true).map_err(guest_agent::refuse)
                }
            };
            // A snapshot is taken without open connections.
            drop(agent);
            acted.map_err(|failure| {
                let message = format!("line {line} of the Dockerfile: {}", failure.message);
                Failure { message, ..failure }
            })?;
            if !matches!(act, Act::MakeDirectory(_)) {
                self.keep(room, key, &needed);
            }
            self.log.done();
        }
        Ok(())
    }

    /// Keeps the state after a step. The build goes on without it if that fails.
    fn keep(&self, room: &Room, key: &str, needed: &[String]) {
        let place = kept::place(self.cache, key);
        let kept = kept::prepare(self.cache)
            .map_err(Failure::from)
            .and_then(|()| room.0.snapshot(&place).map(drop));
        if let Err(failure) = kept {
            ::log::warn!("a step of the build is not kept: {}", failure.message);
        }
        kept::prune(self.cache, needed);
    }

    fn finish(self, room: &Room, name: &str, key: String) -> Result<Template, Failure> {
        let agent = room.0.agent()?;
        let defaults = self.plan.settings.defaults();
        if !defaults.is_empty() {
            let options = FileWriteOptions { parents: true, ..FileWriteOptions::default() };
            agent.write_file(Settings::FILE, &defaults, &options).map_err(guest_agent::refuse)?;
        }
        let origin = Origin {
            kind: SourceKind::Dockerfile,
            build_key: Some(key),
            settings: Some(self.plan.settings),
        };
        let fill = |import: &mut Import<'_>| read_out(&agent, import);
        Template::import(self.cache, name, origin, self.log, fill).map_err(prepare::refuse)
    }

    fn stop_if_interrupted(&mut self) -> Result<(), Failure> {
        stop_if_interrupted(self.log)
    }
}

/// Runs a command and passes its output on as lines.
fn run(
    agent: &Agent,
    command: &Command,
    env: &[(String, String)],
    workdir: &str,
    user: Option<&str>,
    log: &mut dyn Log,
) -> Result<(), Failure> {
    let mut request = match command {
        Command::Shell(line) => ExecRequest::shell(line),
        Command::Exec(words) => ExecRequest::argv(words),
    };
    request = request.cwd(workdir).timeout(RUN_TIME);
    for (name, value) in env {
        request = request.env(name, value);
    }
    if let Some(user) = user {
        request = request.user(user);
    }
    let mut process = agent.start(&request).map_err(guest_agent::refuse_exec)?;
    let (mut out, mut err) = (Lines::default(), Lines::default());
    let status = loop {
        stop_if_interrupted(log)?;
        let event = process.next_event(Some(Instant::now() + LOOK));
        match event.map_err(guest_agent::refuse_exec)? {
            Some(ProcessEvent::Stdout(bytes)) => out.push(&bytes, log),
            Some(ProcessEvent::Stderr(bytes)) => err.push(&bytes, log),
            Some(ProcessEvent::Exited(status)) => break status,
            None => (),
        }
    };
    out.end(log);
    err.end(log);
    if status.success() {
        return Ok(());
    }
    let message = match status.status {
        ExecStatus::CouldNotStart { .. } => {
            let program = command.argv().first().cloned().unwrap_or_default();
            let user = user.unwrap_or_default().to_owned();
            let names = Names { program, user, workdir: workdir.to_owned() };
            guest_agent::could_not_start(&status, &names).message
        }
        _ if status.timed_out => format!("the command took longer than {} s", RUN_TIME.as_secs()),
        _ if status.oom => "the command ran out of memory".to_owned(),
        ExecStatus::Signaled { signal, .. } => format!("the command was ended by signal {signal}"),
        _ => format!("the command failed with exit code {}", status.shell_code()),
    };
    Err(Failure::usage(message))
}

/// Cuts output into lines.
#[derive(Default)]
struct Lines {
    open: Vec<u8>,
}

impl Lines {
    fn push(&mut self, bytes: &[u8], log: &mut dyn Log) {
        for byte in bytes {
            match byte {
                b'\n' | b'\r' => self.end(log),
                byte => self.open.push(*byte),
            }
            if self.open.len() >= MAX_LINE {
                self.end(log);
            }
        }
    }

    fn end(&mut self, log: &mut dyn Log) {
        let line = String::from_utf8_lossy(&self.open);
        let plain: String = line.chars().filter(|char| !char.is_control()).collect();
        if !plain.is_empty() {
            log.line(&plain);
        }
        self.open.clear();
    }
}

/// Takes the guest's root in, without the directories that are mounted there.
fn read_out(agent: &Agent, import: &mut Import<'_>) -> Result<(), ImportError> {
    let lost = |error| ImportError::Read { source: io::Error::other(error) };
    for entry in agent.list("/").map_err(lost)? {
        let name = PathBuf::from(std::ffi::OsStr::from_bytes(&entry.name));
        let (path, facts) = (Path::new("/").join(&name), &entry.metadata);
        match facts.kind {
            _ if LEFT_OUT.iter().any(|left_out| name == Path::new(left_out)) => (),
            FileKind::Directory => {
                import.tar(&name, agent.open_read_tar(path).map_err(lost)?)?;
            }
            FileKind::Symlink => {
                let target = facts.target.as_ref().map_or(&[][..], |target| &target[..]);
                import.link(&name, Path::new(std::ffi::OsStr::from_bytes(target)))?;
            }
            FileKind::File => {
                let mut reader = agent.open_read(path, None).map_err(lost)?;
                import.file(&name, facts.mode & 0o7777, &mut reader)?;
            }
            _ => (),
        }
    }
    // Each VM gets its own.
    for (name, mode) in [("etc/machine-id", 0o444), ("etc/resolv.conf", 0o644)] {
        import.file(Path::new(name), mode, &mut io::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use pvmm_images::Progress;

    use super::*;

    #[derive(Default)]
    struct Said(Vec<String>);

    impl Progress for Said {
        fn event(&mut self, _: pvmm_images::Event<'_>) {}
    }

    impl Log for Said {
        fn line(&mut self, text: &str) {
            self.0.push(text.to_owned());
        }
    }

    #[test]
    fn output_becomes_lines_without_control_characters() {
        let (mut said, mut lines) = (Said::default(), Lines::default());
        lines.push(b"one\ntw", &mut said);
        lines.push(b"o\x1b[1m\r\n10%\r20%", &mut said);
        lines.end(&mut said);
        assert_eq!(said.0, ["one", "two[1m", "10%", "20%"]);
        lines.push(&[b'x'; MAX_LINE + 1], &mut said);
        assert_eq!(said.0.len(), 5);
    }
}
