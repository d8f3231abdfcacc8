//! Compiles the system call filters of the monitor process from `seccomp/x86_64.policy`.
//!
//! The result is Rust source: one constant for each kind of thread, with the eight bytes of each
//! BPF instruction as a number.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

use policy::{Policy, Rule, Thread};
use seccompiler::{BpfProgram, TargetArch, sock_filter};
use serde_json::{Value, json};

#[path = "seccomp/policy.rs"]
mod policy;

const POLICY: &str = "seccomp/x86_64.policy";

// Instructions of classic BPF.
const LOAD_WORD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
/// The offset of the number in the kernel's `seccomp_data`.
const CALL_NUMBER: u32 = 0;
const SECCOMP_RET_ERRNO: u32 = 0x0005_0000;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={POLICY}");
    println!("cargo::rerun-if-changed=seccomp/policy.rs");
    let text = fs::read_to_string(POLICY)?;
    let policy = Policy::parse(&text).map_err(|error| format!("{POLICY}: {error}"))?;
    let mut source = String::new();
    for (name, program) in compile(&policy)? {
        let words: Vec<String> = program.iter().map(|it| format!("{:#x}", encoded(it))).collect();
        writeln!(source, "/// The filter of `{name}`.")?;
        writeln!(source, "pub const {}: &[u64] = &[{}];", name.to_uppercase(), words.join(", "))?;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    fs::write(out.join("filters.rs"), source)?;
    Ok(())
}

fn compile(policy: &Policy) -> Result<BTreeMap<String, BpfProgram>, Box<dyn Error>> {
    let filters: serde_json::Map<String, Value> =
        policy.threads.iter().map(|thread| (thread.name.clone(), filter(thread))).collect();
    let json = serde_json::to_vec(&filters)?;
    let compiled = seccompiler::compile_from_json(json.as_slice(), TargetArch::x86_64)?;
    let mut programs = BTreeMap::new();
    for thread in &policy.threads {
        let mut program = Vec::new();
        for rule in &thread.rules {
            if let Some(error) = rule.error {
                program.extend(refusal(rule, error)?);
            }
        }
        program.extend(compiled.get(&thread.name).ok_or("a filter is missing")?.iter().cloned());
        programs.insert(thread.name.clone(), program);
    }
    Ok(programs)
}

/// Returns the rules of a thread in seccompiler's JSON.
fn filter(thread: &Thread) -> Value {
    let allowed = thread.rules.iter().filter(|rule| rule.error.is_none());
    let rules: Vec<Value> = allowed.map(allowing).collect();
    json!({ "mismatch_action": "kill_process", "match_action": "allow", "filter": rules })
}

fn allowing(rule: &Rule) -> Value {
    let condition = |it: &policy::Condition| {
        let operation =
            if it.mask == u32::MAX { json!("eq") } else { json!({ "masked_eq": it.mask }) };
        json!({ "index": it.argument, "type": "dword", "op": operation, "val": it.value })
    };
    let conditions: Vec<Value> = rule.conditions.iter().map(condition).collect();
    if conditions.is_empty() {
        json!({ "syscall": rule.call })
    } else {
        json!({ "syscall": rule.call, "args": conditions })
    }
}

/// Returns instructions that answer a call with an error, for the beginning of a program. A filter
/// of seccompiler has only one answer for the calls that it names.
fn refusal(rule: &Rule, error: u32) -> Result<[sock_filter; 3], Box<dyn Error>> {
    let number = match rule.call.as_str() {
        "clone3" => libc::SYS_clone3,
        other => return Err(format!("line {}: {other} cannot be refused", rule.line).into()),
    };
    let number = u32::try_from(number)?;
    let instruction = |code, jf, k| sock_filter { code, jt: 0, jf, k };
    Ok([
        instruction(LOAD_WORD, 0, CALL_NUMBER),
        instruction(JUMP_IF_EQUAL, 1, number),
        instruction(RETURN, 0, SECCOMP_RET_ERRNO | error),
    ])
}

fn encoded(it: &sock_filter) -> u64 {
    u64::from(it.code) | u64::from(it.jt) << 16 | u64::from(it.jf) << 24 | u64::from(it.k) << 32
}
