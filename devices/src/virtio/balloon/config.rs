//! What the host asks of a balloon, and the configuration space that the guest reads.

/// A balloon counts in pages of this size, whatever the guest's are.
pub const PAGE_SIZE: u64 = 4096;
/// What the command of hinting is when there is no run: the last one's pages may be used again.
pub const HINT_DONE: u32 = 1;
/// The command that ends a run.
pub const HINT_STOP: u32 = 0;

/// A balloon as the host wishes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonConfig {
    /// The most that may ever be asked for: what the guest has.
    pub limit_pages: u32,
    /// How much the guest is to give up at first.
    pub target_pages: u32,
    /// The guest may take pages back rather than kill a process.
    pub deflate_on_oom: bool,
    /// The guest names free blocks all the time.
    pub free_page_reporting: bool,
    /// The guest can be asked for its free pages.
    pub free_page_hinting: bool,
}

/// The configuration space of virtio 1.2 section 5.5.4. What the driver writes there is not read: how
/// far it got is counted here.
pub fn space(target_pages: u32, actual_pages: u32, hint_command: u32) -> Vec<u8> {
    // No poison value, for that feature is not offered.
    [target_pages, actual_pages, hint_command, 0]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect()
}
