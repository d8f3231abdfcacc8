//! Turns a Dockerfile into acts in a guest, each with a key of all that its result depends on.
//!
//! Variables are put in, files of the context are found and settings are collected here, so that a
//! build that cannot work fails before its sandbox is made.

use std::io;
use std::path::{Component, Path, PathBuf};

use pvmm_agent_image::AGENT_KEY;
use pvmm_images::{Settings, cache};

use super::context::{self, Context, Found};
use super::parse::{Command, Copy, Dockerfile, DockerfileError, Instruction, Step};
use super::words;
use crate::failure::Failure;

/// Increased when the acts themselves change.
const VERSION: &str = "1";
/// Images whose names mean `base`, which is a Debian with Python.
const ALIASES: [&str; 3] = ["debian", "ubuntu", "python"];

/// The steps of a build.
#[derive(Debug)]
pub struct Plan {
    pub steps: Vec<Planned>,
    pub settings: Settings,
    /// The key of the guest's state after the last step.
    last_key: String,
}

impl Plan {
    /// Returns the key of all that the template depends on.
    pub fn key(&self) -> Result<String, Failure> {
        let settings = serde_json::to_vec(&self.settings).map_err(io::Error::from)?;
        Ok(cache::key([self.last_key.as_bytes(), &settings]))
    }
}

#[derive(Debug)]
pub struct Planned {
    /// The instruction, for people.
    pub text: String,
    pub line: usize,
    pub act: Option<Act>,
    /// The key of the guest's state after the step.
    pub key: String,
}

/// A change of the guest.
#[derive(Debug)]
pub enum Act {
    Run {
        command: Command,
        env: Vec<(String, String)>,
        workdir: Option<String>,
        user: Option<String>,
    },
    Copy {
        found: Vec<Found>,
        target: PathBuf,
        /// Whether the target is a folder by the way it is written.
        is_folder: bool,
        copy: Copy,
    },
    MakeDirectory(String),
}

/// Returns the name of the image in FROM, with the arguments before it put in.
pub fn image(file: &Dockerfile, given: &[(String, String)]) -> Result<String, DockerfileError> {
    let mut vars = Vars { given: given.to_vec(), ..Vars::default() };
    for step in &file.args {
        if let Instruction::Arg(text) = &step.instruction {
            vars.declare(text).map_err(|why| DockerfileError { line: step.line, why })?;
        }
    }
    let Instruction::From(name) = &file.from.instruction else { return Ok(String::new()) };
    vars.expand(name).map_err(|why| DockerfileError { line: file.from.line, why })
}

/// Returns the template that an image's name stands for, if it is not a template's own name.
pub fn alias(image: &str) -> Option<&'static str> {
    let name = image.split([':', '@']).next().unwrap_or(image);
    ALIASES.contains(&name).then_some(pvmm_images::template::BASE)
}

/// Plans the steps after FROM. `digest` is that of the template that the build begins with.
pub fn plan(
    file: &Dockerfile,
    context: Option<&Context>,
    digest: &str,
    net: bool,
    given: &[(String, String)],
) -> Result<Plan, Failure> {
    let version = env!("CARGO_PKG_VERSION");
    let net = if net { "net" } else { "" };
    let first = [VERSION, version, AGENT_KEY, digest, net];
    let mut state = State {
        vars: Vars { given: given.to_vec(), ..Vars::default() },
        settings: Settings::default(),
        key: cache::key(first.iter().map(|part| part.as_bytes())),
    };
    let mut steps = Vec::new();
    for step in &file.steps {
        let act = state.act(step, context).map_err(|failure| {
            let message = format!("line {} of the Dockerfile: {}", step.line, failure.message);
            Failure { message, ..failure }
        })?;
        if let Some(act) = &act {
            state.key = next_key(&state.key, act)?;
        }
        let (text, key) = (step.text.clone(), state.key.clone());
        steps.push(Planned { text, line: step.line, act, key });
    }
    state.settings.env = state.vars.env;
    Ok(Plan { steps, settings: state.settings, last_key: state.key })
}

struct State {
    vars: Vars,
    settings: Settings,
    key: String,
}

impl State {
    fn act(&mut self, step: &Step, context: Option<&Context>) -> Result<Option<Act>, Failure> {
        let vars = &mut self.vars;
        let settings = &mut self.settings;
        match &step.instruction {
            Instruction::Run(command) => {
                return Ok(Some(Act::Run {
                    command: command.clone(),
                    env: vars.all(),
                    workdir: settings.workdir.clone(),
                    user: settings.user.clone(),
                }));
            }
            Instruction::Copy(copy) => return self.copy(copy, context).map(Some),
            Instruction::Workdir(text) => {
                let path = vars.expand(text).map_err(Failure::usage)?;
                let path = absolute(settings.workdir.as_deref(), &path).display().to_string();
                settings.workdir = Some(path.clone());
                return Ok(Some(Act::MakeDirectory(path)));
            }
            Instruction::Env(text) => {
                for (name, value) in vars.pairs(text).map_err(Failure::usage)? {
                    set(&mut vars.env, name, value);
                }
            }
            Instruction::Arg(text) => vars.declare(text).map_err(Failure::usage)?,
            Instruction::User(text) => {
                settings.user = Some(vars.expand(text).map_err(Failure::usage)?);
            }
            Instruction::Cmd(command) => settings.cmd = Some(command.argv()),
            Instruction::Entrypoint(command) => settings.entrypoint = Some(command.argv()),
            Instruction::Expose(text) => {
                settings.ports.extend(vars.split(text).map_err(Failure::usage)?);
            }
            Instruction::Label(text) => {
                for (name, value) in vars.pairs(text).map_err(Failure::usage)? {
                    set(&mut settings.labels, name, value);
                }
            }
            Instruction::From(_) | Instruction::Ignored => (),
        }
        Ok(None)
    }

    fn copy(&self, copy: &Copy, context: Option<&Context>) -> Result<Act, Failure> {
        let context = context.ok_or_else(|| {
            Failure::usage("there is no context to copy from").hint("name a folder with --context")
        })?;
        let mut found = Vec::new();
        for source in &copy.sources {
            let source = self.vars.expand(source).map_err(Failure::usage)?;
            if source.contains("://") || source.starts_with("git@") {
                let message = format!("ADD {source}: only files of the context can be added");
                return Err(Failure::usage(message).hint("fetch it with RUN and --allow-host"));
            }
            found.extend(context.find(&source)?);
        }
        let written = self.vars.expand(&copy.target).map_err(Failure::usage)?;
        let target = absolute(self.settings.workdir.as_deref(), &written);
        let is_folder =
            written == "." || written.ends_with('/') || written.ends_with("/.") || found.len() > 1;
        let owner = copy.owner.as_ref().map(|owner| self.vars.expand(owner)).transpose();
        let copy = Copy { owner: owner.map_err(Failure::usage)?, ..copy.clone() };
        Ok(Act::Copy { found, target, is_folder, copy })
    }
}

/// Returns the key of the state after an act.
fn next_key(parent: &str, act: &Act) -> Result<String, Failure> {
    let mut parts = vec![parent.to_owned()];
    match act {
        Act::Run { command, env, workdir, user } => {
            parts.push("run".to_owned());
            match command {
                Command::Shell(line) => parts.extend(["shell".to_owned(), line.clone()]),
                Command::Exec(words) => {
                    parts.push(format!("exec {}", words.len()));
                    parts.extend(words.iter().cloned());
                }
            }
            parts.extend(env.iter().flat_map(|(name, value)| [name.clone(), value.clone()]));
            parts.push(format!("{workdir:?} {user:?}"));
        }
        Act::Copy { found, target, is_folder, copy } => {
            parts.push(if copy.unpacks { "add" } else { "copy" }.to_owned());
            parts.push(target.display().to_string());
            parts.push(format!("{is_folder} {:?} {:?}", copy.owner, copy.mode));
            parts.push(context::digest(found)?);
        }
        Act::MakeDirectory(path) => parts.extend(["directory".to_owned(), path.clone()]),
    }
    Ok(cache::key(parts.iter().map(String::as_bytes)))
}

/// The variables of a build.
#[derive(Default)]
struct Vars {
    /// Values that the caller gives to ARG.
    given: Vec<(String, String)>,
    args: Vec<(String, String)>,
    env: Vec<(String, String)>,
}

impl Vars {
    fn get(&self, name: &str) -> Option<String> {
        let pairs = self.env.iter().chain(&self.args);
        pairs.into_iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    }

    /// Returns what a command sees: arguments, and variables in front of them.
    fn all(&self) -> Vec<(String, String)> {
        let mut all = self.args.clone();
        for (name, value) in &self.env {
            set(&mut all, name.clone(), value.clone());
        }
        all
    }

    fn expand(&self, text: &str) -> Result<String, String> {
        words::expand(text, &|name| self.get(name))
    }

    fn split(&self, text: &str) -> Result<Vec<String>, String> {
        words::split(text, &|name| self.get(name))
    }

    /// Parses `NAME=VALUE ...`, or the old form `NAME VALUE`.
    fn pairs(&self, text: &str) -> Result<Vec<(String, String)>, String> {
        let (first, rest) = text.split_once([' ', '\t']).unwrap_or((text, ""));
        if !first.contains('=') {
            if rest.trim().is_empty() {
                return Err(format!("{first} has no value"));
            }
            return Ok(vec![checked(first, self.expand(rest.trim())?)?]);
        }
        let pair = |word: String| match word.split_once('=') {
            Some((name, value)) => checked(name, value.to_owned()),
            None => Err(format!("{word:?} is not NAME=VALUE")),
        };
        self.split(text)?.into_iter().map(pair).collect()
    }

    /// Takes an ARG instruction: `NAME` or `NAME=DEFAULT`.
    fn declare(&mut self, text: &str) -> Result<(), String> {
        for word in self.split(text)? {
            let (name, default) = match word.split_once('=') {
                Some((name, default)) => (name, Some(default.to_owned())),
                None => (&word[..], None),
            };
            checked(name, String::new())?;
            let given = self.given.iter().find(|(known, _)| known == name);
            if let Some(value) = given.map(|(_, value)| value.clone()).or(default) {
                set(&mut self.args, name.to_owned(), value);
            }
        }
        Ok(())
    }
}

fn checked(name: &str, value: String) -> Result<(String, String), String> {
    let is_name = !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0');
    if is_name { Ok((name.to_owned(), value)) } else { Err(format!("{name:?} is not a name")) }
}

fn set(pairs: &mut Vec<(String, String)>, name: String, value: String) {
    match pairs.iter_mut().find(|(known, _)| *known == name) {
        Some(pair) => pair.1 = value,
        None => pairs.push((name, value)),
    }
}

/// Returns a guest's path without `.` and `..`, relative to the working directory.
fn absolute(workdir: Option<&str>, path: &str) -> PathBuf {
    let mut plain = PathBuf::from("/");
    for component in Path::new(workdir.unwrap_or("/")).join(path).components() {
        match component {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => drop(plain.pop()),
            _ => (),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::super::parse::parse;
    use super::*;

    fn planned(text: &str, given: &[(&str, &str)]) -> Plan {
        let given: Vec<_> =
            given.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        plan(&parse(text).unwrap(), None, "digest", false, &given).unwrap()
    }

    fn last_key(text: &str) -> String {
        planned(text, &[]).steps.pop().unwrap().key
    }

    #[test]
    fn commands_see_variables_directory_and_user() {
        let plan = planned(
            "FROM a\nARG V=1\nENV A=x B=\"$A-$V\"\nWORKDIR /w\nWORKDIR sub/../s\nUSER me\nRUN go\n\
             LABEL k=v\nEXPOSE 80 $V\nCMD run me",
            &[("V", "2"), ("OTHER", "3")],
        );
        let Some(Act::Run { env, workdir, user, .. }) = &plan.steps[5].act else { panic!() };
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        // In one instruction all values are those from before it.
        assert_eq!(*env, [pair("V", "2"), pair("A", "x"), pair("B", "-2")]);
        assert_eq!((workdir.as_deref(), user.as_deref()), (Some("/w/s"), Some("me")));
        assert_eq!(plan.settings.env, [pair("A", "x"), pair("B", "-2")]);
        assert_eq!(plan.settings.ports, ["80", "2"]);
        assert_eq!(plan.settings.cmd.unwrap(), ["/bin/sh", "-c", "run me"]);
        assert_eq!(plan.settings.labels, [pair("k", "v")]);
    }

    #[test]
    fn key_of_the_template_changes_with_its_settings_too() {
        let key = |text: &str| planned(text, &[]).key().unwrap();
        assert_eq!(key("FROM a\nRUN x\nCMD y"), key("FROM a\nRUN  x\n# note\nCMD y"));
        assert_ne!(key("FROM a\nRUN x\nCMD y"), key("FROM a\nRUN x\nCMD z"));
        assert_ne!(key("FROM a\nRUN x\nCMD y"), key("FROM a\nRUN z\nCMD y"));
    }

    #[test]
    fn key_changes_with_all_that_a_step_depends_on_and_with_nothing_else() {
        let key = last_key("FROM a\nRUN x\nRUN y");
        assert_eq!(key, last_key("FROM a\nLABEL a=b\nRUN x\n# note\nRUN  y\nCMD z"));
        assert_eq!(key, last_key("FROM a\nRUN x\nRUN y\nENV A=1"));
        for other in [
            "FROM a\nRUN y",
            "FROM a\nRUN y\nRUN x",
            "FROM a\nENV A=1\nRUN x\nRUN y",
            "FROM a\nRUN x\nARG A=1\nRUN y",
            "FROM a\nRUN x\nUSER u\nRUN y",
            "FROM a\nRUN x\nWORKDIR /\nRUN y",
            "FROM a\nRUN x\nRUN [\"y\"]",
        ] {
            assert_ne!(key, last_key(other), "{other}");
        }
        let file = parse("FROM a\nRUN x\nRUN y").unwrap();
        for (digest, net) in [("other", false), ("digest", true)] {
            let plan = plan(&file, None, digest, net, &[]).unwrap();
            assert_ne!(plan.steps[1].key, key);
        }
    }

    #[test]
    fn key_of_a_copy_changes_with_its_bytes_and_target() {
        let dir = tempfile::tempdir().unwrap();
        let key = |text: &str, content: &str| {
            std::fs::write(dir.path().join("f"), content).unwrap();
            let context = Context::open(dir.path()).unwrap();
            let plan = plan(&parse(text).unwrap(), Some(&context), "d", false, &[]).unwrap();
            plan.steps[0].key.clone()
        };
        let one = key("FROM a\nCOPY f /x", "1");
        assert_eq!(one, key("FROM a\nCOPY ./f /y/../x", "1"));
        assert_ne!(one, key("FROM a\nCOPY f /x", "2"));
        assert_ne!(one, key("FROM a\nCOPY f /y", "1"));
        assert_ne!(one, key("FROM a\nCOPY --chmod=700 f /x", "1"));
        assert_ne!(one, key("FROM a\nCOPY f /x/", "1"));
    }

    #[test]
    fn image_is_named_with_arguments_and_aliases() {
        let file = parse("ARG V=3.12\nFROM python:${V}-slim AS x").unwrap();
        assert_eq!(image(&file, &[]).unwrap(), "python:3.12-slim");
        let given = [("V".to_owned(), "3".to_owned())];
        assert_eq!(image(&file, &given).unwrap(), "python:3-slim");
        assert_eq!(alias("python:3-slim"), Some("base"));
        assert_eq!(alias("debian"), Some("base"));
        assert_eq!(alias("alpine"), None);
        assert_eq!(alias("someone/python"), None);
    }

    #[test]
    fn what_cannot_be_copied_is_refused_with_its_line() {
        let file = parse("FROM a\n\nCOPY x /y").unwrap();
        let failure = plan(&file, None, "d", false, &[]).unwrap_err();
        assert!(failure.message.starts_with("line 3 of the Dockerfile: "), "{failure:?}");
        let dir = tempfile::tempdir().unwrap();
        let context = Context::open(dir.path()).unwrap();
        let file = parse("FROM a\nADD https://example.com/x /y").unwrap();
        let failure = plan(&file, Some(&context), "d", false, &[]).unwrap_err();
        assert!(failure.message.contains("only files of the context"), "{failure:?}");
    }
}
