//! `pvmm migrate-templates`: marks baked templates of another VMM as not baked.
//!
//! A PandaStack agent trusts a template's `ready` file and never checks which VMM wrote its
//! snapshot: under another VMM, every restore fails and every create boots cold. Without that file
//! the agent bakes the template again. Only the marker and the files of the snapshot itself are
//! removed, the marker first.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pvmm::snapshot::StateFile;
use serde::Serialize;

use crate::cli::MigrateTemplates;
use crate::exit::{Failure, Outcome};
use crate::output::{self, Table};

/// The folder of templates in the agent's data folder.
const FOLDER: &str = "template-snaps";
const READY: &str = "ready";
const STATE: &str = "vm.state";
/// The files of a snapshot, marker first: a run that is stopped in between has still cleared it.
const STALE: [&str; 6] = [READY, STATE, "vm.mem", "vm.mem.header", "vm.mem.prefetch", "vm.mem.gcs"];

pub fn migrate_templates(args: MigrateTemplates) -> Outcome {
    let folder = find(&args.dir)?;
    let mut rows = Vec::new();
    for template in templates(&folder)? {
        rows.push(migrate(&template, args.dry_run));
    }
    rows.sort_by(|one, other| one.template.cmp(&other.template));
    if args.json {
        output::json(&rows)?
    } else {
        let mut table = Table::new(&["TEMPLATE", "SNAPSHOT", "DONE"]);
        for row in &rows {
            table.row(vec![row.template.clone(), row.snapshot.to_owned(), row.said()]);
        }
        table.print()?;
    }
    match rows.iter().find_map(|row| row.error.as_ref().map(|error| (row, error))) {
        None => Ok(0),
        Some((row, error)) => Err(Failure::fault(format!("{}: {error}", row.template))),
    }
}

/// The result for one template, and a row of the output.
#[derive(Serialize)]
struct Row {
    template: String,
    /// Which VMM wrote the snapshot.
    snapshot: &'static str,
    /// Files that were removed, or would have been in a dry run.
    removed: Vec<&'static str>,
    dry_run: bool,
    error: Option<String>,
}

impl Row {
    fn said(&self) -> String {
        match (&self.error, self.removed.is_empty(), self.dry_run) {
            (Some(error), ..) => error.clone(),
            (None, true, _) => "left as it is".to_owned(),
            (None, false, false) => format!("removed {}", self.removed.join(", ")),
            (None, false, true) => format!("would remove {}", self.removed.join(", ")),
        }
    }
}

/// Returns the folder of templates: `dir` itself, or the one inside it.
fn find(dir: &Path) -> Result<PathBuf, Failure> {
    let is_folder = |path: &Path| path.symlink_metadata().is_ok_and(|facts| facts.is_dir());
    let inner = dir.join(FOLDER);
    let named = fs::canonicalize(dir).ok().filter(|path| path.ends_with(FOLDER));
    match named {
        Some(path) if is_folder(&path) => Ok(path),
        _ if is_folder(&inner) => Ok(inner),
        _ => {
            let what = format!("{}: has no folder {FOLDER}", dir.display());
            Err(Failure::usage(what).hint("give the data folder of a PandaStack agent"))
        }
    }
}

fn templates(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |error: io::Error| {
        Failure::fault(format!("{}: {}", folder.display(), crate::exit::io_text(&error)))
    };
    let mut templates = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // Symbolic links are skipped: they could lead to other files.
        if entry.file_type().map_err(failed)?.is_dir() {
            templates.push(entry.path());
        }
    }
    Ok(templates)
}

fn migrate(template: &Path, dry_run: bool) -> Row {
    let name = template.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let there = |file: &str| template.join(file).symlink_metadata().is_ok();
    let (snapshot, stale) = match StateFile::of(&template.join(STATE)) {
        StateFile::Pvmm => ("pvmm", false),
        StateFile::Firecracker => ("Firecracker", true),
        StateFile::Unknown => ("of an unknown VMM", true),
        // The marker alone is stale: its snapshot is missing.
        StateFile::Missing => ("none", there(READY)),
    };
    let mut row = Row { template: name, snapshot, removed: Vec::new(), dry_run, error: None };
    for file in STALE.into_iter().filter(|file| stale && there(file)) {
        // Removing a folder of that name fails; the agent makes no such folder.
        let removed = if dry_run { Ok(()) } else { fs::remove_file(template.join(file)) };
        match removed {
            Ok(()) => row.removed.push(file),
            Err(error) => {
                row.error = Some(format!("{file}: {}", crate::exit::io_text(&error)));
                break;
            }
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(dir: &Path, template: &str, files: &[(&str, &[u8])]) -> PathBuf {
        let template = dir.join(FOLDER).join(template);
        fs::create_dir_all(template.join("build-vm")).unwrap();
        for (name, bytes) in files {
            fs::write(template.join(name), bytes).unwrap();
        }
        template
    }

    fn names(template: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<_> = fs::read_dir(template).unwrap().map(name).collect();
        names.sort();
        names.into_iter().map(|name| name.into_string().unwrap()).collect()
    }

    const FOREIGN: [u8; 12] = [0, 0, 0, 0x64, 0x86, 0x84, 0x19, 0x10, 0x07, 6, b'1', b'1'];

    #[test]
    fn only_foreign_snapshots_lose_their_marker_and_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let foreign = put(
            dir.path(),
            "ubuntu",
            &[
                ("ready", b""),
                ("vm.state", &FOREIGN),
                ("vm.mem", b"m"),
                ("vm.mem.header", b"PSM1"),
                ("clone.ext4", b"disk"),
                ("snap-meta.json", b"{}"),
            ],
        );
        let ours = put(dir.path(), "fresh", &[("ready", b""), ("vm.state", b"pvmm-vm\nxxxx")]);
        let empty = put(dir.path(), "hollow", &[("ready", b"")]);
        let baking = put(dir.path(), "baking", &[("clone.ext4", b"disk")]);
        std::os::unix::fs::symlink(&ours, dir.path().join(FOLDER).join("link")).unwrap();
        let args = |dry_run| MigrateTemplates { dir: dir.path().to_owned(), dry_run, json: true };
        let before = names(&foreign);
        assert_eq!(migrate_templates(args(true)).unwrap(), 0);
        assert_eq!(names(&foreign), before, "a dry run changes nothing");
        assert_eq!(migrate_templates(args(false)).unwrap(), 0);
        assert_eq!(names(&foreign), ["build-vm", "clone.ext4", "snap-meta.json"]);
        assert_eq!(names(&ours), ["build-vm", "ready", "vm.state"]);
        assert_eq!(names(&empty), ["build-vm"]);
        assert_eq!(names(&baking), ["build-vm", "clone.ext4"]);
        // A second run finds nothing to do.
        let row = migrate(&foreign, false);
        assert_eq!((row.snapshot, row.said().as_str()), ("none", "left as it is"));
    }

    #[test]
    fn folder_that_is_not_an_agents_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ready"), "mine").unwrap();
        let args = MigrateTemplates { dir: dir.path().to_owned(), dry_run: false, json: false };
        assert!(migrate_templates(args).is_err());
        assert!(dir.path().join("ready").exists());
        // The template folder itself may be named too.
        put(dir.path(), "t", &[("ready", b"")]);
        let inner = dir.path().join(FOLDER);
        assert_eq!(find(&inner).unwrap(), fs::canonicalize(&inner).unwrap());
    }
}
