//! The host's configuration of a balloon, and the configuration space that the guest reads.

/// The size of the pages that a balloon counts, whatever the guest's page size is.
pub const PAGE_SIZE: u64 = 4096;
/// The hinting command while there is no run: the pages of the last one may be used again.
pub const HINT_DONE: u32 = 1;
/// The hinting command that ends a run.
pub const HINT_STOP: u32 = 0;

/// The host's configuration of a balloon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonConfig {
    /// The maximum target: all pages of the guest.
    pub limit_pages: u32,
    /// The initial target.
    pub target_pages: u32,
    /// The guest may take pages back rather than kill a process.
    pub deflate_on_oom: bool,
    /// The guest reports free blocks all the time.
    pub free_page_reporting: bool,
    /// The guest can be asked for its free pages.
    pub free_page_hinting: bool,
}

/// Returns the number of pages of `mib`, as far as a balloon can count.
pub fn pages_of_mib(mib: u64) -> u32 {
    u32::try_from(mib.saturating_mul((1 << 20) / PAGE_SIZE)).unwrap_or(u32::MAX)
}

/// Returns the configuration space of virtio 1.2 section 5.5.4. The driver's writes to it are
/// ignored: the device counts the pages itself.
pub fn space(target_pages: u32, actual_pages: u32, hint_command: u32) -> Vec<u8> {
    // The poison value is zero, because that feature is not offered.
    [target_pages, actual_pages, hint_command, 0]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect()
}
