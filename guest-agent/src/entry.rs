//! The entry point that the C library calls.
//!
//! The standard library's own entry aborts when descriptors 0 to 2 are closed and there is no
//! /dev/null, which is how a kernel without a console starts its first process.
#![allow(unsafe_code)] // the symbol `main` has a fixed meaning
#![cfg_attr(test, allow(dead_code))] // under test, the harness is what starts

#[cfg_attr(not(test), unsafe(export_name = "main"))]
extern "C" fn start(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    crate::run()
}
