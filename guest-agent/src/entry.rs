//! Where the C library hands over to us.
//! The standard library's own start aborts when descriptors 0 to 2 are closed and there is no
//! /dev/null, which is how a kernel without a console starts its first process.
#![allow(unsafe_code)] // the symbol `main` has a fixed meaning
#![cfg(not(test))]

#[unsafe(no_mangle)]
extern "C" fn main(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    crate::run()
}
