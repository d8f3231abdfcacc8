//! vCPUs, memory and the kernel.

use serde::{Deserialize, Serialize};

use super::or_default;

/// `PUT /boot-source`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BootSource {
    pub kernel_image_path: String,
    #[serde(default)]
    pub initrd_path: Option<String>,
    #[serde(default)]
    pub boot_args: Option<String>,
}

/// How the host backs guest memory: a hint that the guest cannot see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum HugePages {
    #[default]
    None,
    Transparent,
    #[serde(rename = "2M")]
    Hugetlbfs2M,
}

/// Firecracker's named CPU templates; `V1N1` is for another architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum CpuTemplate {
    C3,
    T2,
    T2S,
    T2CL,
    T2A,
    V1N1,
    None,
}

/// `PUT` and `GET /machine-config`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MachineConfig {
    pub vcpu_count: u8,
    pub mem_size_mib: u64,
    #[serde(default, deserialize_with = "or_default")]
    pub smt: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_template: Option<CpuTemplate>,
    #[serde(default, deserialize_with = "or_default")]
    pub track_dirty_pages: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub huge_pages: HugePages,
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self {
            vcpu_count: 1,
            mem_size_mib: 128,
            smt: false,
            cpu_template: None,
            track_dirty_pages: false,
            huge_pages: HugePages::None,
        }
    }
}

/// `PATCH /machine-config`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MachineUpdate {
    pub vcpu_count: Option<u8>,
    pub mem_size_mib: Option<u64>,
    pub smt: Option<bool>,
    pub cpu_template: Option<CpuTemplate>,
    pub track_dirty_pages: Option<bool>,
    pub huge_pages: Option<HugePages>,
}

impl MachineUpdate {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns `machine` with the fields of this update replaced.
    pub fn applied_to(self, machine: &MachineConfig) -> MachineConfig {
        MachineConfig {
            vcpu_count: self.vcpu_count.unwrap_or(machine.vcpu_count),
            mem_size_mib: self.mem_size_mib.unwrap_or(machine.mem_size_mib),
            smt: self.smt.unwrap_or(machine.smt),
            cpu_template: self.cpu_template.or(machine.cpu_template),
            track_dirty_pages: self.track_dirty_pages.unwrap_or(machine.track_dirty_pages),
            huge_pages: self.huge_pages.unwrap_or(machine.huge_pages),
        }
    }
}
