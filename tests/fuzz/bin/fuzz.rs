//! The fuzz targets under libFuzzer, all in one program: `PVMM_FUZZ` names the one to run.
//!
//! One program and not one for each, because instrumented builds are slow.
#![no_main]

use std::sync::LazyLock;

use pvmm_fuzz::{TARGETS, Target};

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("PVMM_FUZZ").unwrap_or_default();
    match TARGETS.iter().find(|(known, _)| *known == name) {
        Some((_, target)) => *target,
        None => {
            let known: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
            eprintln!("set PVMM_FUZZ to one of {}", known.join(", "));
            std::process::exit(2)
        }
    }
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    (*TARGET)(bytes);
});
