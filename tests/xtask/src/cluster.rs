//! `cargo xtask test-cluster`: pods of Kubernetes in VMs, by a control plane and a kubelet that are
//! built from Debian's source package.
//!
//! Debian ships only the client of Kubernetes as a program, so the others are built here, with
//! Debian's Go and the libraries that the source package brings along. What was built is kept under
//! the digest of everything that it was built from.

use std::collections::BTreeSet;
use std::error::Error;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::{env, fs, io};

use sha2::{Digest, Sha256};

use crate::compat::{check, on_kvm};
use crate::{artifacts, cache, cargo, checkout, packages, progress, report};

const RELEASE: &str = "bookworm";
const SOURCE: &str = "kubernetes";
/// The import path of the source, which is in the names of its variables.
const SOURCE_PATH: &str = "k8s.io/kubernetes";
/// The version that the programs tell each other.
const VERSION: [(&str, &str); 3] =
    [("gitVersion", "v1.20.2"), ("gitMajor", "1"), ("gitMinor", "20")];
const PROGRAMS: [&str; 5] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"];
const GO: [&str; 2] = ["golang-1.19-go", "golang-1.19-src"];
const GO_ROOT: &str = "usr/lib/go-1.19";
/// Packages whose programs run in the cluster.
const RUN: [&str; 4] = ["containerd", "containernetworking-plugins", "etcd-server", "runc"];

/// Parts of the paths of APIs that are not the cluster's own.
const OTHER_APIS: [&str; 5] =
    ["/code-generator/", "/sample-apiserver/", "/testdata/", "/kube-openapi/", "/gengo/"];

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only flows with this in their names
    names: Vec<OsString>,
}

pub fn run(options: &Options) -> ExitCode {
    match test(options) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("test-cluster: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn test(options: &Options) -> Result<u8, Box<dyn Error>> {
    packages::install(&["busybox-static", "dpkg-dev", "iproute2", "openssl", "procps", "python3"])?;
    let built = ["build", "--release", "--package", "pvmm-launcher", "--package", "pvmm-shim"];
    cargo::run(&built)?;
    artifacts::prepare()?;
    artifacts::prepare_template("container")?;
    let cluster = programs()?;
    let programs = cargo::target_dir().join("release");
    let mut argv: Vec<OsString> =
        vec!["env".into(), "PVMM_RUNTIME_DIR=/tmp/pvmm-cluster".into(), "python3".into()];
    argv.push(checkout::root().join("tests/cluster/cluster.py").into());
    argv.extend([programs.join("pvmm").into(), programs.into(), cluster.into()]);
    argv.extend(options.names.iter().cloned());
    progress::step("pods of Kubernetes");
    on_kvm(&argv)
}

/// Returns the root below which the programs of a cluster are, made unless they are there.
fn programs() -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join("tools").join(format!("cluster-{RELEASE}"));
    let archives = place.join("archives");
    if !archives.is_dir() {
        let part = emptied(&place.join("archives.part"))?;
        let release = packages::Release::open(RELEASE, &part)?;
        release.download_source(SOURCE)?;
        release.download(&[&GO[..], &RUN[..]].concat())?;
        release.close()?;
        fs::rename(&part, &archives)?;
    }
    let made = place.join(digest(&archives)?);
    if !made.is_dir() {
        let part = emptied(&place.join("made.part"))?;
        for name in RUN {
            unpack(&archive(&archives, name)?, &part)?;
        }
        let work = emptied(&place.join("work"))?;
        build(&archives, &work, &part.join("usr/bin"))?;
        fs::remove_dir_all(&work)?;
        fs::rename(&part, &made)?;
    }
    Ok(made)
}

/// Builds the programs of Kubernetes into the folder `to`.
fn build(archives: &Path, work: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    for name in GO {
        unpack(&archive(archives, name)?, work)?;
    }
    // Libraries are found beside the source only below a path of this form.
    let source = work.join("path/src/k8s.io/kubernetes");
    fs::create_dir_all(source.parent().unwrap_or(work))?;
    let mut unpack = Command::new("dpkg-source");
    unpack.args(["-x"]).arg(archive(archives, SOURCE)?).arg(&source);
    check(unpack.stdin(Stdio::null()).stdout(Stdio::null()), "dpkg-source")?;
    progress::step("building Kubernetes: 15 minutes on two processors");
    let root = work.join(GO_ROOT);
    let mut path = vec![root.join("bin")];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let path = env::join_paths(path)?;
    let go = |program: &Path| {
        let mut go = Command::new(program);
        let places = [("GOPATH", work.join("path")), ("GOCACHE", work.join("cache"))];
        go.envs(places).env("GOROOT", &root).env("PATH", &path);
        go.envs([("CGO_ENABLED", "0"), ("GO111MODULE", "off"), ("GOPROXY", "off")]);
        go.current_dir(&source).stdin(Stdio::null());
        go
    };
    describe_api(&source, work, go)?;
    let mut build = go(Path::new("go"));
    build.args(arguments()).arg("-o").arg(to).args(PROGRAMS.map(|name| format!("./cmd/{name}")));
    check(&mut build, "go build")
}

/// Makes the description of the API, the one generated file that the source package lacks.
fn describe_api(
    source: &Path,
    work: &Path,
    go: impl Fn(&Path) -> Command,
) -> Result<(), Box<dyn Error>> {
    let generator = work.join("openapi-gen");
    let mut build = go(Path::new("go"));
    build.args(["build", "-o"]).arg(&generator).arg("./vendor/k8s.io/kube-openapi/cmd/openapi-gen");
    check(&mut build, "go build of openapi-gen")?;
    let tag = ["-Rl", "--include=*.go", "+k8s:openapi-gen="];
    let mut grep = Command::new("grep");
    grep.args(tag).args(["pkg", "vendor/k8s.io"]).current_dir(source);
    let found = String::from_utf8(grep.output()?.stdout)?;
    let is_other = |file: &&str| OTHER_APIS.iter().any(|other| file.contains(other));
    let folders: BTreeSet<String> = found
        .lines()
        .filter(|file| !is_other(file) && !file.ends_with("_test.go"))
        .filter_map(|file| Some(format!("{SOURCE_PATH}/{}", file.rsplit_once('/')?.0)))
        .collect();
    let mut generate = go(&generator);
    generate.args(["--logtostderr", "-O", "zz_generated.openapi", "-p"]);
    generate.arg(format!("{SOURCE_PATH}/pkg/generated/openapi"));
    generate.args(["-h", "hack/boilerplate/boilerplate.generatego.txt", "-r"]);
    generate.arg(work.join("violations")).arg("-i").arg(Vec::from_iter(folders).join(","));
    check(&mut generate, "openapi-gen")
}

/// Returns the arguments of Go that decide what the programs are.
fn arguments() -> [String; 4] {
    let mut flags = "-s -w".to_owned();
    for package in ["component-base/version", "client-go/pkg/version"] {
        for (name, value) in VERSION {
            let _ = write!(flags, " -X {SOURCE_PATH}/vendor/k8s.io/{package}.{name}={value}");
        }
    }
    ["build".into(), "-trimpath".into(), "-ldflags".into(), flags]
}

/// Returns the digest of everything that the programs are made from.
fn digest(archives: &Path) -> Result<String, Box<dyn Error>> {
    let mut names: Vec<PathBuf> =
        fs::read_dir(archives)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    names.sort();
    let mut hash = Sha256::new();
    for word in arguments().iter().map(String::as_str).chain(PROGRAMS).chain(RUN) {
        hash.update(word);
        hash.update([0]);
    }
    for name in names {
        hash.update(Sha256::digest(fs::read(name)?));
    }
    Ok(hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the file of a package: of a source package its description.
fn archive(archives: &Path, name: &str) -> Result<PathBuf, Box<dyn Error>> {
    let kind = if name == SOURCE { "dsc" } else { "deb" };
    let begin = format!("{name}_");
    for entry in fs::read_dir(archives)? {
        let path = entry?.path();
        let named = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if named.starts_with(&begin) && path.extension().is_some_and(|ext| ext == kind) {
            return Ok(path);
        }
    }
    Err(format!("{} has no {name}", archives.display()).into())
}

fn unpack(archive: &Path, root: &Path) -> Result<(), Box<dyn Error>> {
    check(Command::new("dpkg-deb").arg("-x").arg(archive).arg(root), "dpkg-deb")
}

/// Makes a folder, without what an earlier run has left there.
fn emptied(dir: &Path) -> io::Result<PathBuf> {
    let _ = fs::remove_dir_all(dir);
    fs::create_dir_all(dir)?;
    Ok(dir.to_owned())
}
