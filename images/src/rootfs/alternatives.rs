//! Creates the links that packages register with update-alternatives (awk, cc, vi, pager).
//!
//! They are parsed from the postinst scripts, which never run, and point directly at the program.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::RootfsError;
use super::tree::Tree;
use crate::deb::{self, Part};

/// The longest script that is read; no maintainer script is nearly as long.
const SCRIPT_CAP: u64 = 1 << 20;

pub(super) fn link(tree: &Tree, debs: &[PathBuf]) -> Result<(), RootfsError> {
    let mut best: BTreeMap<String, Choice> = BTreeMap::new();
    for deb in debs {
        for choice in choices(&postinst(deb)?) {
            let there = tree.has(&merged(&choice.target));
            let better = best.get(&choice.link).is_none_or(|old| old.priority < choice.priority);
            if there && better {
                best.insert(choice.link.clone(), choice);
            }
        }
    }
    for choice in best.values() {
        tree.link(&merged(&choice.link), &choice.target)?;
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
struct Choice {
    link: String,
    target: String,
    priority: i64,
}

/// Returns the postinst script of a package; empty if there is none.
fn postinst(path: &Path) -> Result<String, RootfsError> {
    let failed = |source| RootfsError::ReadPackage { path: path.to_owned(), source };
    let mut files = deb::open(path, Part::Control)?;
    for entry in files.entries().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.path().map_err(failed)?.file_name().is_some_and(|name| name == "postinst") {
            let mut script = Vec::new();
            entry.take(SCRIPT_CAP).read_to_end(&mut script).map_err(failed)?;
            return Ok(String::from_utf8_lossy(&script).into_owned());
        }
    }
    Ok(String::new())
}

/// Parses every literal `--install LINK NAME TARGET PRIORITY [--slave LINK NAME TARGET]...`; those
/// with shell variables are skipped.
fn choices(script: &str) -> Vec<Choice> {
    let script = script.replace("\\\n", " ");
    let mut found = Vec::new();
    for line in script.lines().filter(|line| line.contains("update-alternatives")) {
        let words: Vec<&str> =
            line.split_whitespace().map(|w| w.trim_matches(['"', '\''])).collect();
        let mut priority = None;
        for (n, word) in words.iter().enumerate() {
            let rest = &words[n + 1..];
            match (*word, rest) {
                ("--install", [_, _, _, number, ..]) => priority = number.parse().ok(),
                ("--slave", [_, _, _, ..]) => (),
                _ => continue,
            }
            let (Some(priority), [link, _, target, ..]) = (priority, rest) else { continue };
            if [link, target].iter().all(|path| path.starts_with('/') && !path.contains('$')) {
                let (link, target) = ((*link).to_owned(), (*target).to_owned());
                found.push(Choice { link, target, priority });
            }
        }
    }
    found
}

/// Returns the path in the usr-merged tree: `/bin/nc` becomes `usr/bin/nc`.
fn merged(path: &str) -> String {
    let inner = path.trim_start_matches('/');
    let top = inner.split('/').next().unwrap_or_default();
    if ["bin", "sbin", "lib", "lib64"].contains(&top) {
        format!("usr/{inner}")
    } else {
        inner.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_with_slaves_gives_every_link() {
        let script = "set -e\nupdate-alternatives --quiet --install /usr/bin/awk awk \\\n\
                      /usr/bin/mawk 5 --slave /usr/bin/nawk nawk /usr/bin/mawk\n";
        let links: Vec<_> = choices(script).into_iter().map(|c| (c.link, c.priority)).collect();
        assert_eq!(links, [("/usr/bin/awk".to_owned(), 5), ("/usr/bin/nawk".to_owned(), 5)]);
    }

    #[test]
    fn script_with_variables_is_left_alone() {
        assert!(choices("update-alternatives --install $bin x /usr/bin/x 5").is_empty());
        assert!(choices("update-alternatives --install").is_empty());
        assert!(choices("update-alternatives --remove awk /usr/bin/mawk").is_empty());
    }
}
