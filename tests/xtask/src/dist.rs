//! The parts of a release: programs as they are shipped, manual pages, completions and the list of
//! crates. The Debian package and the archive are made from them.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use flate2::Compression;
use flate2::write::GzEncoder;
use pvmm_images::cache::file_digest;

use crate::compat::check;
use crate::{cargo, deb, progress, report, sbom, tarball};

/// The version of all crates of this workspace.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The time of every file in a package, in seconds since 1970: equal contents give equal packages.
/// It is the day of this version.
pub const TIME: u64 = 1_794_960_000;

/// The packages of the programs, with the names of the programs.
pub const PROGRAMS: [(&str, &str); 2] = [("pvmm-launcher", "pvmm"), ("pvmm-jailer", "pvmm-jailer")];

/// Shells with completions, and the files for them.
const SHELLS: [(&str, &str); 3] = [("bash", "pvmm.bash"), ("zsh", "_pvmm"), ("fish", "pvmm.fish")];

/// The list of the parts of the programs, in the form of CycloneDX.
pub const SBOM: &str = "sbom.cdx.json";

/// The kinds of packages that can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Deb,
    Tarball,
}

/// Makes a package, prints its path, and writes the digests of all packages beside it.
pub fn run(kind: Kind) -> ExitCode {
    let made = prepare().and_then(|()| match kind {
        Kind::Deb => deb::build(None),
        Kind::Tarball => tarball::build(),
    });
    match made.and_then(|package| write_digests().map(|()| package)) {
        Ok(package) => {
            println!("{}", package.display());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("package: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Returns the folder with the shipped programs.
pub fn programs() -> PathBuf {
    cargo::target_dir().join("shipped")
}

/// Returns the folder with what goes into packages beside the programs.
pub fn dir() -> PathBuf {
    programs().join("dist")
}

/// Returns the folder for packages.
pub fn packages() -> PathBuf {
    cargo::target_dir().join("packages")
}

/// Builds the programs, and makes everything else from them.
pub fn prepare() -> Result<(), Box<dyn Error>> {
    for (package, name) in PROGRAMS {
        cargo::ship(package, name)?;
    }
    // Pages of verbs that are gone must not stay.
    let _ = fs::remove_dir_all(dir());
    let (man, completions) = (dir().join("man"), dir().join("completions"));
    for folder in [&man, &completions, &packages()] {
        fs::create_dir_all(folder)?;
    }
    progress::step(format!("manual pages and completions go to {}", dir().display()));
    let pvmm = || Command::new(programs().join("pvmm"));
    check(pvmm().args(["man", "--dir"]).arg(&man), "pvmm man")?;
    let help = Command::new(programs().join("pvmm-jailer")).arg("--help").output()?;
    fs::write(man.join("pvmm-jailer.1"), jailer_page(&String::from_utf8(help.stdout)?))?;
    for (shell, file) in SHELLS {
        let file = File::create(completions.join(file))?;
        check(pvmm().args(["completions", shell]).stdout(file), "pvmm completions")?;
    }
    let compressed = dir().join("man-gz");
    fs::create_dir_all(&compressed)?;
    for page in files(&man)? {
        let name = page.file_name().unwrap_or_default().to_string_lossy().into_owned() + ".gz";
        let mut file = GzEncoder::new(File::create(compressed.join(name))?, Compression::best());
        file.write_all(&fs::read(&page)?)?;
        file.finish()?;
    }
    fs::write(dir().join(SBOM), sbom::text()?)?;
    Ok(fs::copy(dir().join(SBOM), packages().join(format!("pvmm-{VERSION}.cdx.json"))).map(drop)?)
}

/// Returns the manual page of the jailer, whose parser has no pages: its help, as it is.
fn jailer_page(help: &str) -> String {
    let line = |line: &str| {
        let line = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
        // A dot at the start of a line would be a command of the formatter.
        format!("\\&{line}\n")
    };
    let text: String = help.lines().map(line).collect();
    format!(
        ".TH pvmm\\-jailer 1 \"\" \"pvmm {VERSION}\"\n.SH NAME\n\
         pvmm\\-jailer \\- a jail for a monitor process, with the flags of Firecracker's jailer\n\
         .SH DESCRIPTION\n.nf\n{text}.fi\n.SH SEE ALSO\n.BR pvmm (1)\n"
    )
}

/// Writes the digests of all packages to `SHA256SUMS`, as sha256sum reads them.
pub fn write_digests() -> Result<(), Box<dyn Error>> {
    let dir = packages();
    let mut lines = Vec::new();
    for entry in fs::read_dir(&dir)? {
        let name = entry?.file_name().into_string().map_err(|_| "a name is not UTF-8")?;
        if name != "SHA256SUMS" && dir.join(&name).is_file() {
            lines.push((name.clone(), format!("{}  {name}\n", file_digest(&dir.join(&name))?)));
        }
    }
    lines.sort();
    let text: String = lines.into_iter().map(|(_, line)| line).collect();
    Ok(fs::write(dir.join("SHA256SUMS"), text)?)
}

/// Returns the files of a folder by name.
pub fn files(dir: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut files = fs::read_dir(dir)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>, std::io::Error>>()?;
    files.sort();
    Ok(files)
}

/// Formats every manual page, and fails with what the formatter remarks.
pub fn check_pages() -> Result<(), Box<dyn Error>> {
    crate::packages::install(&["man-db"])?;
    let mut remarks = String::new();
    for page in files(&dir().join("man"))? {
        let mut man = Command::new("man");
        man.args(["--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"]).arg(&page);
        let said = man.env("MANWIDTH", "120").stdin(Stdio::null()).output()?;
        remarks.push_str(&String::from_utf8_lossy(&said.stderr));
        if !said.status.success() {
            remarks.push_str(&format!("{}: {}\n", page.display(), said.status));
        }
    }
    if remarks.is_empty() { Ok(()) } else { Err(format!("manual pages:\n{remarks}").into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_on_a_page_is_text_and_no_command_of_the_formatter() {
        let page = jailer_page("Usage: a --id ID\n.br\n\\x");
        assert!(page.contains("\\&Usage: a \\-\\-id ID\n\\&.br\n\\&\\ex\n"), "{page}");
        assert!(page.contains(VERSION));
    }
}
