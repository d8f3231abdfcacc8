//! Checks a root filesystem image before anything is created for it.
//!
//! The agent needs the filesystem type to mount, and a directory or a text file should be refused
//! here with a fix, not in the guest with an errno.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    #[error("--rootfs: {} does not exist", .0.display())]
    NotFound(PathBuf),
    #[error("--rootfs: {} is a directory", .0.display())]
    Directory(PathBuf),
    #[error("--rootfs: {} is neither a regular file nor a block device", .0.display())]
    NotAnImage(PathBuf),
    #[error("--rootfs: {} is not an ext4, squashfs, erofs, xfs or btrfs image", .0.display())]
    UnknownType(PathBuf),
    #[error("--rootfs: {} is a disk with partitions", .0.display())]
    Partitioned(PathBuf),
    #[error("--rootfs: the path {:?} contains a NUL byte", .0)]
    Nul(PathBuf),
    #[error("--rootfs: cannot read {}: {}", path.display(), crate::failure::io_text(source))]
    Read { path: PathBuf, source: io::Error },
}

impl From<RootfsError> for Failure {
    fn from(error: RootfsError) -> Self {
        let failure = Failure::usage(error.to_string());
        match &error {
            RootfsError::Directory(path) => failure.hint(format!(
                "make an image of it: mke2fs -t ext4 -d {} rootfs.ext4 1G",
                path.display()
            )),
            RootfsError::Partitioned(_) => {
                failure.hint("copy the root partition out of it into a file of its own")
            }
            RootfsError::NotFound(_) | RootfsError::NotAnImage(_) | RootfsError::UnknownType(_) => {
                failure.hint("give the path of a filesystem image, or use --template")
            }
            _ => failure,
        }
    }
}

/// Returns the type of the filesystem in the image at `path`, as for `mount -t`.
pub fn filesystem_type(path: &Path) -> Result<&'static str, RootfsError> {
    let own = || path.to_owned();
    if path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err(RootfsError::Nul(own()));
    }
    let read = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => RootfsError::NotFound(own()),
        _ => RootfsError::Read { path: own(), source },
    };
    // Checked before opening, because opening a FIFO would wait for a writer.
    let kind = fs::metadata(path).map_err(read)?.file_type();
    if kind.is_dir() {
        return Err(RootfsError::Directory(own()));
    }
    if !kind.is_file() && !kind.is_block_device() {
        return Err(RootfsError::NotAnImage(own()));
    }
    let image = File::open(path).map_err(read)?;
    let has = |offset: u64, magic: &[u8]| {
        let mut found = vec![0; magic.len()];
        image.read_exact_at(&mut found, offset).is_ok() && found == magic
    };
    let known: [(u64, &[u8], &str); 5] = [
        (0, b"hsqs", "squashfs"),
        (0, b"XFSB", "xfs"),
        (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "erofs"),
        (1080, &[0x53, 0xef], "ext4"),
        (0x10040, b"_BHRfS_M", "btrfs"),
    ];
    if let Some((.., name)) = known.into_iter().find(|(offset, magic, _)| has(*offset, magic)) {
        return Ok(name);
    }
    let partitioned = has(510, &[0x55, 0xaa]);
    Err(if partitioned { RootfsError::Partitioned(own()) } else { RootfsError::UnknownType(own()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(parts: &[(u64, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (offset, bytes) in parts {
            file.as_file().write_all_at(bytes, *offset).unwrap();
        }
        file
    }

    #[test]
    fn type_of_known_images_is_found() {
        for (offset, magic, name) in [
            (0, b"hsqs".as_slice(), "squashfs"),
            (1080, &[0x53, 0xef], "ext4"),
            (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "erofs"),
        ] {
            assert_eq!(filesystem_type(image(&[(offset, magic)]).path()).unwrap(), name);
        }
    }

    #[test]
    fn type_of_what_is_no_image_is_refused() {
        let text = image(&[(0, b"hello\n")]);
        assert!(matches!(filesystem_type(text.path()), Err(RootfsError::UnknownType(_))));
        let disk = image(&[(510, &[0x55, 0xaa])]);
        assert!(matches!(filesystem_type(disk.path()), Err(RootfsError::Partitioned(_))));
        let refused = |path: &str| filesystem_type(Path::new(path)).unwrap_err();
        assert!(matches!(refused("/tmp"), RootfsError::Directory(_)));
        assert!(matches!(refused("/nonexistent"), RootfsError::NotFound(_)));
        assert!(matches!(refused("/dev/null"), RootfsError::NotAnImage(_)));
        assert!(matches!(refused("/tmp/a\0b"), RootfsError::Nul(_)));
    }
}
