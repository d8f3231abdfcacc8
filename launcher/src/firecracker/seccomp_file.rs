//! The file of `--seccomp-filter`: filters of the caller's own, as Firecracker's seccompiler writes
//! them.
//!
//! The file is a map of thread names to BPF programs in bincode's encoding with fixed-size
//! integers, little endian: a count, then for each entry a length and the name, a length and the
//! instructions of eight bytes each.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use pvmm::{SystemCallFilter, ThreadFilters};

use pvmm_sandbox::seccomp::Filters;

/// The largest file: Firecracker's own limit.
const FILE_MAX: u64 = 100_000;
/// The threads that a file must have filters for, and no others.
const THREADS: [&str; 3] = ["vmm", "api", "vcpu"];
/// Allows every call. A thread with an empty program is not confined, as in Firecracker.
const ALLOW: u64 = 0x7fff_0000_0000_0006;

/// Reads the filters of a file. An error is in Firecracker's words.
pub fn read(path: &Path) -> Result<Filters, String> {
    let opened = File::open(path).map_err(|error| format!("Filter file open error: {error}"))?;
    let mut bytes = Vec::new();
    let read = opened.take(FILE_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|error| format!("Filter file open error: {error}"))?;
    if bytes.len() as u64 > FILE_MAX {
        return Err(format!("Filter deserialization failed: more than {FILE_MAX} bytes"));
    }
    parse(&bytes)
}

/// The threads of the VM other than vCPUs get the program of `vmm`, the API server that of `api`.
fn parse(bytes: &[u8]) -> Result<Filters, String> {
    let malformed = || "Filter deserialization failed: the file is too short".to_owned();
    let mut programs = decode(bytes).ok_or_else(malformed)?;
    let unknown = |(name, _): &&(String, Vec<u64>)| !THREADS.contains(&name.as_str());
    if let Some((name, _)) = programs.iter().find(unknown) {
        return Err(format!("Invalid thread categories: {name}"));
    }
    let mut filter = |name: &str| {
        let place = programs.iter().position(|(of, _)| of == name);
        let place = place.ok_or_else(|| format!("Missing thread category: {name}"))?;
        let (_, mut program) = programs.swap_remove(place);
        if program.is_empty() {
            program.push(ALLOW);
        }
        SystemCallFilter::new(&program).map_err(|error| format!("{name}: {error}"))
    };
    let [vmm, api, vcpu] = THREADS.map(&mut filter);
    let (vmm, owner) = (vmm?, api?);
    let mut threads = ThreadFilters::all(&vmm);
    threads.vcpu = vcpu?;
    Ok(Filters { threads: Arc::new(threads), owner, log: vmm })
}

fn decode(mut bytes: &[u8]) -> Option<Vec<(String, Vec<u64>)>> {
    let rest = &mut bytes;
    let count = number(rest)?;
    let mut programs = Vec::new();
    for _ in 0..count {
        let length = usize::try_from(number(rest)?).ok()?;
        let name = rest.split_off(..length)?;
        let name = String::from_utf8(name.to_vec()).ok()?.to_lowercase();
        let length = number(rest)?;
        let program = (0..length).map(|_| number(rest)).collect::<Option<Vec<u64>>>()?;
        programs.push((name, program));
    }
    Some(programs)
}

fn number(bytes: &mut &[u8]) -> Option<u64> {
    let word = bytes.split_off(..8)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(programs: &[(&str, &[u64])]) -> Vec<u8> {
        let mut bytes = (programs.len() as u64).to_le_bytes().to_vec();
        for (name, program) in programs {
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend((program.len() as u64).to_le_bytes());
            bytes.extend(program.iter().flat_map(|word| word.to_le_bytes()));
        }
        bytes
    }

    fn refused(bytes: &[u8]) -> String {
        parse(bytes).err().unwrap()
    }

    #[test]
    fn file_with_the_three_threads_is_taken() {
        let bytes = encoded(&[("VMM", &[ALLOW]), ("api", &[]), ("Vcpu", &[ALLOW, ALLOW])]);
        assert!(parse(&bytes).is_ok());
    }

    #[test]
    fn file_that_is_cut_off_or_claims_too_much_is_refused() {
        let whole = encoded(&[("vmm", &[ALLOW]), ("api", &[]), ("vcpu", &[ALLOW])]);
        for end in 0..whole.len() {
            assert!(refused(&whole[..end]).starts_with("Filter deserialization failed"), "{end}");
        }
        for claimed in [[0xff; 8], [0, 0, 0, 0, 0, 0, 0, 0x80]] {
            assert!(refused(&[&claimed[..], &whole[8..]].concat()).contains("too short"));
        }
    }

    #[test]
    fn file_without_a_thread_or_with_an_unknown_one_is_refused() {
        let missing = encoded(&[("vmm", &[ALLOW]), ("vcpu", &[ALLOW])]);
        assert_eq!(refused(&missing), "Missing thread category: api");
        let unknown = encoded(&[("net", &[ALLOW])]);
        assert_eq!(refused(&unknown), "Invalid thread categories: net");
        let long = vec![ALLOW; 4097];
        let long = encoded(&[("vmm", &long), ("api", &[]), ("vcpu", &[])]);
        assert!(refused(&long).contains("4097 instructions"), "{}", refused(&long));
    }
}
