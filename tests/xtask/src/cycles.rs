//! Finds cycles in the dependencies between the modules of a crate.
//!
//! The modules of a crate are layers: a module uses only modules below it. The modules are the
//! files and folders directly in `src`. Tests may use every module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

/// The crates whose modules must not form a cycle.
const CRATES: [&str; 9] = [
    "vmm",
    "devices",
    "guest-agent",
    "launcher",
    "images",
    "sandbox",
    "service",
    "jailer",
    "egress",
];

/// The modules that each module uses.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns one line for each cycle in the crates below `root`.
pub fn find(root: &Path) -> io::Result<Vec<String>> {
    let mut faults = Vec::new();
    for name in CRATES {
        let src = root.join(name).join("src");
        if src.is_dir() {
            let cycles = cycles(&graph(&src)?);
            faults.extend(cycles.iter().map(|cycle| {
                format!("modules of {name}/ depend on each other: {}", cycle.join(" → "))
            }));
        }
    }
    Ok(faults)
}

fn graph(src: &Path) -> io::Result<Graph> {
    let mut sources = Vec::new();
    collect(src, src, &mut sources)?;
    let tops: BTreeSet<String> = sources.iter().map(|(path, _)| top(path)).collect();
    let root = sources.iter().find(|(path, _)| path == "lib.rs" || path == "main.rs");
    let exported = root.map(|(_, text)| exports(text)).unwrap_or_default();
    let mut graph = Graph::new();
    for (path, text) in &sources {
        let own = top(path);
        if ["lib", "main"].contains(&own.as_str()) {
            continue;
        }
        let used =
            uses(path, text).into_iter().map(|name| exported.get(&name).cloned().unwrap_or(name));
        let used = used.filter(|name| *name != own && tops.contains(name));
        graph.entry(own.clone()).or_default().extend(used);
    }
    Ok(graph)
}

/// Collects the shipped sources below `dir`, by their paths from `src`.
fn collect(src: &Path, dir: &Path, into: &mut Vec<(String, String)>) -> io::Result<()> {
    let mut entries = fs::read_dir(dir)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if entry.file_type()?.is_dir() {
            if name != "tests" {
                collect(src, &path, into)?;
            }
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") && name != "testing.rs" {
            let relative = path.strip_prefix(src).unwrap_or(&path).to_string_lossy().into_owned();
            into.push((relative, shipped(&fs::read_to_string(&path)?)));
        }
    }
    Ok(())
}

/// Returns a source without comments and without its module of tests.
fn shipped(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned() + "\n";
    text.lines().map(code).collect()
}

/// Returns the module directly in `src` that a file belongs to.
fn top(path: &str) -> String {
    path.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned()
}

/// Returns the names that the root of the crate exports, each with its module.
fn exports(text: &str) -> BTreeMap<String, String> {
    let mut exported = BTreeMap::new();
    for statement in text.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next()) {
        let mut words = names(statement).into_iter();
        if let Some(module) = words.next() {
            exported.extend(words.map(|name| (name, module.clone())));
        }
    }
    exported
}

/// Returns the names of the crate's root that a file uses.
fn uses(path: &str, text: &str) -> BTreeSet<String> {
    let depth = path.matches('/').count() + usize::from(!path.ends_with("mod.rs"));
    let mut used = after(text, "crate::");
    let chain = "super::".repeat(depth);
    used.extend(after(text, &chain).into_iter().filter(|name| name != "super"));
    used
}

/// Returns the first name of each path that follows `prefix`, alone or in braces.
fn after(text: &str, prefix: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices(prefix) {
        let is_longer = text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        let rest = &text[at + prefix.len()..];
        if is_longer {
            continue;
        }
        match rest.strip_prefix('{') {
            Some(list) => found.extend(first_names(list)),
            None => found.extend(names(rest).into_iter().next()),
        }
    }
    found
}

/// Returns the first name of each element of a list in braces, whose opening brace is cut off.
fn first_names(list: &str) -> Vec<String> {
    let (mut depth, mut element, mut elements) = (0, String::new(), Vec::new());
    for c in list.chars() {
        match c {
            '}' if depth == 0 => break,
            ',' if depth == 0 => elements.push(std::mem::take(&mut element)),
            '{' => depth += 1,
            '}' => depth -= 1,
            c => element.push(c),
        }
    }
    elements.push(element);
    elements.iter().filter_map(|element| names(element).into_iter().next()).collect()
}

fn names(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Returns the shortest cycle through each module that reaches itself, each cycle once.
fn cycles(graph: &Graph) -> Vec<Vec<String>> {
    let mut found: Vec<Vec<String>> = Vec::new();
    for start in graph.keys() {
        if found.iter().any(|cycle| cycle.contains(start)) {
            continue;
        }
        let mut ways = vec![vec![start.clone()]];
        let mut seen = BTreeSet::new();
        while let Some(way) = (!ways.is_empty()).then(|| ways.remove(0)) {
            let next = way.last().and_then(|last| graph.get(last)).into_iter().flatten();
            for name in next {
                if name == start {
                    found.push([way.clone(), vec![start.clone()]].concat());
                    ways.clear();
                    break;
                }
                if seen.insert(name.clone()) {
                    ways.push([way.clone(), vec![name.clone()]].concat());
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let place = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = place.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        cycles(&graph(place.path()).unwrap())
    }

    #[test]
    fn modules_in_layers_have_no_cycle() {
        let files = [
            ("lib.rs", "pub use b::{B};"),
            (
                "a.rs",
                "use crate::B;\n// use crate::c;\n#[cfg(test)]\nmod tests {\nuse crate::c;\n}",
            ),
            ("b/mod.rs", "use super::c::C;"),
            ("b/inner.rs", "use super::helper;"),
            ("c.rs", "fn f() {}"),
            ("c_tests.rs", "use crate::a;"),
        ];
        assert_eq!(tree(&files), Vec::<Vec<String>>::new());
    }

    #[test]
    fn cycle_over_exports_braces_and_inner_files_is_named() {
        let files = [
            ("lib.rs", "pub use a::A;"),
            ("a.rs", "use crate::{x, b::{self, B}};"),
            ("b/mod.rs", "mod inner;"),
            ("b/inner.rs", "fn f() -> super::super::c::C {}"),
            ("c.rs", "use crate::A;"),
            ("x.rs", ""),
        ];
        assert_eq!(tree(&files), [["a", "b", "c", "a"]]);
    }
}
