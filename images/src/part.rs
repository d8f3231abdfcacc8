//! The files of a template or snapshot that is sent to another host.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cache::{self, Cache};
use crate::progress::Progress;
use crate::store;
use crate::template::{self, IMAGE, KIND, MANIFEST, Template, TemplateError};

/// One file to be sent, by its path below the template or snapshot.
#[derive(Clone, Debug)]
pub struct Part {
    pub path: String,
    pub mode: u32,
    pub content: Content,
}

/// The bytes of a file: in memory, for a text that differs from the one on disk, or open.
#[derive(Clone, Debug)]
pub enum Content {
    Bytes(Arc<[u8]>),
    File { file: Arc<File>, size: u64 },
}

impl Part {
    /// Opens the file at `from`.
    pub fn open(path: &str, from: &Path) -> io::Result<Part> {
        Part::of_file(path, File::open(from)?)
    }

    /// Takes an open file.
    pub fn of_file(path: &str, file: File) -> io::Result<Part> {
        let facts = file.metadata()?;
        let (mode, size) = (facts.permissions().mode() & 0o777, facts.len());
        let content = Content::File { file: Arc::new(file), size };
        Ok(Part { path: path.to_owned(), mode, content })
    }

    /// Takes a text.
    pub fn of_bytes(path: &str, bytes: Vec<u8>) -> Part {
        Part { path: path.to_owned(), mode: 0o600, content: Content::Bytes(bytes.into()) }
    }
}

impl Content {
    pub fn size(&self) -> u64 {
        match self {
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::File { size, .. } => *size,
        }
    }
}

impl Template {
    /// Opens the files of the template.
    pub fn parts(&self) -> Result<Vec<Part>, TemplateError> {
        let open = |name: &str| {
            let path = self.folder.join(name);
            Part::open(name, &path).map_err(|source| TemplateError::Read { path, source })
        };
        [MANIFEST, IMAGE].into_iter().map(open).collect()
    }

    /// Makes the files in `folder`, which lies in the cache, the template `name`. It replaces the
    /// template of that name, if they fit together; else `folder` stays.
    pub fn adopt(
        cache: &Cache,
        name: &str,
        folder: &Path,
        progress: &mut dyn Progress,
    ) -> Result<Template, TemplateError> {
        template::check_name(name)?;
        progress.step("Comparing the image with its digest");
        let refused = || TemplateError::Adopt { name: name.to_owned() };
        let manifest = template::load(cache, folder).ok_or_else(refused)?.manifest;
        let digest = cache::file_digest(&folder.join(IMAGE))
            .map_err(|source| TemplateError::Read { path: folder.join(IMAGE), source })?;
        if manifest.name != name || manifest.digest != digest {
            return Err(refused());
        }
        let path = cache.publish(
            KIND,
            name,
            progress,
            |_| false,
            |dir, _| {
                let moved = [MANIFEST, IMAGE].into_iter().try_for_each(|file| {
                    let path: PathBuf = dir.join(file);
                    fs::rename(folder.join(file), &path)
                        .map_err(|source| TemplateError::Write { path, source })
                });
                let path = dir.join(IMAGE);
                moved.and_then(|()| {
                    store::keep(cache, &path, &digest)
                        .map_err(|source| TemplateError::Write { path, source })
                })
            },
        )?;
        progress.done();
        template::load(cache, &path).ok_or_else(|| TemplateError::Damaged { name: name.to_owned() })
    }
}
