//! `cargo xtask demo`: runs one line of Python in a guest, and prints how long each part took.
//!
//! A newcomer runs it first, so it prepares everything itself and prints what it does.

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::on_kvm::{self, NestedPlace, OnKvmError, Ran};
use crate::probe::{self, Found};
use crate::{artifacts, cargo, checkout, packages, progress, report, serve};

/// The packages of the client.
const PACKAGES: [&str; 2] = ["python3", "python3-pip"];

const PYTHON: &str = "import platform, sys; print(f'Hello from Python {sys.version.split()[0]} on \
                      Linux {platform.release()}: 6 * 7 = {6 * 7}')";

pub fn run() -> ExitCode {
    match demo() {
        Ok(code) => ExitCode::from(code),
        Err(e) => match e.downcast() {
            Ok(e) => ExitCode::from(on_kvm::code(Err(*e))),
            Err(e) => {
                eprintln!("demo: {}", report::chain(e.as_ref()));
                ExitCode::FAILURE
            }
        },
    }
}

fn demo() -> Result<u8, Box<dyn Error>> {
    let mut phases = Phases::default();
    std::env::set_current_dir(checkout::root())?;

    // The build runs in parallel with the preparation, which mostly waits for the network.
    let build = cargo::start(&cargo::BUILD_PVMM)?;
    let artifacts = artifacts::prepare()?;
    packages::install(&PACKAGES)?;
    let clients = serve::install_python()?;
    let parts = format!("{}, template {}", artifacts.kernel.label, artifacts.template.name());
    phases.end("prepare", parts);

    let early = probe::without_virtualization().map(nested).transpose()?;
    if let Some(place) = &early {
        phases.end("host", kind(place).into());
        // The processor of the nested host is never idle, and the build needs this machine's
        // processors.
        place.pause()?;
    }
    build.wait()?;
    phases.end("build", "pvmm and its guest agent, beside the lines above".into());

    let pvmm = cargo::target_dir().join("release/pvmm");
    let argv: Vec<OsString> = [pvmm.as_os_str().to_owned()]
        .into_iter()
        .chain(["--quiet", "run", "--", "python3", "-c", PYTHON].map(OsString::from))
        .collect();
    let place = match early {
        Some(place) => {
            place.resume()?;
            Some(place)
        }
        None => match probe::find() {
            Found::Here(what) => {
                phases.end("host", format!("this machine: {what}"));
                None
            }
            Found::NotHere(reason) => {
                let place = nested(reason)?;
                phases.end("host", kind(&place).into());
                Some(place)
            }
        },
    };
    progress::step(format!("running {}", shown(&argv)));
    let mut place = place;
    let code = run_in(&mut place, &argv)?;
    phases.end("guest", "booted, ran Python, gone".into());
    if code != 0 {
        return Ok(code);
    }
    // A warm template first: what a sandbox of the service is made from.
    let bake = [&argv[..2], &["template", "bake"].map(OsString::from)].concat();
    let quickstart = serve::program("demo.py", &[clients], &[]);
    let mut code = 0;
    for argv in [bake, quickstart] {
        code = run_in(&mut place, &argv)?;
        if code != 0 {
            break;
        }
    }
    phases.end("service", "made a sandbox and a fork of it, in the published Python client".into());
    if code == 0 {
        phases.print();
    }
    Ok(code)
}

/// Runs a command in the nested host, or here.
fn run_in(place: &mut Option<NestedPlace>, argv: &[OsString]) -> Result<u8, Box<dyn Error>> {
    match place {
        None => Ok(on_kvm::run_here(argv)),
        Some(place) => match place.run_once(argv)? {
            Ran::Exited(code) => Ok(code),
            Ran::HostLost { console, .. } => Err(Box::new(OnKvmError::HostLost { console })),
        },
    }
}

fn nested(reason: String) -> Result<NestedPlace, on_kvm::OnKvmError> {
    progress::step(format!("no usable KVM here: {reason}"));
    progress::step("booting a nested host, a whole machine under emulation");
    NestedPlace::open()
}

fn kind(place: &NestedPlace) -> &'static str {
    if place.is_background() {
        "the nested host that is up"
    } else {
        "a nested host of its own (emulated, so slow)"
    }
}

fn shown(argv: &[OsString]) -> String {
    let words: Vec<_> = argv.iter().map(|word| word.to_string_lossy()).collect();
    words[..words.len() - 1].join(" ") + " …"
}

/// The duration of each phase.
struct Phases {
    began: Instant,
    ended: Vec<(&'static str, Duration, String)>,
}

impl Default for Phases {
    fn default() -> Self {
        Phases { began: Instant::now(), ended: Vec::new() }
    }
}

impl Phases {
    fn end(&mut self, name: &'static str, what: String) {
        self.ended.push((name, self.began.elapsed(), what));
        self.began = Instant::now();
    }

    fn print(&self) {
        eprintln!();
        for (name, took, what) in &self.ended {
            eprintln!("  {name:8} {:7.1} s  {what}", took.as_secs_f64());
        }
    }
}
