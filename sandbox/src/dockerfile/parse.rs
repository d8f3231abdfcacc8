//! Reads the instructions of a Dockerfile; what pvmm does not do is refused by line and name.

use serde_json::Value;

/// The longest Dockerfile.
const MAX_TEXT: usize = 1 << 20;
const MAX_STEPS: usize = 1000;

/// An error in a Dockerfile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the Dockerfile: {why}")]
pub struct DockerfileError {
    pub line: usize,
    pub why: String,
}

/// A Dockerfile with one stage. Variables are not put in yet.
#[derive(Debug, PartialEq, Eq)]
pub struct Dockerfile {
    /// The ARG instructions before FROM, for the name of the image.
    pub args: Vec<Step>,
    pub from: Step,
    pub steps: Vec<Step>,
}

/// An instruction, with its line and its text for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub line: usize,
    pub text: String,
    pub instruction: Instruction,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Instruction {
    From(String),
    Run(Command),
    Copy(Copy),
    Env(String),
    Arg(String),
    Workdir(String),
    User(String),
    Cmd(Command),
    Entrypoint(Command),
    Expose(String),
    Label(String),
    /// An instruction that concerns neither the files nor the settings of a template.
    Ignored,
}

/// A command as a line for the shell, or as words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Shell(String),
    Exec(Vec<String>),
}

impl Command {
    /// Returns the words that run the command.
    pub fn argv(&self) -> Vec<String> {
        match self {
            Command::Shell(line) => vec!["/bin/sh".to_owned(), "-c".to_owned(), line.clone()],
            Command::Exec(words) => words.clone(),
        }
    }
}

/// The arguments of COPY and ADD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copy {
    pub sources: Vec<String>,
    pub target: String,
    pub owner: Option<String>,
    pub mode: Option<u32>,
    /// Whether archives are unpacked, as ADD does.
    pub unpacks: bool,
}

/// Parses the text of a Dockerfile.
pub fn parse(text: &str) -> Result<Dockerfile, DockerfileError> {
    if text.len() > MAX_TEXT {
        let why = format!("the file is longer than {MAX_TEXT} bytes");
        return Err(DockerfileError { line: 1, why });
    }
    let (mut args, mut from, mut steps) = (Vec::new(), None, Vec::new());
    for (line, text) in logical_lines(text)? {
        let fail = |why: String| DockerfileError { line, why };
        let instruction = instruction(&text).map_err(fail)?;
        let step = Step { line, text: shown(&text), instruction };
        match (&step.instruction, &from) {
            (Instruction::From(_), None) => from = Some(step),
            (Instruction::From(_), Some(_)) => {
                let why = "a second FROM: a template is built in one stage".to_owned();
                return Err(fail(why));
            }
            (Instruction::Arg(_), None) => args.push(step),
            (_, None) => return Err(fail("the first instruction is FROM".to_owned())),
            (_, Some(_)) => steps.push(step),
        }
        if steps.len() > MAX_STEPS {
            return Err(fail(format!("there are more than {MAX_STEPS} instructions")));
        }
    }
    let why = "there is no FROM: name a template to begin with".to_owned();
    let from = from.ok_or(DockerfileError { line: 1, why })?;
    Ok(Dockerfile { args, from, steps })
}

/// Joins continued lines, and drops comments and empty lines. Each line comes with its number.
fn logical_lines(text: &str) -> Result<Vec<(usize, String)>, DockerfileError> {
    let (mut lines, mut open) = (Vec::new(), None::<(usize, String)>);
    for (number, line) in (1..).zip(text.lines()) {
        let trimmed = line.trim();
        if let Some(comment) = trimmed.strip_prefix('#') {
            let directive = comment.trim().to_ascii_lowercase().replace(' ', "");
            if lines.is_empty() && directive.starts_with("escape=") && directive != "escape=\\" {
                let why = "only '\\' continues a line".to_owned();
                return Err(DockerfileError { line: number, why });
            }
            continue;
        }
        if trimmed.is_empty() {
            continue;
        }
        let (_, whole) = open.get_or_insert_with(|| (number, String::new()));
        let line = if whole.is_empty() { line.trim() } else { line.trim_end() };
        match line.strip_suffix('\\') {
            Some(part) => whole.push_str(part),
            None => {
                whole.push_str(line);
                lines.extend(open.take());
            }
        }
    }
    lines.extend(open);
    Ok(lines)
}

fn instruction(text: &str) -> Result<Instruction, String> {
    let (word, rest) = text.split_once([' ', '\t']).unwrap_or((text, ""));
    let (word, rest) = (word.to_ascii_uppercase(), rest.trim());
    if rest.is_empty() {
        return Err(format!("{word} has no arguments"));
    }
    if ["RUN", "COPY", "ADD"].contains(&word.as_str()) && has_heredoc(rest) {
        return Err(format!("{word} with a here-document is not known: use a file or '\\'"));
    }
    Ok(match word.as_str() {
        "FROM" => Instruction::From(from(rest)?),
        "RUN" => match rest.strip_prefix("--") {
            Some(flag) => {
                let flag = flag.split([' ', '=']).next().unwrap_or_default();
                return Err(format!("RUN --{flag} is not known"));
            }
            None => Instruction::Run(command(rest)?),
        },
        "COPY" => Instruction::Copy(copy(&word, rest)?),
        "ADD" => Instruction::Copy(Copy { unpacks: true, ..copy(&word, rest)? }),
        "ENV" => Instruction::Env(rest.to_owned()),
        "ARG" => Instruction::Arg(rest.to_owned()),
        "WORKDIR" => Instruction::Workdir(rest.to_owned()),
        "USER" => Instruction::User(rest.to_owned()),
        "CMD" => Instruction::Cmd(command(rest)?),
        "ENTRYPOINT" => Instruction::Entrypoint(command(rest)?),
        "EXPOSE" => Instruction::Expose(rest.to_owned()),
        "LABEL" => Instruction::Label(rest.to_owned()),
        "MAINTAINER" | "STOPSIGNAL" | "HEALTHCHECK" | "VOLUME" => Instruction::Ignored,
        "SHELL" | "ONBUILD" => return Err(format!("{word} is not supported")),
        _ => return Err(format!("{word:?} is not an instruction")),
    })
}

/// Whether a word begins a here-document: `<<EOF`, `<<-EOF` or `<<"EOF"`.
fn has_heredoc(text: &str) -> bool {
    text.split_whitespace().any(|word| {
        let Some(name) = word.strip_prefix("<<") else { return false };
        let name = name.strip_prefix('-').unwrap_or(name).trim_start_matches(['"', '\'']);
        name.starts_with(|char: char| char.is_ascii_alphabetic() || char == '_')
    })
}

fn from(text: &str) -> Result<String, String> {
    let words: Vec<_> =
        text.split_whitespace().filter(|word| !word.starts_with("--platform=")).collect();
    match words.as_slice() {
        [name] => Ok((*name).to_owned()),
        [name, word, _] if word.eq_ignore_ascii_case("as") => Ok((*name).to_owned()),
        _ => Err("FROM takes one name".to_owned()),
    }
}

/// Parses a command: a JSON array of words, or else a line for the shell.
fn command(text: &str) -> Result<Command, String> {
    if text.starts_with('[')
        && let Ok(words) = serde_json::from_str::<Vec<String>>(text)
    {
        if words.is_empty() {
            return Err("the command is empty".to_owned());
        }
        return Ok(Command::Exec(words));
    }
    Ok(Command::Shell(text.to_owned()))
}

fn copy(word: &str, text: &str) -> Result<Copy, String> {
    let (mut copy, mut rest) = (Copy::default(), text);
    while let Some(flag) = rest.strip_prefix("--") {
        let (flag, after) = flag.split_once([' ', '\t']).unwrap_or((flag, ""));
        rest = after.trim_start();
        match flag.split_once('=').unwrap_or((flag, "")) {
            ("chown", owner) if !owner.is_empty() => copy.owner = Some(owner.to_owned()),
            ("chmod", mode) => {
                let mode = u32::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o7777);
                copy.mode = Some(mode.ok_or("--chmod takes a number such as 755")?);
            }
            ("link", _) => (),
            ("from", _) => {
                return Err("COPY --from: a template is built in one stage".to_owned());
            }
            (flag, _) => return Err(format!("{word} --{flag} is not known")),
        }
    }
    let mut words = match serde_json::from_str::<Value>(rest) {
        Ok(Value::Array(words)) => {
            let words = words.into_iter().map(|word| word.as_str().map(str::to_owned));
            words.collect::<Option<Vec<_>>>().ok_or(format!("{word} takes paths"))?
        }
        _ => rest.split_whitespace().map(str::to_owned).collect(),
    };
    copy.target = words.pop().unwrap_or_default();
    copy.sources = words;
    if copy.sources.is_empty() {
        return Err(format!("{word} takes sources and a target"));
    }
    Ok(copy)
}

/// Shortens an instruction to one line for people.
fn shown(text: &str) -> String {
    const MOST: usize = 100;
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut shown: String = text.chars().take(MOST).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn file_of_every_instruction_is_read() {
        let text = "# syntax=x\nARG V=1\nfrom python:$V AS one\n\nRUN a \\\n  # why\n\n  && b\n\
                    RUN [\"a\", \"b c\"]\nCOPY --chown=user:user --chmod=750 a b* /x/\n\
                    ADD [\"a b\", \"/c\"]\nENV A=1 B=2\nARG X\nWORKDIR /w\nUSER user\n\
                    CMD [\"x\"]\nENTRYPOINT x y\nEXPOSE 80\nLABEL a=b\nVOLUME /v\n";
        let file = parse(text).unwrap();
        assert_eq!(file.args.len(), 1);
        assert_eq!(file.from.instruction, Instruction::From("python:$V".to_owned()));
        let steps: Vec<_> = file.steps.iter().map(|step| step.instruction.clone()).collect();
        assert_eq!(steps.len(), 13);
        assert_eq!(steps[0], Instruction::Run(Command::Shell("a   && b".to_owned())));
        assert_eq!((file.steps[0].line, &file.steps[0].text[..]), (5, "RUN a && b"));
        let words = vec!["a".to_owned(), "b c".to_owned()];
        assert_eq!(steps[1], Instruction::Run(Command::Exec(words)));
        let copy = Copy {
            sources: vec!["a".to_owned(), "b*".to_owned()],
            target: "/x/".to_owned(),
            owner: Some("user:user".to_owned()),
            mode: Some(0o750),
            unpacks: false,
        };
        assert_eq!(steps[2], Instruction::Copy(copy));
        assert!(matches!(&steps[3], Instruction::Copy(copy) if copy.unpacks));
        assert_eq!(steps[12], Instruction::Ignored);
    }

    #[test]
    fn what_cannot_be_built_is_refused_by_line_and_name() {
        for (text, expected) in [
            ("", "no FROM"),
            ("RUN x", "line 1 of the Dockerfile: the first instruction is FROM"),
            ("FROM a\nRUN x\nFROM b", "line 3 of the Dockerfile: a second FROM"),
            ("FROM a\nCOPY --from=b /x /y", "one stage"),
            ("FROM a\nRUN --mount=type=cache x", "RUN --mount is not known"),
            ("FROM a\nRUN <<EOF\nx\nEOF", "here-document"),
            ("FROM a\nSHELL [\"x\"]", "SHELL is not supported"),
            ("FROM a\nJUMP x", "\"JUMP\" is not an instruction"),
            ("FROM a\nRUN", "RUN has no arguments"),
            ("FROM a\nRUN []", "empty"),
            ("FROM a\nCOPY x", "sources and a target"),
            ("FROM a\nCOPY --chmod=999 x y", "--chmod"),
            ("FROM a b", "one name"),
            ("# escape=`\nFROM a", "continues a line"),
        ] {
            let why = why(text);
            assert!(why.contains(expected), "{text}: {why}");
        }
    }

    #[test]
    fn shift_in_a_command_is_no_here_document() {
        assert!(parse("FROM a\nRUN echo $((1 << 3))\nRUN cat <<<x").is_ok());
    }
}
