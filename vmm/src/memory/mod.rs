//! Guest memory: a private mapping over an image that never changes.
//!
//! A booted guest's image is empty, a restored guest's is a snapshot's memory. What the guest has written
//! since is in private pages, which the kernel can list: so no dirty log is kept, and going back means
//! dropping those pages.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `image.rs` | what lies under a guest's memory, and how it is mapped |
//! | `pages.rs` | which pages the guest has made its own |
//! | `sys.rs` | the system calls |

mod image;
mod pages;
mod sys;

pub use image::{Layer, MAX_RUNS, MemoryError, MemoryImage, Region};
pub use pages::Runs;
pub(crate) use sys::memfd;

use pvmm_devices::GuestMemory;

/// The unit in which memory is mapped, copied and compared.
pub const PAGE: u64 = 4096;

/// A guest's memory and the image it lies over.
pub struct Memory {
    pub guest: GuestMemory,
    pub image: MemoryImage,
}

impl Memory {
    /// Maps `image` for one guest: what it writes stays its own.
    pub fn map(image: MemoryImage) -> Result<Self, MemoryError> {
        Ok(Self { guest: image.map()?, image })
    }

    /// The pages that this guest has changed since its image, as ranges of the image.
    pub fn private_runs(&self) -> Result<Runs, MemoryError> {
        pages::private_runs(&self.guest).map_err(MemoryError::Scan)
    }

    /// Moves the changed pages into a sealed layer of the image and lies over that from now on. The guest
    /// must be paused. Returns how many bytes were moved.
    pub fn freeze(&mut self) -> Result<u64, MemoryError> {
        let runs = self.private_runs()?;
        let image = self.image.frozen(&self.guest, &runs)?;
        image.cover_top(&self.guest)?;
        self.image = image;
        Ok(runs.bytes())
    }

    /// Drops what the guest has changed since its image. The guest must be paused.
    pub fn discard(&self) -> Result<u64, MemoryError> {
        let runs = self.private_runs()?;
        for run in runs.joined(DISCARD_GAP).iter() {
            pages::discard(&self.guest, run).map_err(MemoryError::Discard)?;
        }
        Ok(runs.bytes())
    }
}

/// Clean pages between two changed ones that are cheaper to drop than to leave out.
const DISCARD_GAP: u64 = 8 * PAGE;

#[cfg(test)]
mod tests;
