//! The parser of `--drive`: a path and its options.
//!
//! Pure, like the parsers of other flags, and run before anything is created; the file itself is
//! checked when the VM opens it.

use std::path::PathBuf;

use pvmm::Drive;
use pvmm::config::{BucketConfig, CacheMode, EngineKind, RateLimiterConfig};

/// The value of one `--drive` flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveFlag {
    pub path: PathBuf,
    pub read_only: bool,
    pub direct: bool,
    pub cache: CacheMode,
    pub engine: EngineKind,
    pub limits: RateLimiterConfig,
}

impl DriveFlag {
    pub fn into_drive(self) -> Drive {
        let mut drive =
            if self.read_only { Drive::read_only(self.path) } else { Drive::writable(self.path) };
        drive.direct = self.direct;
        drive.cache = self.cache;
        drive.engine = self.engine;
        drive.limits = self.limits;
        drive
    }
}

/// Parses
/// `PATH[,ro][,direct][,cache=writeback|unsafe][,engine=plain|io_uring|auto][,bps=SIZE][,iops=N]`.
pub fn parse(text: &str) -> Result<DriveFlag, String> {
    let mut words = text.split(',');
    let path = words.next().unwrap_or_default();
    if path.is_empty() {
        return Err("the path is empty; write PATH, or PATH,ro".to_owned());
    }
    // Made absolute, because the monitor process may have another current directory.
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    let mut drive = DriveFlag {
        path,
        read_only: false,
        direct: false,
        cache: CacheMode::default(),
        engine: EngineKind::default(),
        limits: RateLimiterConfig::default(),
    };
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("ro", "") => drive.read_only = true,
            ("direct", "") => drive.direct = true,
            ("cache", "writeback") => drive.cache = CacheMode::Writeback,
            ("cache", "unsafe") => drive.cache = CacheMode::Unsafe,
            ("cache", _) => return Err("cache is writeback or unsafe".to_owned()),
            ("engine", "plain") => drive.engine = EngineKind::Plain,
            ("engine", "io_uring") => drive.engine = EngineKind::IoUring,
            ("engine", "auto") => drive.engine = EngineKind::Auto,
            ("engine", _) => return Err("engine is plain, io_uring or auto".to_owned()),
            ("bps", rate) => drive.limits.bytes = Some(per_second("bps", rate)?),
            ("iops", rate) => drive.limits.ops = Some(per_second("iops", rate)?),
            _ => {
                return Err(format!(
                    "unknown word '{word}'; use ro, direct, cache=, engine=, bps= or iops="
                ));
            }
        }
    }
    Ok(drive)
}

/// Parses a rate per second: `500`, `20K`, `100M`, `1G`.
pub fn per_second(word: &str, text: &str) -> Result<BucketConfig, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" => Some(0),
        "k" => Some(10),
        "m" => Some(20),
        "g" => Some(30),
        _ => None,
    };
    let number = digits.parse::<u64>().ok().zip(shift);
    match number.and_then(|(number, shift)| number.checked_mul(1 << shift)) {
        Some(rate @ 1..) => Ok(BucketConfig::per_second(rate)),
        _ => Err(format!("{word} is a number from 1 with K, M or G, as in {word}=100M")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drive_with_every_word_is_what_was_asked_for() {
        let drive = parse("/a/b.img,ro,direct,cache=unsafe,engine=auto,bps=2M,iops=1k").unwrap();
        assert_eq!(drive.path, PathBuf::from("/a/b.img"));
        assert!(drive.read_only && drive.direct);
        assert_eq!((drive.cache, drive.engine), (CacheMode::Unsafe, EngineKind::Auto));
        assert_eq!(drive.limits.bytes, Some(BucketConfig::per_second(2 << 20)));
        assert_eq!(drive.limits.ops, Some(BucketConfig::per_second(1024)));
        let plain = parse("b.img").unwrap();
        assert!(plain.path.is_absolute() && !plain.read_only && !plain.limits.is_limited());
    }

    #[test]
    fn drive_with_a_wrong_word_names_it() {
        for (text, named) in [
            ("", "path"),
            (",ro", "path"),
            ("a,rw", "'rw'"),
            ("a,ro=1", "'ro=1'"),
            ("a,cache=none", "writeback"),
            ("a,engine=", "io_uring"),
            ("a,bps=0", "bps"),
            ("a,bps=1T", "bps"),
            ("a,iops=-1", "iops"),
            ("a,iops=99999999999999999999", "iops"),
            ("a,bps=18446744073709551615G", "bps"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
