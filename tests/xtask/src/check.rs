//! `cargo xtask check`: what must hold for the sources before anything runs.
//!
//! It checks formatting, lints, and the rules of this project that a program can check.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::bad_input::Tests;
use crate::{advisories, cargo, checkout, cycles, progress, report, site};

/// The number of lines without tests above which a file probably does more than one thing.
const LONG_FILE: usize = 600;

/// The width that rustfmt enforces for code, but not for comments.
const COMMENT_WIDTH: usize = 100;
/// Words that a doc comment does not begin with.
const NO_SUBJECT: [&str; 7] = ["The same", "Same", "Those", "They", "It", "What", "Whose"];

pub fn run() -> ExitCode {
    let mut faults = Vec::new();
    for command in [
        &["fmt", "--all", "--check"][..],
        &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
    ] {
        if let Err(e) = cargo::run(command) {
            faults.push(report::chain(&e));
        }
    }
    progress::step("looking at the sources");
    match look(&checkout::root()) {
        Ok((found, long)) => {
            faults.extend(found);
            for file in long {
                eprintln!("check: warning: {file}");
            }
        }
        Err(e) => faults.push(format!("cannot look at the sources: {e}")),
    }
    match site::rest::update(&checkout::root()) {
        Ok(true) => {}
        Ok(false) => faults.push("docs/rest.md was not up to date; it is now: commit it".into()),
        Err(fault) => faults.push(fault),
    }
    match built_twice() {
        Ok(found) => faults.extend(found),
        Err(e) => faults.push(report::chain(&e)),
    }
    for fault in &faults {
        eprintln!("check: {fault}");
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns the crates that this tool and pvmm use with different features, and that would be built
/// twice.
fn built_twice() -> Result<Vec<String>, cargo::CargoError> {
    let (tool, pvmm) = (cargo::features("xtask")?, cargo::features("pvmm-launcher")?);
    let other = tool.iter().filter_map(|(name, own)| Some((name, own, pvmm.get(name)?)));
    Ok(other
        .filter(|(_, own, theirs)| own != theirs)
        .map(|(name, own, theirs)| {
            format!("{name} is built twice: [{own}] here, [{theirs}] in pvmm")
        })
        .collect())
}

/// Returns the faults in the tree, and the files that are long.
fn look(root: &Path) -> io::Result<(Vec<String>, Vec<String>)> {
    let (mut faults, mut long) = (Vec::new(), Vec::new());
    let (mut tree, mut tests) = (Vec::new(), Tests::default());
    walk(root, &mut tree)?;
    let sources = tree.iter().filter(|path| path.extension().is_some_and(|ext| ext == "rs"));
    for path in sources {
        let text = fs::read_to_string(path)?;
        let name = path.strip_prefix(root).unwrap_or(path).display();
        tests.add(&text);
        if !text.starts_with("//!") {
            faults.push(format!("{name} does not begin with a //! header"));
        }
        if let Some(kind) = advisories::in_source(&text) {
            faults.push(format!("{name} has a {kind} of its own; use the one of vm-memory"));
        }
        faults.extend(ignored_by_all(&text).map(|reason| {
            format!("{name} ignores a test and names no make target that runs it: {reason}")
        }));
        faults.extend(wide_comments(&text).map(|line| {
            format!("{name}:{line} is a comment of more than {COMMENT_WIDTH} columns")
        }));
        // There the comments are the texts of `--help`.
        if !path.starts_with(root.join("launcher/src/cli")) {
            faults.extend(riddles(&text).map(|(line, words)| {
                format!("{name}:{line} begins with \"{words}\": name the subject instead")
            }));
        }
        let lines = lines_without_tests(path, &text);
        if lines > LONG_FILE {
            long.push(format!("{name} has {lines} lines without tests"));
        }
    }
    faults.extend(cycles::find(root)?);
    let lock = root.join("Cargo.lock");
    if lock.exists() {
        faults.extend(advisories::in_lock(&fs::read_to_string(lock)?));
    }
    let cases = root.join("docs/bad-input.md");
    if cases.exists() {
        faults.extend(tests.missing(&fs::read_to_string(cases)?));
    }
    let map = root.join("ARCHITECTURE.md");
    if map.exists() {
        let text = fs::read_to_string(map)?;
        // A name without a folder stands for a kind of file: `config.rs` is in every device.
        let is_somewhere = |name: &str| tree.iter().any(|path| path.ends_with(name));
        let missing = named_paths(&text).filter(|name| {
            let bare = !name.trim_end_matches('/').contains('/');
            !(root.join(name).exists() || bare && is_somewhere(name))
        });
        faults.extend(
            missing.map(|path| format!("ARCHITECTURE.md names {path}, which is not there")),
        );
    }
    Ok((faults, long))
}

/// Collects every file and folder of the tree, except hidden ones and cargo's output.
fn walk(dir: &Path, into: &mut Vec<PathBuf>) -> io::Result<()> {
    let mut entries = fs::read_dir(dir)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') || name.starts_with("target") {
            continue;
        }
        into.push(entry.path());
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), into)?;
        }
    }
    Ok(())
}

fn lines_without_tests(path: &Path, text: &str) -> usize {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_test = name.ends_with("tests.rs")
        || path
            .components()
            .any(|part| matches!(part.as_os_str().to_str(), Some("tests" | "suite")));
    if is_test {
        return 0;
    }
    let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..tests].lines().count()
}

/// Returns the `ignore` attributes that name neither a make target nor a test that runs the ignored
/// test.
fn ignored_by_all(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.lines().map(str::trim).filter(|line| line.starts_with("#[ignore"));
    lines.filter(|line| !["make ", "cargo xtask ", "run by "].iter().any(|by| line.contains(by)))
}

/// Returns the numbers of lines with a comment that is too wide. The row of a table and a single
/// word cannot be broken.
fn wide_comments(text: &str) -> impl Iterator<Item = usize> {
    let is_wide = |line: &str| {
        let comment = line.trim_start();
        let words = comment.trim_start_matches(['/', '!', ' ']);
        let breaks = !words.starts_with('|') && words.contains(' ');
        comment.starts_with("//") && breaks && line.chars().count() > COMMENT_WIDTH
    };
    text.lines().enumerate().filter(move |(_, line)| is_wide(line)).map(|(index, _)| index + 1)
}

/// Returns the doc comments whose first sentence cannot stand alone: the number of the line, and
/// the words that it begins with.
fn riddles(text: &str) -> impl Iterator<Item = (usize, &'static str)> {
    let mut within = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let doc = doc_words(line);
        let words = doc.unwrap_or_default();
        if !std::mem::replace(&mut within, doc.is_some()) {
            let begins = |start: &&&str| words.strip_prefix(**start).is_some_and(ends_word);
            found.extend(NO_SUBJECT.iter().find(begins).map(|start| (index + 1, *start)));
        }
    }
    found.into_iter()
}

fn doc_words(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim_start)
}

fn ends_word(rest: &str) -> bool {
    !rest.starts_with(char::is_alphanumeric)
}

/// Returns the words in backticks that are paths of this tree.
fn named_paths(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|word| {
        let plain =
            word.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '-' | '_'));
        let rooted = word.starts_with('/') || word.starts_with('.') && !word.starts_with(".ci");
        let is_file = Path::new(word)
            .extension()
            .is_some_and(|ext| ["rs", "md", "toml", "config"].iter().any(|known| ext == *known));
        plain && !rooted && !word.starts_with("target") && (word.contains('/') || is_file)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_paths_in_prose_are_only_those_of_the_tree() {
        let text = "See `vmm/src/boot.rs` and `devices/`, not `/dev/kvm`, `a b`, `Vm::boot`, \
                    `README.md`, `$HOME/x` or `KVM_RUN`.";
        let found: Vec<_> = named_paths(text).collect();
        assert_eq!(found, ["vmm/src/boot.rs", "devices/", "README.md"]);
    }

    #[test]
    fn doc_comment_that_does_not_name_its_subject_is_found_by_its_first_words() {
        let text = "//! What it is.\n\n/// The same with\n/// It may.\nfn a() {}\n\
                    /// Item.\n/// It may.\n    /// It may.\n// What is this?\n/// Its end.\n";
        assert_eq!(riddles(text).collect::<Vec<_>>(), [(1, "What"), (3, "The same")]);
        assert_eq!(riddles("    /// They are\n").collect::<Vec<_>>(), [(1, "They")]);
    }

    #[test]
    fn lines_without_tests_stop_at_the_test_module() {
        let text = "a\nb\n#[cfg(test)]\nmod tests {\nc\n}\n";
        assert_eq!(lines_without_tests(Path::new("src/x.rs"), text), 2);
        assert_eq!(lines_without_tests(Path::new("src/x/tests.rs"), text), 0);
    }

    #[test]
    fn no_crate_is_built_once_for_the_tool_and_again_for_pvmm() {
        assert_eq!(built_twice().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn ignored_test_that_no_target_runs_is_named() {
        let text = "#[ignore = \"make soak\"]\n#[ignore]\n  #[ignore = \"slow\"]\n";
        let found: Vec<_> = ignored_by_all(text).collect();
        assert_eq!(found, ["#[ignore]", "#[ignore = \"slow\"]"]);
    }

    #[test]
    fn comment_that_is_too_wide_is_named_by_its_line() {
        let long = "word ".repeat(20);
        let text =
            format!("// {long}\n//! | {long}|\nlet a = \"{long}\";\n  /// {long}\n// short\n");
        assert_eq!(wide_comments(&text).collect::<Vec<_>>(), [1, 4]);
    }

    #[test]
    fn look_at_a_file_without_header_is_a_fault() {
        let root = std::env::temp_dir().join(format!("xtask-look-{}", std::process::id()));
        fs::create_dir_all(root.join("src")).unwrap();
        fs::write(root.join("src/a.rs"), "//! Fine.\n").unwrap();
        fs::write(root.join("src/b.rs"), "fn main() {}\n").unwrap();
        fs::write(root.join("ARCHITECTURE.md"), "`src/a.rs`, `b.rs`, `src/gone.rs`").unwrap();
        fs::write(root.join("Cargo.lock"), "name = \"vm-memory\"\nversion = \"0.12.1\"\n").unwrap();
        fs::write(root.join("src/c.rs"), "//! Fine.\nimpl VolatileMemory for C {}\n").unwrap();
        let (faults, long) = look(&root).unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(faults.len(), 4, "{faults:?}");
        assert!(faults[0].starts_with("src/b.rs "));
        assert!(faults[1].starts_with("src/c.rs has a VolatileMemory"));
        assert!(faults[2].contains("CVE-2023-41051"));
        assert!(faults[3].contains("src/gone.rs"));
        assert!(long.is_empty());
    }
}
