//! Messages about files: requests, metadata, listings and changes.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// Reads a regular file or a device on the output channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFile {
    pub path: ByteBuf,
    #[serde(default)]
    pub offset: u64,
    /// At most this many bytes; to the end without it.
    #[serde(default)]
    pub len: Option<u64>,
    /// Send segments, in which holes are marked: see `sparse.rs`.
    #[serde(default)]
    pub sparse: bool,
}

/// Writes a file from the input channel, whose end commits it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteFile {
    pub path: ByteBuf,
    #[serde(default)]
    pub mode: Option<u32>,
    #[serde(default)]
    pub owner: Option<Owner>,
    /// Create missing parent directories.
    #[serde(default)]
    pub parents: bool,
    /// Write into the existing file instead of replacing it as a whole.
    #[serde(default)]
    pub in_place: bool,
    /// With `in_place`: write from this offset and keep what lies beyond.
    #[serde(default)]
    pub offset: Option<u64>,
    /// Wait until the contents are on the disk.
    #[serde(default)]
    pub sync: bool,
    /// The input consists of segments instead of plain bytes; not allowed with `in_place`.
    #[serde(default)]
    pub sparse: bool,
}

/// Numeric owner of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// Requests a file's metadata.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    pub path: ByteBuf,
    /// Follow a symbolic link at the end of the path.
    #[serde(default)]
    pub follow: bool,
}

/// Sends a directory's entries on the output channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    pub path: ByteBuf,
}

/// Removes a file or directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remove {
    pub path: ByteBuf,
    #[serde(default)]
    pub recursive: bool,
    /// Succeed when there is nothing to remove.
    #[serde(default)]
    pub missing_ok: bool,
}

/// Creates a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mkdir {
    pub path: ByteBuf,
    #[serde(default)]
    pub mode: Option<u32>,
    /// Create missing parents, and succeed when the directory exists.
    #[serde(default)]
    pub parents: bool,
}

/// Creates a symbolic link, replacing a file or link of that name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Symlink {
    pub path: ByteBuf,
    /// The target of the link; any bytes but NUL.
    pub target: ByteBuf,
    #[serde(default)]
    pub owner: Option<Owner>,
}

/// Reports changes in a directory, or with `recursive` in the tree below it, until the stream is
/// cancelled. The output channel is a sequence of `WatchEvent`s, each preceded by its length, like
/// the entries of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    pub path: ByteBuf,
    #[serde(default)]
    pub recursive: bool,
}

/// A change below a watched directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    pub change: Change,
    /// Relative to the watched directory; empty for the directory itself.
    pub path: ByteBuf,
    #[serde(default)]
    pub directory: bool,
    /// Links a `MovedFrom` to its `MovedTo`: both have an equal value.
    #[serde(default)]
    pub cookie: u32,
}

/// The kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Created,
    Modified,
    /// Closed by a process that had it open for writing.
    Written,
    Attributes,
    Deleted,
    MovedFrom,
    MovedTo,
    /// The kernel lost events; the client must look at the directory itself.
    Overflow,
    /// The watched directory no longer exists; nothing follows.
    Gone,
    #[serde(other)]
    Other,
}

/// Sends the tree at a directory as a tar archive on the output channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadTar {
    pub path: ByteBuf,
}

/// Unpacks a tar archive from the input channel into a directory, which is created if it is
/// missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteTar {
    pub path: ByteBuf,
    /// Give files the owners in the archive; without it, they belong to the agent's user.
    #[serde(default)]
    pub owners: bool,
}

/// Renames within one filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    pub from: ByteBuf,
    pub to: ByteBuf,
    /// Fail when the target exists.
    #[serde(default)]
    pub no_replace: bool,
}

/// The type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
    #[serde(other)]
    Other,
}

/// A file's metadata.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    pub kind: FileKind,
    /// Permission bits, set-id bits and sticky bit.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub nlink: u64,
    pub mtime_s: i64,
    pub mtime_ns: u32,
    /// When the content or the metadata was last changed, in seconds and nanoseconds; programs in
    /// the guest cannot choose it. Older agents do not tell.
    #[serde(default)]
    pub ctime: Option<(i64, u32)>,
    /// The target of a symbolic link.
    #[serde(default)]
    pub target: Option<ByteBuf>,
}

/// One directory entry. The output channel of a listing is a sequence of these, each preceded by
/// its length (u32, little-endian); frames may cut them anywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    pub name: ByteBuf,
    pub metadata: Metadata,
}
