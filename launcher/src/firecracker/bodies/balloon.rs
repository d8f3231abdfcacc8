//! The balloon device: its size, the guest's memory statistics, and free page hinting.

use pvmm::BalloonStats as Told;
use serde::{Deserialize, Serialize};

use super::or_default;

/// `PUT` and `GET /balloon`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Balloon {
    pub amount_mib: u32,
    pub deflate_on_oom: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub stats_polling_interval_s: u16,
    #[serde(default, deserialize_with = "or_default")]
    pub free_page_hinting: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub free_page_reporting: bool,
}

/// `PATCH /balloon`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonUpdate {
    pub amount_mib: u32,
}

/// `PATCH /balloon/statistics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatsUpdate {
    pub stats_polling_interval_s: u16,
}

/// `PATCH /balloon/hinting/start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HintingStart {
    pub acknowledge_on_stop: bool,
}

impl Default for HintingStart {
    fn default() -> Self {
        Self { acknowledge_on_stop: true }
    }
}

/// `GET /balloon/hinting/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HintingStatus {
    pub host_cmd: u32,
    pub guest_cmd: Option<u32>,
}

/// `GET /balloon/statistics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BalloonStats {
    pub target_pages: u64,
    pub actual_pages: u64,
    pub target_mib: u64,
    pub actual_mib: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_in: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_out: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_memory: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_memory: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_memory: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_caches: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugetlb_allocations: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugetlb_failures: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_kill: Option<u64>,
}

impl From<Told> for BalloonStats {
    fn from(told: Told) -> Self {
        Self {
            target_pages: told.target_bytes >> 12,
            actual_pages: told.actual_bytes >> 12,
            target_mib: told.target_bytes >> 20,
            actual_mib: told.actual_bytes >> 20,
            swap_in: told.swapped_in,
            swap_out: told.swapped_out,
            major_faults: told.major_faults,
            minor_faults: told.minor_faults,
            free_memory: told.free,
            total_memory: told.total,
            available_memory: told.available,
            disk_caches: told.disk_caches,
            hugetlb_allocations: told.hugetlb_allocations,
            hugetlb_failures: told.hugetlb_failures,
            oom_kill: told.oom_kills,
        }
    }
}
