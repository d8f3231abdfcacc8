//! Parsers of flag values: sizes, durations, environment variables, names, `VM:PATH`.
//!
//! All are functions from text to value, which at most read a file, so that every error can be
//! tested and is reported before anything is created.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pvmm::config::{MAX_MEMORY_MIB, MAX_VCPUS, MIN_MEMORY_MIB};
use pvmm::cpu::{CpuModifiers, TEMPLATE_FILE_MAX};
use pvmm::{CpuBaseline, open};
use pvmm_images::{overlay, volume};
use pvmm_registry::Reference;

use crate::exit;

/// Parses `--name`.
pub use pvmm_sandbox::vm_dir::check_name as vm_name;
/// Parses `--uid-range`.
pub use pvmm_sandbox::vm_dir::uid_range;

/// The longest `--timeout`: thirty days.
const MAX_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);
/// The smallest and largest writable disk of a guest.
const MIN_DISK_MIB: u64 = overlay::MIN_BYTES >> 20;
const MAX_DISK_MIB: u64 = overlay::MAX_BYTES >> 20;
/// The largest `--max-size`; no filesystem holds more.
const MAX_COPY_MIB: u64 = 1 << 30;

/// Parses a size in MiB: `512M`, `2G`, or `512` (MiB).
fn size_mib(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    if digits.is_empty() {
        return Err("write a number and a unit, such as 512M or 2G".to_owned());
    }
    let too_large = || "the number is too large".to_owned();
    let number: u64 = digits.parse().map_err(|_| too_large())?;
    let mib_per_unit = match unit.to_ascii_lowercase().as_str() {
        "" | "m" | "mb" | "mib" => 1,
        "g" | "gb" | "gib" => 1 << 10,
        "t" | "tb" | "tib" => 1 << 20,
        _ => return Err(format!("unknown unit '{unit}'; use M, G or T, as in 512M or 2G")),
    };
    number.checked_mul(mib_per_unit).ok_or_else(too_large)
}

/// Parses `--memory` in MiB, within the limits of a VM.
pub fn memory_mib(text: &str) -> Result<u64, String> {
    in_range(size_mib(text)?, MIN_MEMORY_MIB, MAX_MEMORY_MIB)
}

/// Parses the target size of a balloon in MiB; zero is allowed.
pub fn balloon_mib(text: &str) -> Result<u64, String> {
    in_range(size_mib(text)?, 0, MAX_MEMORY_MIB)
}

/// Parses `--disk-size` in MiB.
pub fn disk_mib(text: &str) -> Result<u64, String> {
    in_range(size_mib(text)?, MIN_DISK_MIB, MAX_DISK_MIB)
}

/// Parses the size of a volume in MiB.
pub fn volume_mib(text: &str) -> Result<u64, String> {
    in_range(size_mib(text)?, volume::MIN_BYTES >> 20, volume::MAX_BYTES >> 20)
}

/// Parses `--volume`: `NAME[:/FOLDER][:ro]`.
pub fn volume_mount(text: &str) -> Result<VolumeFlag, String> {
    const SHAPE: &str = "write NAME, NAME:/FOLDER or NAME:/FOLDER:ro";
    let (rest, read_only) = match text.strip_suffix(":ro") {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let (name, at) = rest.split_once(':').unwrap_or((rest, "/workspace"));
    if !at.starts_with('/') || at.len() < 2 || at.contains(char::is_control) {
        return Err(SHAPE.to_owned());
    }
    Ok(VolumeFlag { name: vm_name(name)?, at: at.to_owned(), read_only })
}

/// The value of one `--volume` flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeFlag {
    pub name: String,
    pub at: String,
    pub read_only: bool,
}

/// The value of an `--image` flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageFlag {
    /// A file or folder of this host, and the one that is meant where it has several images.
    Here { path: PathBuf, name: Option<String> },
    /// An image in a registry.
    Registry(Box<Reference>),
}

/// Parses a container image: a path that is there, `PATH:NAME`, or the name of an image in a
/// registry; with or without the words that other tools put before them.
pub fn image(text: &str) -> Result<ImageFlag, String> {
    let kinds = ["oci:", "oci-archive:", "docker-archive:"];
    let plain = kinds.iter().find_map(|kind| text.strip_prefix(kind)).unwrap_or(text);
    let named = plain.match_indices(':').map(|(at, _)| (&plain[..at], Some(&plain[at + 1..])));
    let mut found = std::iter::once((plain, None)).chain(named);
    if let Some((path, name)) = found.find(|(path, _)| Path::new(path).exists()) {
        return Ok(ImageFlag::Here { path: path.into(), name: name.map(str::to_owned) });
    }
    let reference = text.parse().map_err(|error| format!("there is no such file; {error}"))?;
    Ok(ImageFlag::Registry(Box::new(reference)))
}

/// How long a VM may live from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime(pub Option<Duration>);

/// Parses a time to live, or `none`.
pub fn ttl(text: &str) -> Result<Lifetime, String> {
    match text {
        "none" => Ok(Lifetime(None)),
        text => duration(text).map(|ttl| Lifetime(Some(ttl))),
    }
}

/// Parses `--max-size` of a copy in MiB.
pub fn copy_mib(text: &str) -> Result<u64, String> {
    in_range(size_mib(text)?, 1, MAX_COPY_MIB)
}

fn in_range(mib: u64, min: u64, max: u64) -> Result<u64, String> {
    if (min..=max).contains(&mib) {
        Ok(mib)
    } else {
        Err(format!("use a size from {min}M to {}T", max >> 20))
    }
}

/// Parses `--cpus`.
pub fn cpus(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(count) if (1..=MAX_VCPUS).contains(&count) => Ok(count),
        _ => Err(format!("use a number from 1 to {MAX_VCPUS}")),
    }
}

/// Parses `--cpu`: the name of a processor baseline, or a file with a CPU template.
pub fn cpu(text: &str) -> Result<CpuBaseline, String> {
    if let Some(named) = CpuBaseline::named(text) {
        return Ok(named);
    }
    let read = || {
        let mut bytes = Vec::new();
        let file = open::file(Path::new(text), open::Access::Read)?;
        file.take(TEMPLATE_FILE_MAX as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error: io::Error| {
        let names = "use host, x86-64-v2, x86-64-v3, x86-64-v4, or a CPU template's file";
        format!("{}; {names}", exit::io_text(&error))
    })?;
    CpuModifiers::from_json(&bytes).map(CpuBaseline::from).map_err(|error| error.to_string())
}

/// Parses the `--cpu` of commands that pass it on by name.
pub fn named_cpu(text: &str) -> Result<CpuBaseline, String> {
    let named = CpuBaseline::named(text);
    named.ok_or_else(|| "use host, x86-64-v2, x86-64-v3 or x86-64-v4".to_owned())
}

/// Parses a duration: `30s`, `500ms`, `1.5m`, `2h`, or `30` (seconds).
pub fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds_per_unit = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(format!("unknown unit '{unit}'; use ms, s, m, h or d, as in 30s")),
    };
    let number: f64 =
        number.parse().map_err(|_| "write a number and a unit, such as 30s or 5m".to_owned())?;
    let length = Duration::try_from_secs_f64(number * seconds_per_unit).unwrap_or(Duration::MAX);
    if length < Duration::from_millis(1) {
        return Err("use at least 1ms".to_owned());
    }
    if length > MAX_TIMEOUT {
        return Err("use at most 30d".to_owned());
    }
    Ok(length)
}

/// An environment variable for a command in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvVar {
    pub name: OsString,
    pub value: OsString,
}

/// Parses `NAME=VALUE`.
pub fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write NAME=VALUE".to_owned()),
    }
}

/// Parses `KEY=VALUE`, or `KEY` alone for its value in this process's environment.
pub fn env_var(text: &OsStr) -> Result<EnvVar, String> {
    env_var_from(text, |name| std::env::var_os(name))
}

fn env_var_from(
    text: &OsStr,
    host: impl FnOnce(&OsStr) -> Option<OsString>,
) -> Result<EnvVar, String> {
    let bytes = text.as_bytes();
    let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
        Some(equals) => (&bytes[..equals], Some(&bytes[equals + 1..])),
        None => (bytes, None),
    };
    if name.is_empty() {
        return Err("the name before '=' is empty; write KEY=VALUE".to_owned());
    }
    let name = OsStr::from_bytes(name);
    let value = match value {
        Some(value) => OsString::from_vec(value.to_vec()),
        None => host(name).ok_or("the variable is not set here; write KEY=VALUE")?,
    };
    Ok(EnvVar { name: name.to_owned(), value })
}

/// Parses `--memory` of a command in MiB; the guest's memory is the actual upper bound.
pub fn limit_mib(text: &str) -> Result<u64, String> {
    in_range(size_mib(text)?, 1, MAX_MEMORY_MIB)
}

/// Parses `--cpus` of a command, in thousandths of a CPU.
pub fn cpu_milli(text: &str) -> Result<u32, String> {
    match text.parse::<f64>() {
        Ok(cpus) if (0.01..=1024.0).contains(&cpus) => Ok((cpus * 1000.0).round() as u32),
        _ => Err("use a number from 0.01 to 1024, such as 0.5".to_owned()),
    }
}

/// A detached command in a VM: `VM:ID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessName {
    pub vm: String,
    pub id: u64,
}

/// Parses `VM:ID`.
pub fn process(text: &str) -> Result<ProcessName, String> {
    let parts = text.rsplit_once(':').filter(|(vm, _)| !vm.is_empty());
    let id = parts.and_then(|(_, id)| id.parse().ok());
    match (parts, id) {
        (Some((vm, _)), Some(id)) => Ok(ProcessName { vm: vm.to_owned(), id }),
        _ => Err("write VM:ID, as in web:7; `pvmm ps VM` lists them".to_owned()),
    }
}

/// Parses `--user`: a name or number, optionally with a group.
pub fn user(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(|c: char| c.is_whitespace() || c.is_control()) {
        Err("write a user name or number, as in nobody or 1000:1000".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

/// Parses `--workdir`, an absolute path in the guest.
pub fn workdir(text: &OsStr) -> Result<PathBuf, String> {
    if text.as_bytes().starts_with(b"/") {
        Ok(PathBuf::from(text))
    } else {
        Err("write an absolute path in the guest, as in /work".to_owned())
    }
}

/// The source or the target of `pvmm cp`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Host(PathBuf),
    Guest { vm: String, path: PathBuf },
}

/// Parses `VM:PATH`, or a path on the host; a slash before the first colon makes it a host path.
pub fn place(text: &OsStr) -> Result<Place, String> {
    let bytes = text.as_bytes();
    if bytes.is_empty() {
        return Err("the path is empty".to_owned());
    }
    let colon = bytes.iter().position(|byte| *byte == b':');
    let Some(colon) = colon.filter(|colon| !bytes[..*colon].contains(&b'/')) else {
        return Ok(Place::Host(PathBuf::from(text)));
    };
    let vm = std::str::from_utf8(&bytes[..colon]).map_err(|_| "the VM's name is not text")?;
    let path = OsStr::from_bytes(&bytes[colon + 1..]);
    if vm.is_empty() || path.is_empty() {
        return Err("write VM:PATH, as in web:/etc/hosts".to_owned());
    }
    Ok(Place::Guest { vm: vm.to_owned(), path: PathBuf::from(path) })
}

/// Parses `VM:PATH`; refuses a path on the host.
pub fn guest_place(text: &OsStr) -> Result<(String, PathBuf), String> {
    match place(text)? {
        Place::Guest { vm, path } => Ok((vm, path)),
        Place::Host(_) => Err("write VM:PATH, as in web:/srv".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_with_known_unit_is_mib() {
        for (text, mib) in [("512M", 512), ("2G", 2048), ("512", 512), ("1t", 1 << 20)] {
            assert_eq!(memory_mib(text), Ok(mib), "{text}");
        }
        assert_eq!(memory_mib("64MiB"), Ok(64));
    }

    #[test]
    fn memory_out_of_reach_is_refused() {
        let wrong =
            ["", "M", "1M", "31", "2T", "0", "-1", "1.5G", "512K", "5 12", "18446744073709551616"];
        for text in wrong.into_iter().chain(["18446744073709551615T", "0x10", "１G"]) {
            assert!(memory_mib(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cpu_is_a_baseline_by_name_or_a_template_file() {
        for name in ["host", "x86-64-v2", "x86-64-v3", "x86-64-v4"] {
            assert_eq!(cpu(name).map(|cpu| cpu.name()), Ok(name));
            assert_eq!(named_cpu(name).map(|cpu| cpu.name()), Ok(name));
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), r#"{"msr_modifiers": [{"addr": "1", "bitmap": "0b1"}]}"#)
            .unwrap();
        let path = file.path().to_str().unwrap();
        assert_eq!(cpu(path).map(|cpu| cpu.name()), Ok(CpuBaseline::CUSTOM));
        assert!(named_cpu(path).is_err());
        std::fs::write(file.path(), r#"{"leaves": []}"#).unwrap();
        assert!(cpu(path).unwrap_err().starts_with("leaves: is not known"));
        assert!(cpu("x86-64-v1").unwrap_err().contains("use host, x86-64-v2"));
        assert!(cpu("/dev").is_err());
    }

    #[test]
    fn cpus_out_of_range_is_refused() {
        assert_eq!(cpus("1"), Ok(1));
        assert_eq!(cpus("32"), Ok(32));
        for text in ["0", "33", "-1", "two", "", "4294967297"] {
            assert!(cpus(text).is_err(), "{text}");
        }
    }

    #[test]
    fn duration_with_known_unit_is_read() {
        for (text, ms) in [("30s", 30_000), ("500ms", 500), ("1.5m", 90_000), ("2", 2000)] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
    }

    #[test]
    fn duration_that_makes_no_sense_is_refused() {
        for text in
            ["", "s", "0", "0s", "-1s", "1y", "1 s", "31d", "1e9s", "nan", "..", "9999999999999h"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn env_var_with_equals_keeps_the_rest_as_value() {
        let var = env_var_from(OsStr::new("A=b=c"), |_| None);
        assert_eq!(var, Ok(EnvVar { name: "A".into(), value: "b=c".into() }));
        let var = env_var_from(OsStr::new("A="), |_| None);
        assert_eq!(var, Ok(EnvVar { name: "A".into(), value: "".into() }));
    }

    #[test]
    fn env_var_without_value_is_taken_from_here_or_refused() {
        let var = env_var_from(OsStr::new("A"), |_| Some("here".into()));
        assert_eq!(var, Ok(EnvVar { name: "A".into(), value: "here".into() }));
        assert!(env_var_from(OsStr::new("A"), |_| None).is_err());
        assert!(env_var_from(OsStr::new("=x"), |_| None).is_err());
        assert!(env_var_from(OsStr::new(""), |_| None).is_err());
    }

    #[test]
    fn vm_name_that_is_a_path_or_an_id_is_refused() {
        assert!(vm_name("web-1.test_2").is_ok());
        for text in ["", ".", "..", "a/b", "-a", "a b", "é", "0123456789ab", &"x".repeat(64)] {
            assert!(vm_name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn image_is_a_path_that_is_there_and_a_name_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a:b");
        std::fs::write(&path, "").unwrap();
        for (before, name) in [("", None), ("oci:", None), ("docker-archive:", Some("x:1"))] {
            let text = format!(
                "{before}{}{}",
                path.display(),
                name.map_or("".into(), |n| format!(":{n}"))
            );
            let flag = ImageFlag::Here { path: path.clone(), name: name.map(str::to_owned) };
            assert_eq!(image(&text), Ok(flag), "{text}");
        }
        assert!(matches!(image("registry.test/x:1"), Ok(ImageFlag::Registry(_))));
        assert!(image("app.tar").unwrap_err().contains("no such file"));
    }

    #[test]
    fn process_is_a_vm_and_a_number() {
        assert_eq!(process("web:7"), Ok(ProcessName { vm: "web".to_owned(), id: 7 }));
        for text in ["", "web", "web:", ":7", "web:x", "web:-1", "web:7:"] {
            assert!(process(text).is_err(), "{text}");
        }
    }

    #[test]
    fn place_with_colon_is_a_guest_path() {
        let guest = Place::Guest { vm: "web".to_owned(), path: "/etc/hosts".into() };
        assert_eq!(place(OsStr::new("web:/etc/hosts")), Ok(guest));
        assert_eq!(place(OsStr::new("./a:b")), Ok(Place::Host("./a:b".into())));
        assert_eq!(place(OsStr::new("file")), Ok(Place::Host("file".into())));
        for text in ["", ":", "web:", ":/x"] {
            assert!(place(OsStr::new(text)).is_err(), "{text}");
        }
    }
}
