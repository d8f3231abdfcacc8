//! The list of the crates that the shipped programs are built from, as a CycloneDX document.
//!
//! Made from cargo's own resolution. It has neither a time nor a random number, so that equal
//! sources give an equal list.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{cargo, checkout, dist};

/// The packages of the programs; the guest agent is inside `pvmm`.
const ROOTS: [&str; 3] = ["pvmm-launcher", "pvmm-jailer", "pvmm-guest-agent"];
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The part of cargo's answer that is used.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// The registry; none for the crates of this workspace.
    source: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    kind: Option<String>,
}

impl Dependency {
    /// Returns whether the crate is part of a program, and not only of its build or its tests.
    fn is_linked(&self) -> bool {
        self.dep_kinds.iter().any(|one| one.kind.is_none())
    }
}

/// Returns the document.
pub fn text() -> Result<String, Box<dyn Error>> {
    let arguments = ["metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET];
    let metadata: Metadata = serde_json::from_slice(&cargo::output(&arguments)?)?;
    let lock = fs::read_to_string(checkout::root().join("Cargo.lock"))?;
    Ok(serde_json::to_string_pretty(&document(&metadata, &digests(&lock)))? + "\n")
}

/// Returns the digests of packages in `Cargo.lock`, by name and version.
fn digests(lock: &str) -> BTreeMap<(String, String), String> {
    let blocks = lock.split("[[package]]").filter_map(|block| {
        let field = |name: &str| {
            let mut lines = block.lines().filter_map(|line| line.split_once(" = "));
            lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim_matches('"').to_owned())
        };
        Some(((field("name")?, field("version")?), field("checksum")?))
    });
    blocks.collect()
}

fn document(metadata: &Metadata, digests: &BTreeMap<(String, String), String>) -> Value {
    let packages: BTreeMap<_, _> =
        metadata.packages.iter().map(|it| (it.id.as_str(), it)).collect();
    let nodes: BTreeMap<_, _> =
        metadata.resolve.nodes.iter().map(|it| (it.id.as_str(), it)).collect();
    let linked = |id: &str| -> BTreeSet<&str> {
        let deps = nodes.get(id).into_iter().flat_map(|node| &node.deps);
        deps.filter(|it| it.is_linked()).map(|it| it.pkg.as_str()).collect()
    };
    let is_root = |it: &&Package| it.source.is_none() && ROOTS.contains(&it.name.as_str());
    let roots: Vec<&str> =
        metadata.packages.iter().filter(is_root).map(|it| it.id.as_str()).collect();
    let (mut parts, mut open) = (BTreeSet::new(), roots.clone());
    while let Some(id) = open.pop() {
        if parts.insert(id) {
            open.extend(linked(id));
        }
    }
    let url = |id: &str| packages.get(id).map(|it| purl(it)).unwrap_or_default();
    let urls = |ids: &mut dyn Iterator<Item = &str>| -> BTreeSet<String> { ids.map(url).collect() };
    let mut found: Vec<&&Package> = parts.iter().filter_map(|id| packages.get(id)).collect();
    found.sort_by_key(|it| (&it.name, &it.version));
    let components: Vec<Value> = found.iter().map(|it| component(it, digests)).collect();
    let product = format!("pkg:generic/pvmm@{}", dist::VERSION);
    let mut dependencies =
        vec![json!({ "ref": product, "dependsOn": urls(&mut roots.iter().copied()) })];
    dependencies.extend(
        found.iter().map(
            |it| json!({ "ref": purl(it), "dependsOn": urls(&mut linked(&it.id).into_iter()) }),
        ),
    );
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": {
            "type": "application",
            "bom-ref": product,
            "name": "pvmm",
            "version": dist::VERSION,
            "licenses": [{ "expression": "Apache-2.0" }],
            "purl": product,
        } },
        "components": components,
        "dependencies": dependencies,
    })
}

fn component(package: &Package, digests: &BTreeMap<(String, String), String>) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": purl(package),
        "name": package.name,
        "version": package.version,
        "purl": purl(package),
    });
    if let Some(license) = &package.license {
        // Older crates write a slash for "or".
        component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
    }
    if let Some(digest) = digests.get(&(package.name.clone(), package.version.clone())) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": digest }]);
    }
    component
}

fn purl(package: &Package) -> String {
    // A plus sign begins a version's build, and is written as its number in a URL.
    format!("pkg:cargo/{}@{}", package.name, package.version.replace('+', "%2B"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_what_is_linked_and_not_what_only_builds_or_tests() {
        let package = |name: &str, source: Value| {
            json!({ "id": name, "name": name, "version": "1.0.0+a", "license": "MIT/Apache-2.0",
                "source": source })
        };
        let needs =
            |name: &str, kind: Value| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [package("pvmm-jailer", Value::Null), package("libc", "registry".into()),
                package("cc", "registry".into()), package("tempfile", "registry".into())],
            "resolve": { "nodes": [
                { "id": "pvmm-jailer", "deps": [needs("libc", Value::Null),
                    needs("cc", "build".into()), needs("tempfile", "dev".into())] },
                { "id": "libc", "deps": [] },
            ] },
        });
        let lock = "[[package]]\nname = \"libc\"\nversion = \"1.0.0+a\"\nchecksum = \"ab\"\n";
        let list = document(&serde_json::from_value(metadata).unwrap(), &digests(lock));
        assert_eq!(list["components"].as_array().unwrap().len(), 2);
        assert_eq!(list["components"][0]["purl"], "pkg:cargo/libc@1.0.0%2Ba");
        assert_eq!(list["components"][0]["hashes"][0]["content"], "ab");
        assert_eq!(list["components"][1]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(list["dependencies"][2]["dependsOn"], json!(["pkg:cargo/libc@1.0.0%2Ba"]));
    }
}
