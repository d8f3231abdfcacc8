//! Watches a directory, or a whole tree, for changes: inotify, with new directories followed.
//!
//! It runs on a thread of the pool and ends with its client; lost events are reported.

use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use pvmm_guest_agent::limits::{MAX_WATCHED, MAX_WATCHERS};
use pvmm_guest_agent::message::{ByteBuf, Change, Watch, WatchEvent};

use crate::sys;
use crate::sys::inotify::{self, Inotify, RawEvent};
use crate::sys::session::{Interest, wait};

/// The current number of watchers; each holds a thread.
static WATCHERS: AtomicUsize = AtomicUsize::new(0);
/// Bytes of kernel events read at once.
const READ_BYTES: usize = 64 << 10;

/// A slot among the watchers, released when it is dropped.
struct WatcherSlot;

impl WatcherSlot {
    fn take() -> io::Result<Self> {
        let taken = WATCHERS.fetch_add(1, Ordering::AcqRel);
        let slot = Self;
        if taken >= MAX_WATCHERS {
            Err(io::Error::from_raw_os_error(libc::EAGAIN))
        } else {
            Ok(slot)
        }
    }
}

impl Drop for WatcherSlot {
    fn drop(&mut self) {
        WATCHERS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Watches until the client or the root is gone, and returns how many events were sent.
pub fn watch(
    request: &Watch,
    root: &Path,
    pipe: fs::File,
    begun: impl FnOnce(),
) -> io::Result<u64> {
    let _slot = WatcherSlot::take()?;
    let mut watcher = Watcher {
        inotify: Inotify::new()?,
        root: root.to_owned(),
        recursive: request.recursive,
        folders: HashMap::new(),
        out: pipe,
        told: 0,
    };
    watcher.add(Path::new(""), false)?;
    begun();
    watcher.run()
}

struct Watcher {
    inotify: Inotify,
    root: PathBuf,
    recursive: bool,
    /// The watched directories, by the kernel's watch number, relative to the root.
    folders: HashMap<i32, PathBuf>,
    out: fs::File,
    told: u64,
}

impl Watcher {
    /// Watches a directory and, if requested, those below; with `tell`, reports what exists in
    /// them.
    fn add(&mut self, below: &Path, tell: bool) -> io::Result<()> {
        if self.folders.len() >= MAX_WATCHED {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let path = self.root.join(below);
        let number = self.inotify.add(&path)?;
        self.folders.insert(number, below.to_owned());
        if !self.recursive || !path.is_dir() {
            return Ok(());
        }
        let Ok(entries) = fs::read_dir(&path) else { return Ok(()) };
        for entry in entries.flatten() {
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let name = below.join(entry.file_name());
            if tell {
                // Created before the watch was, so no event reports it.
                self.tell(Change::Created, &name, is_directory, 0)?;
            }
            if is_directory {
                match self.add(&name, tell) {
                    // Already removed again.
                    Err(e)
                        if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
                    other => other?,
                }
            }
        }
        Ok(())
    }

    fn run(&mut self) -> io::Result<u64> {
        loop {
            let client: OwnedFd = self.out.as_fd().try_clone_to_owned()?;
            let interest = [
                Interest::read(self.inotify.fd()),
                Interest { fd: &client, read: false, write: false },
            ];
            let ready = wait(&interest, None)?;
            if ready[1] {
                return Err(ErrorKind::BrokenPipe.into());
            }
            let mut bytes = Vec::new();
            match sys::read_onto(self.inotify.fd(), &mut bytes, READ_BYTES) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(e) => return Err(e),
            }
            for event in inotify::events(&bytes) {
                if self.take(&event)? {
                    return Ok(self.told);
                }
            }
        }
    }

    /// Forwards an event, and returns whether the root is gone.
    fn take(&mut self, event: &RawEvent<'_>) -> io::Result<bool> {
        if event.mask & libc::IN_Q_OVERFLOW != 0 {
            self.tell(Change::Overflow, Path::new(""), false, 0)?;
            return Ok(false);
        }
        let Some(folder) = self.folders.get(&event.watch).cloned() else { return Ok(false) };
        let at_root = folder.as_os_str().is_empty();
        if event.mask & libc::IN_IGNORED != 0 {
            self.folders.remove(&event.watch);
            if at_root {
                self.tell(Change::Gone, Path::new(""), true, 0)?;
            }
            return Ok(at_root);
        }
        let is_directory = event.mask & libc::IN_ISDIR != 0;
        let name = if event.name.is_empty() { folder } else { folder.join(event.file_name()) };
        let own = event.name.is_empty();
        let change = match event.mask {
            mask if mask & libc::IN_CREATE != 0 => Change::Created,
            mask if mask & libc::IN_MODIFY != 0 => Change::Modified,
            mask if mask & libc::IN_CLOSE_WRITE != 0 => Change::Written,
            mask if mask & libc::IN_ATTRIB != 0 => Change::Attributes,
            mask if mask & libc::IN_DELETE != 0 => Change::Deleted,
            mask if mask & libc::IN_MOVED_FROM != 0 => Change::MovedFrom,
            mask if mask & libc::IN_MOVED_TO != 0 => Change::MovedTo,
            mask if mask & libc::IN_MOVE_SELF != 0 && at_root => {
                self.tell(Change::Gone, Path::new(""), true, 0)?;
                return Ok(true);
            }
            _ => return Ok(false),
        };
        if own && !at_root {
            // The parent's watch reports a directory's own changes.
            return Ok(false);
        }
        self.tell(change, &name, is_directory, event.cookie)?;
        if self.recursive && is_directory {
            match change {
                Change::Created | Change::MovedTo => self.follow(&name)?,
                Change::MovedFrom => self.forget_below(&name),
                _ => {}
            }
        }
        Ok(false)
    }

    fn follow(&mut self, name: &Path) -> io::Result<()> {
        match self.add(name, true) {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(()),
            other => other,
        }
    }

    /// Removes the watches of a directory that was moved away: it is no longer below the root.
    fn forget_below(&mut self, name: &Path) {
        let gone: Vec<i32> = self
            .folders
            .iter()
            .filter(|(_, folder)| folder.starts_with(name))
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            self.folders.remove(&number);
            self.inotify.remove(number);
        }
    }

    fn tell(
        &mut self,
        change: Change,
        name: &Path,
        directory: bool,
        cookie: u32,
    ) -> io::Result<()> {
        let path = ByteBuf::from(name.as_os_str().as_bytes());
        let event = WatchEvent { change, path, directory, cookie };
        let bytes = rmp_serde::to_vec_named(&event).map_err(io::Error::other)?;
        let record = [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat();
        self.told += 1;
        self.out.write_all(&record)
    }
}
