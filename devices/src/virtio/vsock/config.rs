//! The host's configuration of a vsock device: the guest's address and the path of the Unix
//! sockets.
//!
//! It is checked here, once; the device opens the socket.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::VsockError;

/// The longest path of a Unix socket, without its final zero. Where the path leaves no room for a
/// port after it, the sockets of ports are reached through their folder.
pub const MAX_UDS_PATH: usize = 107;

/// The host's configuration of a vsock device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockConfig {
    /// The guest's address: 3 or more, and below 2^32 - 1.
    pub guest_cid: u64,
    /// The socket that host clients connect to; a guest's connection to port P goes to
    /// `<uds_path>_P`.
    pub uds_path: PathBuf,
    /// Keep the socket's file when the device ends.
    pub keep_socket: bool,
    /// The path before `_<port>` that the guest's connections go to; `uds_path` by default.
    pub dial_path: Option<PathBuf>,
}

impl VsockConfig {
    /// Checks everything that does not require the file system.
    pub fn validate(&self) -> Result<(), VsockError> {
        check_cid(self.guest_cid)?;
        let path = self.uds_path.as_os_str().as_bytes();
        if path.is_empty() || path.contains(&0) || self.uds_path.file_name().is_none() {
            return Err(VsockError::Path { path: self.uds_path.clone() });
        }
        if path.len() > MAX_UDS_PATH {
            let (path, len) = (self.uds_path.clone(), path.len());
            return Err(VsockError::PathTooLong { path, len, max: MAX_UDS_PATH });
        }
        Ok(())
    }
}

/// Refuses the reserved addresses: 0 to 2, and VMADDR_CID_ANY.
pub(super) fn check_cid(guest_cid: u64) -> Result<(), VsockError> {
    if (3..u64::from(u32::MAX)).contains(&guest_cid) {
        Ok(())
    } else {
        Err(VsockError::GuestCid { guest_cid })
    }
}

/// Returns the configuration space: the guest's address.
pub(super) fn space(guest_cid: u64) -> Vec<u8> {
    guest_cid.to_le_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(guest_cid: u64, uds_path: &str) -> VsockConfig {
        VsockConfig { guest_cid, uds_path: uds_path.into(), keep_socket: false, dial_path: None }
    }

    #[test]
    fn config_with_a_reserved_address_is_refused() {
        for cid in [0, 1, 2, u64::from(u32::MAX), 1 << 32, u64::MAX] {
            assert!(config(cid, "/x").validate().is_err(), "{cid}");
        }
        for cid in [3, u64::from(u32::MAX) - 1] {
            config(cid, "/x").validate().unwrap();
        }
    }

    #[test]
    fn config_with_a_path_longer_than_a_socket_can_have_is_refused() {
        let fits = "x".repeat(MAX_UDS_PATH);
        config(3, &fits).validate().unwrap();
        assert!(config(3, &(fits + "x")).validate().is_err());
    }

    #[test]
    fn config_with_a_path_that_names_no_file_is_refused() {
        for path in ["", "/", "a/..", "a\0b"] {
            assert!(config(3, path).validate().is_err(), "{path:?}");
        }
    }
}
