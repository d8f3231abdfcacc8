//! `cargo xtask site`: the documentation as a site that can be searched, with the reference of the
//! library. Its pages are the files of this repository; `docs/SUMMARY.md` has their order.

mod links;
pub mod rest;

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::{cache, cargo, checkout, compat, progress, report};

/// The version of mdBook that builds the site.
const MDBOOK: &str = "0.5.4";
const SUMMARY: &str = "docs/SUMMARY.md";
/// Files that pages lead to and that are not pages.
const FILES: [&str; 4] = ["docs/api.json", "docs/openapi.json", "docs/grafana.json", "LICENSE"];
/// The page with the library's overview, which leads to the reference.
const LIBRARY: &str = "docs/library.md";
const TO_REFERENCE: &str = "\nEvery type and function: [the reference](../rust/pvmm/index.html).\n";
const SETTINGS: &str = r#"[book]
title = "pvmm"
src = "."

[build]
create-missing = false
# README.md stays what it is called, so that links to it lead somewhere.
use-default-preprocessors = false

[output.html]
default-theme = "light"
preferred-dark-theme = "navy"

[output.html.playground]
runnable = false
"#;

pub fn run() -> ExitCode {
    match build() {
        Ok(site) => {
            println!("{}", site.join("index.html").display());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("site: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Builds the site and returns its folder. A link that leads nowhere is an error.
pub fn build() -> Result<PathBuf, Box<dyn Error>> {
    let mdbook = install()?;
    let (source, site) =
        (cargo::target_dir().join("site-source"), cargo::target_dir().join("site"));
    progress::step(format!("the site goes to {}", site.display()));
    for dir in [&source, &site] {
        match fs::remove_dir_all(dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
            _ => {}
        }
    }
    rest::update(&checkout::root())?;
    gather(&checkout::root(), &source)?;
    let mut book = Command::new(mdbook);
    book.arg("build").arg("--dest-dir").arg(&site).arg(&source).stdin(Stdio::null());
    compat::check(&mut book, "mdbook")?;
    cargo::run(&[
        "doc",
        "--release",
        "--no-deps",
        "--package",
        "pvmm",
        "--package",
        "pvmm-devices",
    ])?;
    copy_tree(&cargo::target_dir().join("doc"), &site.join("rust"))?;
    match links::broken(&site, &site.join("rust"))?.as_slice() {
        [] => Ok(site),
        broken => Err(format!("links that lead nowhere:\n{}", broken.join("\n")).into()),
    }
}

/// Installs mdBook, unless it is there.
fn install() -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join(format!("tools/mdbook-{MDBOOK}"));
    let program = place.join("bin/mdbook");
    if !program.exists() {
        let root = place.to_str().ok_or("the cache has a name that is not UTF-8")?;
        let search = ["--no-default-features", "--features", "search"];
        let install = ["install", "mdbook", "--locked", "--version", MDBOOK, "--root", root];
        cargo::run(&[&install[..], &search[..]].concat())?;
    }
    Ok(program)
}

/// Copies the pages with their places, so that links between them stay true.
fn gather(root: &Path, source: &Path) -> Result<(), Box<dyn Error>> {
    let summary = from_root(&fs::read_to_string(root.join(SUMMARY))?);
    fs::create_dir_all(source)?;
    for page in links::targets(&summary).chain(FILES) {
        let to = source.join(page);
        fs::create_dir_all(to.parent().unwrap_or(source))?;
        fs::copy(root.join(page), &to).map_err(|e| format!("{page}: {e}"))?;
    }
    let library = fs::read_to_string(source.join(LIBRARY))?;
    fs::write(source.join(LIBRARY), library + TO_REFERENCE)?;
    fs::write(source.join("SUMMARY.md"), summary)?;
    Ok(fs::write(source.join("book.toml"), SETTINGS)?)
}

/// Returns the summary with links as they are from the root of the repository.
fn from_root(summary: &str) -> String {
    let lines = summary.lines().map(|line| match line.split_once("](") {
        Some((title, target)) => {
            let target = Path::new("docs").join(target.trim_end_matches(')'));
            format!("{title}]({})\n", without_dots(&target).display())
        }
        None => format!("{line}\n"),
    });
    lines.collect()
}

fn without_dots(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                clean.pop();
            }
            Component::CurDir => {}
            other => clean.push(other),
        }
    }
    clean
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_is_seen_from_the_root() {
        let summary = "# Use\n\n- [Commands](cli.md)\n  - [Start](../README.md)\n";
        let seen = "# Use\n\n- [Commands](docs/cli.md)\n  - [Start](README.md)\n";
        assert_eq!(from_root(summary), seen);
    }

    #[test]
    fn summary_names_every_page() {
        let root = checkout::root();
        let summary = from_root(&fs::read_to_string(root.join(SUMMARY)).unwrap());
        for folder in ["docs", "docs/howto", "docs/decisions"] {
            for entry in fs::read_dir(root.join(folder)).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                let page = format!("{folder}/{name}");
                let named = links::targets(&summary).any(|target| target == page);
                assert!(!page.ends_with(".md") || page == SUMMARY || named, "{page}");
            }
        }
    }
}
