//! A layer of a container image: an archive over the tree of the layers below it.
//!
//! A file `.wh.NAME` removes NAME of the layers below, and `.wh..wh..opq` everything of them in its
//! folder; what the layer itself has there stays.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::import::{Import, ImportError};

const WHITEOUT: &str = ".wh.";
/// Names of a union file system's own files.
const RESERVED: &str = ".wh..wh.";
const OPAQUE: &str = ".wh..wh..opq";

/// The paths that the present layer has put into the tree.
pub(super) type Placed = BTreeSet<PathBuf>;

impl Import<'_> {
    /// Unpacks a layer, which is not compressed, over what is there.
    pub fn layer(&mut self, stream: impl Read) -> Result<(), ImportError> {
        self.placed = Some(Placed::new());
        let done = self.unpack(Path::new(""), stream);
        self.placed = None;
        done
    }

    /// Does what a whiteout says. Returns whether the entry was one.
    pub(super) fn white_out(&mut self, inner: &Path) -> Result<bool, ImportError> {
        let name = inner.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let reserved =
            inner.iter().any(|part| part.to_str().is_some_and(|it| it.starts_with(RESERVED)));
        let folder = inner.parent().unwrap_or(Path::new(""));
        if name == OPAQUE {
            self.empty(folder)?;
        } else if !reserved && let Some(hidden) = name.strip_prefix(WHITEOUT) {
            if matches!(hidden, "" | "." | "..") {
                let why = "hides nothing that can have a name";
                return Err(ImportError::Refused { entry: inner.to_owned(), why });
            }
            let path = self.tree.resolve(folder)?.join(hidden);
            self.hide(&path)?;
        } else {
            return Ok(reserved);
        }
        Ok(true)
    }

    fn empty(&mut self, folder: &Path) -> Result<(), ImportError> {
        let path = self.tree.resolve(folder)?;
        if !fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir()) {
            return Ok(());
        }
        let failed = |source| ImportError::Unpack { entry: folder.to_owned(), source };
        for entry in fs::read_dir(&path).map_err(failed)? {
            self.hide(&entry.map_err(failed)?.path())?;
        }
        Ok(())
    }

    /// Removes a path of the layers below, except for what the present layer has put there.
    fn hide(&mut self, path: &Path) -> Result<(), ImportError> {
        let inner = self.tree.inside(path).to_owned();
        let placed = self.placed.get_or_insert_default();
        let below = placed.range(inner.clone()..).next();
        if !below.is_some_and(|next| next.starts_with(&inner)) {
            return Ok(self.tree.remove(path)?);
        }
        let failed = |source| ImportError::Unpack { entry: inner.clone(), source };
        if fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir()) {
            for entry in fs::read_dir(path).map_err(failed)? {
                self.hide(&entry.map_err(failed)?.path())?;
            }
        }
        Ok(())
    }
}
