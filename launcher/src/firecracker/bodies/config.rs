//! The configuration of a whole VM: the configuration file, `GET /vm/config`, and the note in a
//! snapshot's state file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    Balloon, BootSource, Drive, Entropy, Logger, MachineConfig, Metrics, MmdsConfig,
    NetworkInterface, Vsock, or_default,
};

#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Config {
    #[serde(default)]
    pub balloon: Option<Balloon>,
    #[serde(default, deserialize_with = "or_default")]
    pub drives: Vec<Drive>,
    #[serde(default, deserialize_with = "or_default")]
    pub boot_source: BootSource,
    #[serde(default)]
    pub cpu_config: Option<Value>,
    #[serde(default)]
    pub logger: Option<Logger>,
    #[serde(default, deserialize_with = "or_default")]
    pub machine_config: MachineConfig,
    #[serde(default)]
    pub metrics: Option<Metrics>,
    #[serde(default)]
    pub mmds_config: Option<MmdsConfig>,
    #[serde(default, deserialize_with = "or_default")]
    pub network_interfaces: Vec<NetworkInterface>,
    #[serde(default)]
    pub vsock: Option<Vsock>,
    #[serde(default)]
    pub entropy: Option<Entropy>,
    #[serde(default, deserialize_with = "or_default")]
    pub pmem: Vec<Value>,
    #[serde(default)]
    pub memory_hotplug: Option<Value>,
    /// Unknown fields; they are ignored.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, Value>,
}
