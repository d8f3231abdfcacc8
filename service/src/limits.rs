//! Admission: may a token start more sandboxes now, and has the host room for them?
//!
//! A start holds a reservation until its sandbox is counted, so that many starts at once cannot
//! pass a limit together.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::error::ApiError;
use crate::options::Limits;

/// Memory that a new sandbox is expected to take before its use shows in the host's own count.
const STARTING_MIB: u64 = 64;
/// Seconds after which a client may ask again for room.
const RETRY: u64 = 5;

/// The sandboxes and the memory of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// The number of sandboxes.
    pub sandboxes: u64,
    /// Their guest memory in MiB.
    pub memory_mib: u64,
}

/// The free room of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    memory_mib: u64,
    disk_mib: u64,
}

/// The limits and what counts towards them.
pub struct Admission {
    limits: Limits,
    data_dir: PathBuf,
    state: Arc<Mutex<Starts>>,
}

#[derive(Default)]
struct Starts {
    /// The starts under way, by token.
    reserved: HashMap<String, Use>,
    /// The starts of the current second, by token: when it began, and how many.
    recent: HashMap<String, (Instant, u32)>,
}

/// Room that is held for a start. Dropping it gives the room back.
pub struct Reservation {
    owner: String,
    wanted: Use,
    state: Arc<Mutex<Starts>>,
}

fn lock(state: &Mutex<Starts>) -> MutexGuard<'_, Starts> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        if let Some(held) = state.reserved.get_mut(&self.owner) {
            held.sandboxes = held.sandboxes.saturating_sub(self.wanted.sandboxes);
            held.memory_mib = held.memory_mib.saturating_sub(self.wanted.memory_mib);
            if held.sandboxes == 0 {
                state.reserved.remove(&self.owner);
            }
        }
    }
}

impl Admission {
    /// Prepares the limits for a data directory.
    pub fn new(limits: Limits, data_dir: PathBuf) -> Self {
        Self { limits, data_dir, state: Arc::default() }
    }

    /// Returns the limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Reserves room for `wanted`, or refuses with the reason. `used` is what the token has now.
    pub fn reserve(&self, owner: &str, used: Use, wanted: Use) -> Result<Reservation, ApiError> {
        let room = Room { memory_mib: available_mib()?, disk_mib: self.free_disk_mib()? };
        self.reserve_within(owner, used, wanted, room)
    }

    fn reserve_within(
        &self,
        owner: &str,
        used: Use,
        wanted: Use,
        room: Room,
    ) -> Result<Reservation, ApiError> {
        let limits = &self.limits;
        let mut state = lock(&self.state);
        count_start(&mut state, owner, limits.creates_per_second)?;
        let held = state.reserved.get(owner).copied().unwrap_or_default();
        let sandboxes = used.sandboxes + held.sandboxes + wanted.sandboxes;
        if sandboxes > u64::from(limits.sandboxes) {
            let message = format!("max sandboxes reached: {} at a time", limits.sandboxes);
            return Err(ApiError::too_many(message, RETRY));
        }
        if used.memory_mib + held.memory_mib + wanted.memory_mib > limits.memory_mib {
            let message = format!("max memory reached: {} MiB at a time", limits.memory_mib);
            return Err(ApiError::too_many(message, RETRY));
        }
        let starting: u64 = state.reserved.values().map(|held| held.sandboxes).sum();
        let needed = limits.reserve_mib + (starting + wanted.sandboxes) * STARTING_MIB;
        if room.memory_mib < needed {
            let message = format!(
                "insufficient host memory for sandbox: {} MiB are free, {needed} MiB are needed",
                room.memory_mib
            );
            return Err(ApiError::unavailable(message, RETRY));
        }
        if room.disk_mib < limits.reserve_disk_mib {
            let message = format!("insufficient host disk: {} MiB are free", room.disk_mib);
            return Err(ApiError::disk_full(message));
        }
        let entry = state.reserved.entry(owner.to_owned()).or_default();
        entry.sandboxes += wanted.sandboxes;
        entry.memory_mib += wanted.memory_mib;
        let state = Arc::clone(&self.state);
        Ok(Reservation { owner: owner.to_owned(), wanted, state })
    }

    /// Refuses an act that writes to the data directory while its disk is full.
    pub fn require_disk(&self) -> Result<(), ApiError> {
        let free = self.free_disk_mib()?;
        if free < self.limits.reserve_disk_mib {
            Err(ApiError::disk_full(format!("insufficient host disk: {free} MiB free")))
        } else {
            Ok(())
        }
    }

    fn free_disk_mib(&self) -> Result<u64, ApiError> {
        let stat = rustix::fs::statvfs(&self.data_dir).map_err(std::io::Error::from)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize) >> 20)
    }
}

/// Counts a start towards the rate of a token, or refuses it.
fn count_start(state: &mut Starts, owner: &str, per_second: u32) -> Result<(), ApiError> {
    let now = Instant::now();
    state.recent.retain(|_, (begun, _)| now.duration_since(*begun).as_secs() < 1);
    let (_, count) = state.recent.entry(owner.to_owned()).or_insert((now, 0));
    if *count >= per_second {
        return Err(ApiError::too_many(format!("more than {per_second} creates in a second"), 1));
    }
    *count += 1;
    Ok(())
}

/// Returns the memory that the host can give without swapping, in MiB.
pub fn available_mib() -> Result<u64, ApiError> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    parse_available(&text).ok_or_else(|| ApiError::internal("/proc/meminfo has no MemAvailable"))
}

fn parse_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room { memory_mib: 10_000, disk_mib: 10_000 };
    const ONE: Use = Use { sandboxes: 1, memory_mib: 1024 };

    fn admission(limits: Limits) -> Admission {
        Admission::new(limits, std::env::temp_dir())
    }

    #[test]
    fn reservation_counts_until_it_is_dropped() {
        let admission = admission(Limits { sandboxes: 2, ..Limits::default() });
        let used = Use { sandboxes: 1, memory_mib: 1024 };
        let held = admission.reserve_within("a", used, ONE, ROOM).unwrap();
        let refused = admission.reserve_within("a", used, ONE, ROOM).err().unwrap();
        assert_eq!((refused.status.as_u16(), refused.retry_after), (429, Some(RETRY)));
        assert!(admission.reserve_within("b", Use::default(), ONE, ROOM).is_ok());
        drop(held);
        assert!(admission.reserve_within("a", used, ONE, ROOM).is_ok());
    }

    #[test]
    fn rate_beyond_the_limit_is_refused_for_a_second() {
        let admission = admission(Limits { creates_per_second: 2, ..Limits::default() });
        for _ in 0..2 {
            drop(admission.reserve_within("a", Use::default(), ONE, ROOM).unwrap());
        }
        let refused = admission.reserve_within("a", Use::default(), ONE, ROOM).err().unwrap();
        assert_eq!((refused.status.as_u16(), refused.retry_after), (429, Some(1)));
    }

    #[test]
    fn host_without_room_refuses_with_the_reason() {
        let admission = admission(Limits::default());
        let low = Room { memory_mib: 100, ..ROOM };
        let refused = admission.reserve_within("a", Use::default(), ONE, low).err().unwrap();
        assert_eq!((refused.status.as_u16(), refused.retry_after), (503, Some(RETRY)));
        assert!(refused.message.contains("100 MiB are free"), "{}", refused.message);
        let full = Room { disk_mib: 1, ..ROOM };
        let refused = admission.reserve_within("a", Use::default(), ONE, full).err().unwrap();
        assert_eq!(refused.status.as_u16(), 507);
    }

    #[test]
    fn available_memory_is_parsed() {
        assert_eq!(parse_available("MemTotal: 1 kB\nMemAvailable:    2048 kB\n"), Some(2));
        assert_eq!(parse_available("MemTotal: 1 kB\n"), None);
        assert!(available_mib().unwrap() > 0);
    }
}
