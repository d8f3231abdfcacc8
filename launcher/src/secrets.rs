//! `--secret`: values that never enter the sandbox, from the command line to the egress process.
//!
//! The monitor process is a fork of the launcher and has a copy of its memory. So a launcher that
//! reads values puts them into a nameless file and executes itself again without them: no later
//! process has them in its memory, arguments or environment, but the egress process of the VM,
//! which reads them from a file that the jail of the monitor process does not show.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use clap::{Args, ValueHint};
use pvmm_egress::secrets::{
    NewSecret, Placeholders, SecretValue, SecretsDocument, SecretsError, VALUE_MAX,
};
use pvmm_sandbox::secrets::VmSecrets;
use pvmm_sandbox::sys::process;

use crate::exit::{Failure, io_text};

const SECRET: &str = "--secret";
const SEALED: &str = "--sealed-secrets";
const FORMS: &str = "write NAME@HOST for the variable NAME of this environment, or \
                     NAME=env:VARIABLE@HOST, NAME=file:PATH@HOST, NAME=VALUE@HOST";

/// The flags that give a VM secrets.
#[derive(Clone, Debug, Default, Args)]
pub struct SecretFlags {
    /// Give the guest a variable NAME with a placeholder, which becomes the value in headers of
    /// HTTPS requests to HOST and in nothing else; NAME@HOST takes the variable of this
    /// environment, NAME=env:VARIABLE@HOST another, NAME=file:PATH@HOST a file; implies --net
    #[arg(long, value_name = "NAME=VALUE@HOST")]
    secret: Vec<SecretText>,
    /// Also trust the authorities in this file (PEM) for hosts of secrets
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    secret_ca: Vec<PathBuf>,
    /// The two files of a launcher that has executed itself again
    #[arg(long, hide = true, conflicts_with_all = ["secret", "secret_ca"])]
    sealed_secrets: Option<SealedFiles>,
}

/// The text of a flag, which may have a value in it and is never printed.
#[derive(Clone)]
struct SecretText(OsString);

impl From<OsString> for SecretText {
    fn from(text: OsString) -> Self {
        Self(text)
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText")
    }
}

/// The numbers of the descriptors with the document and with what the guest is told.
#[derive(Clone, Copy, Debug)]
struct SealedFiles(i32, i32);

impl FromStr for SealedFiles {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (document, shown) = text.split_once(',').ok_or("two numbers")?;
        let number = |text: &str| text.parse().map_err(|_| "a number");
        Ok(Self(number(document)?, number(shown)?))
    }
}

/// The place that a value comes from.
#[derive(Debug, PartialEq, Eq)]
enum Source<'a> {
    Here(&'a str),
    Variable(&'a str),
    File(&'a Path),
}

impl SecretFlags {
    /// Returns the secrets. If this process has read their values for that, it does not return: it
    /// becomes a new one that has not. Called before anything is created.
    pub fn seal(&self) -> Result<Option<VmSecrets>, Failure> {
        if let Some(SealedFiles(document, shown)) = self.sealed_secrets {
            let failed = |error: io::Error| Failure::usage(format!("{SEALED}: {error}"));
            let document = process::inherited(document).map_err(failed)?.into();
            let shown: File = process::inherited(shown).map_err(failed)?.into();
            let shown = serde_json::from_reader(shown).map_err(|error| failed(error.into()))?;
            return Ok(Some(VmSecrets { values: document, shown: Some(shown) }));
        }
        if self.secret.is_empty() {
            if !self.secret_ca.is_empty() {
                return Err(Failure::usage("--secret-ca: there is no --secret that it is for"));
            }
            return Ok(None);
        }
        let (mut secrets, mut variables) = (Vec::new(), Vec::new());
        for (number, text) in (1..).zip(&self.secret) {
            let (label, name, source, host) = parse(&text.0, number)?;
            if let Source::Variable(variable) = source {
                variables.push(variable);
            }
            let value = read(&label, &source)?;
            secrets.push(NewSecret { name: name.to_owned(), host: host.to_owned(), value });
        }
        let authorities = self.secret_ca.iter().map(|path| read_authorities(path));
        let authorities: String = authorities.collect::<Result<_, _>>()?;
        let (document, shown) =
            SecretsDocument::new(secrets, authorities).map_err(|error| match error {
                SecretsError::Tls(error) => Failure::usage(format!("--secret-ca: {error}")),
                error => Failure::usage(format!("{SECRET}: {error}")),
            })?;
        start_again(&document, &shown, &variables)
    }
}

/// Splits a flag into a label for messages, the name, the source of the value, and the host.
fn parse(text: &OsStr, number: u32) -> Result<(String, &str, Source<'_>, &str), Failure> {
    // The text may be a value without a name, so that no message repeats it.
    let label = format!("{SECRET} (number {number})");
    let refuse = || Failure::usage(format!("{label}: not a secret and its host")).hint(FORMS);
    let (front, host) = text.to_str().and_then(|text| text.rsplit_once('@')).ok_or_else(refuse)?;
    let Some((name, value)) = front.split_once('=') else {
        return Ok((label, front, Source::Variable(front), host));
    };
    let source = match (value.strip_prefix("env:"), value.strip_prefix("file:")) {
        (Some(variable), _) => Source::Variable(variable),
        (_, Some(path)) => Source::File(Path::new(path)),
        _ => Source::Here(value),
    };
    Ok((format!("{SECRET} {name}"), name, source, host))
}

fn read(label: &str, source: &Source<'_>) -> Result<SecretValue, Failure> {
    let refuse = |why: &str| Failure::usage(format!("{label}: {why}"));
    let value = match source {
        Source::Here(value) => (*value).to_owned(),
        Source::Variable(variable) => match std::env::var(variable) {
            Ok(value) => value,
            Err(std::env::VarError::NotPresent) => {
                return Err(refuse("this environment has no such variable").hint(FORMS));
            }
            Err(_) => return Err(refuse("the variable is not UTF-8")),
        },
        Source::File(path) => {
            let failed = |error: io::Error| {
                refuse(&format!("cannot read {}: {}", path.display(), io_text(&error)))
            };
            let mut value = String::new();
            let file = File::open(path).map_err(failed)?;
            file.take(VALUE_MAX as u64 + 3).read_to_string(&mut value).map_err(failed)?;
            // Editors and shells end a file's last line.
            let end = value.trim_end_matches(['\r', '\n']).len();
            value.truncate(end);
            value
        }
    };
    Ok(SecretValue::new(value))
}

fn read_authorities(path: &Path) -> Result<String, Failure> {
    let text = fs::read_to_string(path).map_err(|error| {
        let why = io_text(&error);
        Failure::usage(format!("--secret-ca: cannot read {}: {why}", path.display()))
    })?;
    Ok(text + "\n")
}

/// Executes this program again, with two files in place of the flags that had values.
fn start_again(
    document: &SecretsDocument,
    shown: &Placeholders,
    variables: &[&str],
) -> Result<Option<VmSecrets>, Failure> {
    let failed = |error: io::Error| Failure::fault(format!("cannot seal the secrets: {error}"));
    let bytes = document.to_bytes().map_err(|error| failed(io::Error::other(error)))?;
    let document = process::memory_file(c"pvmm-secrets", &bytes).map_err(failed)?;
    let bytes = serde_json::to_vec(shown).map_err(|error| failed(error.into()))?;
    let shown = process::memory_file(c"pvmm-placeholders", &bytes).map_err(failed)?;
    let files = format!("{SEALED}={},{}", document.as_raw_fd(), shown.as_raw_fd());
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    let mut command = Command::new("/proc/self/exe");
    command.arg0(name).args(sealed_words(words, files.into()));
    for variable in variables {
        command.env_remove(variable);
    }
    Err(failed(command.exec()))
}

/// Returns the words of a command line with one flag for the sealed files in place of those that
/// have values.
fn sealed_words(words: impl Iterator<Item = OsString>, files: OsString) -> Vec<OsString> {
    let (mut kept, mut files, mut words) = (Vec::new(), Some(files), words.fuse());
    while let Some(word) = words.next() {
        // The rest is the guest's command.
        if word == "--" {
            kept.push(word);
            kept.extend(words);
            break;
        }
        let text = word.to_string_lossy();
        let (flag, attached) = text.split_once('=').map_or((&*text, false), |(it, _)| (it, true));
        if !matches!(flag, SECRET | "--secret-ca") {
            kept.push(word);
            continue;
        }
        if !attached {
            words.next();
        }
        kept.extend(files.take());
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_of_every_form_is_read() {
        for (text, expected) in [
            ("A@h.example", ("A", Source::Variable("A"), "h.example")),
            ("A=env:B@h.example", ("A", Source::Variable("B"), "h.example")),
            ("A=file:/x@y@h.example", ("A", Source::File(Path::new("/x@y")), "h.example")),
            ("A=a=b@c@h.example", ("A", Source::Here("a=b@c"), "h.example")),
            ("A=@h.example", ("A", Source::Here(""), "h.example")),
        ] {
            let (_, name, source, host) = parse(OsStr::new(text), 1).unwrap();
            assert_eq!((name, source, host), expected);
        }
    }

    #[test]
    fn secret_in_another_form_is_refused_without_a_word_of_it() {
        for text in ["hunter2", "A=hunter2", ""] {
            let refused = parse(OsStr::new(text), 3).unwrap_err();
            assert!(refused.message.contains("--secret (number 3)"), "{}", refused.message);
            assert!(!refused.message.contains("hunter2"));
        }
        let unset = read("--secret (number 1)", &Source::Variable("PVMM_NO_SUCH_VARIABLE"));
        assert!(unset.unwrap_err().message.contains("no such variable"));
        let flags = SecretFlags { secret: vec![SecretText("x".into())], ..SecretFlags::default() };
        assert!(!format!("{flags:?}").contains('x') || format!("{flags:?}").contains("SecretText"));
    }

    #[test]
    fn value_from_a_file_is_without_its_last_line_end() {
        let path = std::env::temp_dir().join(format!("pvmm-secret-{}", std::process::id()));
        fs::write(&path, "hunter2\r\n").unwrap();
        let value = read("--secret A", &Source::File(&path)).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(value.as_str(), "hunter2");
        assert!(read("--secret A", &Source::File(&path)).unwrap_err().message.contains("cannot"));
    }

    #[test]
    fn words_of_the_new_process_have_no_value() {
        let words = "run --secret A=x@h --name n --secret=B=y@h --secret-ca f -- cmd --secret z";
        let words = words.split(' ').map(OsString::from);
        let kept = sealed_words(words, "--sealed-secrets=3,4".into()).join(OsStr::new(" "));
        assert_eq!(kept, "run --sealed-secrets=3,4 --name n -- cmd --secret z");
    }
}
