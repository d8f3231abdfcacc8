//! `cargo xtask demo`: one guest, one line of Python, and what it took.
//!
//! The first thing a newcomer runs, so it does everything by itself and says what it does.

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::on_kvm::{self, Found, NestedPlace};
use crate::{artifacts, cargo, checkout, progress, report};

const PYTHON: &str = "import platform, sys; print(f'Hello from Python {sys.version.split()[0]} on \
                      Linux {platform.release()}: 6 * 7 = {6 * 7}')";

pub fn run() -> ExitCode {
    match demo() {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("demo: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<u8, Box<dyn Error>> {
    let mut phases = Phases::default();

    cargo::run(&["build", "--release", "--package", "pvmm-launcher"])?;
    phases.end("build", "pvmm and its guest agent".into());

    let artifacts = artifacts::prepare()?;
    let parts = format!("{}, template {}", artifacts.kernel.label, artifacts.template.name());
    phases.end("prepare", parts);

    let pvmm = cargo::target_dir().join("release/pvmm");
    let argv: Vec<OsString> = [pvmm.as_os_str().to_owned()]
        .into_iter()
        .chain(["--quiet", "run", "--", "python3", "-c", PYTHON].map(OsString::from))
        .collect();
    std::env::set_current_dir(checkout::root())?;
    let code = match on_kvm::find() {
        Found::Here(host) => {
            phases.end("host", format!("this machine: {} runs guests", host.backend));
            progress::step(format!("running {}", shown(&argv)));
            on_kvm::run_here(&argv)
        }
        Found::NotHere(reason) => {
            progress::step(format!("no usable KVM here: {reason}"));
            progress::step("booting a nested host, a whole machine under emulation");
            let place = NestedPlace::open();
            let kind = match &place {
                Ok(place) if place.is_background() => "the nested host that is up",
                _ => "a nested host of its own (emulated, so slow)",
            };
            phases.end("host", kind.into());
            progress::step(format!("running {}", shown(&argv)));
            on_kvm::code(place.and_then(|place| place.run(&argv)))
        }
    };
    phases.end("guest", "booted, ran Python, gone".into());
    if code == 0 {
        phases.print();
    }
    Ok(code)
}

fn shown(argv: &[OsString]) -> String {
    let words: Vec<_> = argv.iter().map(|word| word.to_string_lossy()).collect();
    words[..words.len() - 1].join(" ") + " …"
}

/// How long each part took.
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
