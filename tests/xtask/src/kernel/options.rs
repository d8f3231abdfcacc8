//! Reads `kernel-config/`, computes a key of its content, and checks the configuration that Kconfig
//! makes of it.
//!
//! The check is necessary because Kconfig silently drops an option whose dependency is missing.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use sha2::{Digest, Sha256};

/// The version of the build, raised when it changes in a way that the options do not show.
const RECIPE: &str = "1";

#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    #[error("read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path}:{line}: neither CONFIG_NAME=value nor a comment: {text}")]
    Syntax { path: PathBuf, line: usize, text: String },
    #[error("{name} is set in {first} and again in {second}: keep one")]
    Twice { name: String, first: PathBuf, second: PathBuf },
    #[error("no *.config fragment in {dir}")]
    NoFragments { dir: PathBuf },
    #[error("the kernel's configuration came out different: {0}")]
    Dropped(String),
}

/// Options by name (`CONFIG_…`), with values as Kconfig writes them. Absent and unset options are
/// `n`.
type Options = BTreeMap<String, String>;

/// The requested options of the guest kernel, and the options that must result.
pub struct Wanted {
    fragments: Options,
    required: Options,
}

impl Wanted {
    /// Reads every `*.config` of `dir`, and the list `required`. Fails if an option is set twice.
    pub fn read(dir: &Path) -> Result<Self, OptionsError> {
        let unreadable = |source| OptionsError::Read { path: dir.into(), source };
        let mut paths = Vec::new();
        for entry in fs::read_dir(dir).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if path.extension().is_some_and(|e| e == "config") {
                paths.push(path);
            }
        }
        if paths.is_empty() {
            return Err(OptionsError::NoFragments { dir: dir.into() });
        }
        paths.sort();
        let mut fragments = Options::new();
        let mut origin: BTreeMap<String, PathBuf> = BTreeMap::new();
        for path in paths {
            for (name, value) in read_file(&path)? {
                if let Some(first) = origin.insert(name.clone(), path.clone()) {
                    return Err(OptionsError::Twice { name, first, second: path });
                }
                fragments.insert(name, value);
            }
        }
        let required = read_file(&dir.join("required"))?.into_iter().collect();
        Ok(Self { fragments, required })
    }

    /// Returns all fragments as one file for `KCONFIG_ALLCONFIG`.
    pub fn merged(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.fragments {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name}={value}");
        }
        text
    }

    /// Returns the key of this kernel: equal options and an equal source give an equal key.
    /// Comments, and the file that contains an option, do not affect the key.
    pub fn key(&self, source_package: &str, source_version: &str) -> String {
        let mut hash = Sha256::new();
        for part in [RECIPE, source_package, source_version] {
            hash.update(part);
            hash.update([0]);
        }
        for options in [&self.fragments, &self.required] {
            for (name, value) in options {
                hash.update(format!("{name}={value}\n"));
            }
            hash.update([0]);
        }
        hash.finalize().iter().take(8).fold(String::new(), |mut key, byte| {
            let _ = write!(key, "{byte:02x}");
            key
        })
    }

    /// Compares a finished `.config` with the options. Fails with the options that differ.
    pub fn check(&self, config: &Path) -> Result<(), OptionsError> {
        let found: Options = read_file(config)?.into_iter().collect();
        let mut wrong: BTreeMap<&str, String> = BTreeMap::new();
        for (name, wanted) in self.fragments.iter().chain(&self.required) {
            let is = found.get(name).map_or("n", String::as_str);
            if is != wanted {
                wrong.insert(name, format!("{name} is {is}, wanted {wanted}"));
            }
        }
        if wrong.is_empty() {
            return Ok(());
        }
        Err(OptionsError::Dropped(wrong.into_values().collect::<Vec<_>>().join("; ")))
    }
}

fn read_file(path: &Path) -> Result<Vec<(String, String)>, OptionsError> {
    let text = fs::read_to_string(path)
        .map_err(|source| OptionsError::Read { path: path.into(), source })?;
    let mut options = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix("# ").and_then(|l| l.strip_suffix(" is not set")) {
            options.push((name.to_owned(), "n".to_owned()));
        } else if !line.is_empty() && !line.starts_with('#') {
            match line.split_once('=') {
                Some((name, value)) if name.starts_with("CONFIG_") && !value.is_empty() => {
                    options.push((name.to_owned(), value.to_owned()));
                }
                _ => {
                    return Err(OptionsError::Syntax {
                        path: path.into(),
                        line: index + 1,
                        text: line.into(),
                    });
                }
            }
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The folder of one test, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn with(name: &str, files: &[(&str, &str)]) -> Self {
            let path =
                std::env::temp_dir().join(format!("pvmm-options-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            for (file, text) in files {
                fs::write(path.join(file), text).unwrap();
            }
            Self(path)
        }

        fn wanted(&self) -> Result<Wanted, OptionsError> {
            Wanted::read(&self.0)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn check_option_dropped_by_kconfig_names_it() {
        let folder = Folder::with(
            "dropped",
            &[
                ("a.config", "CONFIG_KEPT=y\nCONFIG_LOST=y\n"),
                ("required", "CONFIG_IMPLIED=y\nCONFIG_UNWANTED=n\n"),
                ("result", "CONFIG_KEPT=y\n# CONFIG_LOST is not set\nCONFIG_UNWANTED=y\n"),
            ],
        );
        let said = folder.wanted().unwrap().check(&folder.0.join("result")).unwrap_err();
        let said = said.to_string();
        assert!(said.contains("CONFIG_LOST is n, wanted y"), "{said}");
        assert!(said.contains("CONFIG_IMPLIED is n, wanted y"), "{said}");
        assert!(said.contains("CONFIG_UNWANTED is y, wanted n"), "{said}");
        assert!(!said.contains("CONFIG_KEPT"), "{said}");
    }

    #[test]
    fn check_everything_as_asked_passes() {
        let folder = Folder::with(
            "passes",
            &[
                ("a.config", "# why\nCONFIG_HZ_100=y\nCONFIG_NAME=\"-x\"\n"),
                ("required", "CONFIG_HZ=100\n# CONFIG_MODULES is not set\n"),
                ("result", "CONFIG_HZ_100=y\nCONFIG_HZ=100\nCONFIG_NAME=\"-x\"\n"),
            ],
        );
        folder.wanted().unwrap().check(&folder.0.join("result")).unwrap();
    }

    #[test]
    fn read_option_in_two_fragments_is_refused() {
        let files = [("a.config", "CONFIG_A=y"), ("b.config", "CONFIG_A=y"), ("required", "")];
        let folder = Folder::with("twice", &files);
        assert!(
            matches!(folder.wanted(), Err(OptionsError::Twice { name, .. }) if name == "CONFIG_A")
        );
    }

    #[test]
    fn read_line_that_is_no_option_is_refused_with_its_place() {
        let folder = Folder::with("syntax", &[("a.config", "\nEXT4_FS=y\n"), ("required", "")]);
        assert!(matches!(folder.wanted(), Err(OptionsError::Syntax { line: 2, .. })));
    }

    #[test]
    fn key_follows_options_and_version_but_not_comments() {
        let key = |name, text, required, version| {
            let folder = Folder::with(name, &[("a.config", text), ("required", required)]);
            folder.wanted().unwrap().key("linux-source", version)
        };
        let first = key("key1", "CONFIG_A=y\n", "CONFIG_B=n\n", "1");
        assert_eq!(first, key("key2", "# because\nCONFIG_A=y\n", "CONFIG_B=n\n", "1"));
        assert_ne!(first, key("key3", "CONFIG_A=n\n", "CONFIG_B=n\n", "1"));
        assert_ne!(first, key("key4", "CONFIG_A=y\n", "CONFIG_B=y\n", "1"));
        assert_ne!(first, key("key5", "CONFIG_A=y\n", "CONFIG_B=n\n", "2"));
    }

    #[test]
    fn repository_fragments_have_no_duplicate_and_contradict_no_requirement() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel-config");
        let wanted = Wanted::read(&dir).unwrap();
        for (name, value) in &wanted.required {
            if let Some(set) = wanted.fragments.get(name) {
                assert_eq!(set, value, "{name}");
            }
        }
    }
}
