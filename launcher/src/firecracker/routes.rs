//! Maps method, path and body of a request to an `ApiCall`, or to the reason why it is refused.
//!
//! Nothing here depends on the state of the VM; `rules.rs` decides what is allowed when.

use pvmm::cpu::CpuModifiers;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::bodies::{
    Action, ActionType, Balloon, BalloonUpdate, BootSource, Drive, DriveUpdate, Entropy, Exec,
    Fork, ForkLoad, HintingStart, LoadWithDrives, Logger, MachineConfig, MachineUpdate, Metrics,
    MmdsConfig, MmdsVersion, Moment, NetUpdate, NetworkInterface, Serial, SnapshotCreate,
    SnapshotLoad, StatsUpdate, VmState, VmUpdate, Vsock,
};
use super::http::{Method, Refusal};

/// The fields whose values may be arrays.
const LISTS: [&str; 4] = ["argv", "drive_overrides", "network_interfaces", "network_overrides"];

/// A parsed API request.
#[derive(Clone, Debug, PartialEq)]
pub enum ApiCall {
    GetInstance,
    GetVersion,
    GetMachine,
    GetConfig,
    PutBootSource(BootSource),
    PutMachine(MachineConfig),
    PutCpuConfig(CpuModifiers),
    PatchMachine(MachineUpdate),
    PutDrive(Drive),
    PatchDrive(DriveUpdate),
    PutNet(NetworkInterface),
    PatchNet(NetUpdate),
    PutVsock(Vsock),
    PutEntropy(Entropy),
    PutBalloon(Balloon),
    GetBalloon,
    PatchBalloon(BalloonUpdate),
    GetBalloonStats,
    PatchBalloonStats(StatsUpdate),
    StartHinting(HintingStart),
    GetHinting,
    StopHinting,
    PutLogger(Logger),
    PutMetrics(Metrics),
    PutSerial(Serial),
    GetMmds,
    PutMmds(Value),
    PatchMmds(Value),
    PutMmdsConfig(MmdsConfig),
    InstanceStart,
    SendCtrlAltDel,
    FlushMetrics,
    Pause,
    Resume,
    CreateSnapshot(SnapshotCreate),
    LoadSnapshot(LoadWithDrives),
    Fork(Fork),
    LoadFork(ForkLoad),
    Checkpoint(Moment),
    Rollback(Moment),
    Exec(Exec),
    /// A Firecracker feature that pvmm does not support.
    Unsupported(Unsupported),
}

/// Firecracker features that pvmm does not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsupported {
    Pmem,
    HotplugMemory,
    Unplug,
}

impl Unsupported {
    pub fn refusal(self) -> Refusal {
        Refusal::bad(match self {
            Self::Pmem => "pmem: virtio-pmem is not supported yet; attach the image as a drive.",
            Self::HotplugMemory => {
                "hotplug/memory: virtio-mem is not supported yet; give the machine its memory at \
                 boot and use a balloon."
            }
            Self::Unplug => "Devices cannot be unplugged: PCI is not supported yet.",
        })
    }
}

/// A parsed request, and the name of the deprecated feature that it uses, if any.
#[derive(Clone, Debug, PartialEq)]
pub struct Routed {
    pub request: ApiCall,
    pub deprecated: Option<&'static str>,
}

impl From<ApiCall> for Routed {
    fn from(request: ApiCall) -> Self {
        Self { request, deprecated: None }
    }
}

pub fn route(method: Method, path: &str, body: Option<&[u8]>) -> Result<Routed, Refusal> {
    let mut parts = path.trim_start_matches('/').split_terminator('/');
    let first = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    match method {
        Method::Get if body.is_some() => Err(Refusal::bad("GET request cannot have a body.")),
        Method::Get => get(first, &rest).ok_or_else(|| unknown(method, path)),
        Method::Put => put(first, &rest, body, path),
        Method::Patch => patch(first, &rest, body, path),
        Method::Delete if matches!(first, "drives" | "pmem" | "network-interfaces") => {
            Ok(ApiCall::Unsupported(Unsupported::Unplug).into())
        }
        Method::Delete => Err(unknown(method, path)),
    }
}

fn get(first: &str, rest: &[&str]) -> Option<Routed> {
    let request = match (first, rest) {
        ("", []) => ApiCall::GetInstance,
        ("version", []) => ApiCall::GetVersion,
        ("machine-config", []) => ApiCall::GetMachine,
        ("vm", ["config"]) => ApiCall::GetConfig,
        ("mmds", []) => ApiCall::GetMmds,
        ("balloon", []) => ApiCall::GetBalloon,
        ("balloon", ["statistics"]) => ApiCall::GetBalloonStats,
        ("balloon", ["hinting", "status"]) => ApiCall::GetHinting,
        ("hotplug", ["memory"]) => ApiCall::Unsupported(Unsupported::HotplugMemory),
        _ => return None,
    };
    Some(request.into())
}

fn put(first: &str, rest: &[&str], body: Option<&[u8]>, path: &str) -> Result<Routed, Refusal> {
    let no_body = first == "pvmm" && matches!(rest, ["checkpoint" | "rollback"]);
    let body = match body {
        Some(body) => body,
        None if no_body => b"{}",
        None => return Err(Refusal::bad("Empty PUT request.")),
    };
    let request = match (first, rest) {
        ("boot-source", []) => ApiCall::PutBootSource(read(body)?),
        ("machine-config", []) => return put_machine(body),
        ("drives", ids) => ApiCall::PutDrive(named(body, ids, |drive: &Drive| &drive.drive_id)?),
        ("network-interfaces", ids) => {
            ApiCall::PutNet(named(body, ids, |net: &NetworkInterface| &net.iface_id)?)
        }
        ("vsock", []) => return put_vsock(body),
        ("entropy", []) => ApiCall::PutEntropy(read(body)?),
        ("balloon", []) => ApiCall::PutBalloon(read(body)?),
        ("logger", []) => ApiCall::PutLogger(read(body)?),
        ("metrics", []) => ApiCall::PutMetrics(read(body)?),
        ("serial", []) => ApiCall::PutSerial(read(body)?),
        ("mmds", []) => ApiCall::PutMmds(read_any(body)?),
        ("mmds", ["config"]) => return put_mmds_config(body),
        ("actions", []) => match read::<Action>(body)?.action_type {
            ActionType::FlushMetrics => ApiCall::FlushMetrics,
            ActionType::InstanceStart => ApiCall::InstanceStart,
            ActionType::SendCtrlAltDel => ApiCall::SendCtrlAltDel,
        },
        ("snapshot", ["create"]) => ApiCall::CreateSnapshot(read(body)?),
        ("snapshot", ["load"]) => {
            return load(LoadWithDrives { load: read(body)?, drive_overrides: Vec::new() });
        }
        // An error names the field, which the derived types of other bodies do not.
        ("cpu-config", []) => {
            ApiCall::PutCpuConfig(CpuModifiers::from_json(body).map_err(bad_body)?)
        }
        ("pmem", _) => ApiCall::Unsupported(Unsupported::Pmem),
        ("hotplug", ["memory"]) => ApiCall::Unsupported(Unsupported::HotplugMemory),
        ("pvmm", ["snapshot", "load"]) => return load(read(body)?),
        ("pvmm", ["fork"]) => ApiCall::Fork(read(body)?),
        ("pvmm", ["fork", "load"]) => ApiCall::LoadFork(read(body)?),
        ("pvmm", ["checkpoint"]) => ApiCall::Checkpoint(read(body)?),
        ("pvmm", ["rollback"]) => ApiCall::Rollback(read(body)?),
        ("pvmm", ["exec"]) => ApiCall::Exec(read(body)?),
        _ => return Err(unknown(Method::Put, path)),
    };
    Ok(request.into())
}

fn patch(first: &str, rest: &[&str], body: Option<&[u8]>, path: &str) -> Result<Routed, Refusal> {
    let request = match (first, rest, body) {
        ("balloon", ["hinting", "start"], None) => ApiCall::StartHinting(HintingStart::default()),
        ("balloon", ["hinting", "start"], Some(body)) => ApiCall::StartHinting(read(body)?),
        ("balloon", ["hinting", "stop"], _) => ApiCall::StopHinting,
        (.., None) => return Err(Refusal::bad("Empty PATCH request.")),
        ("machine-config", [], Some(body)) => {
            let update: MachineUpdate = read(body)?;
            if update.is_empty() {
                return Err(Refusal::bad("Empty PATCH request."));
            }
            let deprecated = update.cpu_template.map(|_| "cpu_template");
            return Ok(Routed { request: ApiCall::PatchMachine(update), deprecated });
        }
        ("drives", ids, Some(body)) => {
            ApiCall::PatchDrive(named(body, ids, |update: &DriveUpdate| &update.drive_id)?)
        }
        ("network-interfaces", ids, Some(body)) => {
            ApiCall::PatchNet(named(body, ids, |update: &NetUpdate| &update.iface_id)?)
        }
        ("balloon", [], Some(body)) => ApiCall::PatchBalloon(read(body)?),
        ("balloon", ["statistics"], Some(body)) => ApiCall::PatchBalloonStats(read(body)?),
        ("mmds", [], Some(body)) => ApiCall::PatchMmds(read_any(body)?),
        ("vm", [], Some(body)) => match read::<VmUpdate>(body)?.state {
            VmState::Paused => ApiCall::Pause,
            VmState::Resumed => ApiCall::Resume,
        },
        ("pmem", ..) => ApiCall::Unsupported(Unsupported::Pmem),
        ("hotplug", ["memory"], _) => ApiCall::Unsupported(Unsupported::HotplugMemory),
        _ => return Err(unknown(Method::Patch, path)),
    };
    Ok(request.into())
}

fn put_machine(body: &[u8]) -> Result<Routed, Refusal> {
    let machine: MachineConfig = read(body)?;
    let deprecated = machine.cpu_template.map(|_| "cpu_template");
    Ok(Routed { request: ApiCall::PutMachine(machine), deprecated })
}

fn put_vsock(body: &[u8]) -> Result<Routed, Refusal> {
    let vsock: Vsock = read(body)?;
    let deprecated = vsock.vsock_id.as_ref().map(|_| "vsock_id");
    Ok(Routed { request: ApiCall::PutVsock(vsock), deprecated })
}

fn put_mmds_config(body: &[u8]) -> Result<Routed, Refusal> {
    let config: MmdsConfig = read(body)?;
    let deprecated = (config.version == MmdsVersion::V1).then_some("version V1");
    Ok(Routed { request: ApiCall::PutMmdsConfig(config), deprecated })
}

fn load(with: LoadWithDrives) -> Result<Routed, Refusal> {
    let SnapshotLoad { mem_file_path, enable_diff_snapshots, .. } = &with.load;
    with.load.memory().map_err(bad_body)?;
    let deprecated = (mem_file_path.is_some() || *enable_diff_snapshots)
        .then_some("mem_file_path or enable_diff_snapshots");
    Ok(Routed { request: ApiCall::LoadSnapshot(with), deprecated })
}

/// Parses a body whose id must equal the id in the path.
fn named<T: DeserializeOwned>(
    body: &[u8],
    ids: &[&str],
    id_of: impl Fn(&T) -> &String,
) -> Result<T, Refusal> {
    let [id] = ids else { return Err(Refusal::bad("The path must end with one id.")) };
    if !id.chars().all(|c| c == '_' || c.is_alphanumeric()) {
        let what = "API Resource IDs can only contain alphanumeric characters and underscores.";
        return Err(Refusal::bad(what));
    }
    let value: T = read(body)?;
    if id_of(&value) == id {
        Ok(value)
    } else {
        Err(Refusal::bad("The id from the path does not match the id from the body!"))
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    let value = read_any(body)?;
    if is_by_name(&read_any(body)?) {
        Ok(value)
    } else {
        Err(bad_body("an array stands where an object belongs"))
    }
}

fn read_any<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(bad_body)
}

/// Whether every struct is a JSON object. The derived types would also accept an array of field
/// values in declaration order.
fn is_by_name(value: &Value) -> bool {
    let Value::Object(fields) = value else { return !value.is_array() };
    fields.iter().all(|(name, value)| match value {
        Value::Array(items) => LISTS.contains(&name.as_str()) && items.iter().all(is_by_name),
        value => is_by_name(value),
    })
}

fn bad_body(error: impl std::fmt::Display) -> Refusal {
    let text = "An error occurred when deserializing the json body of a request";
    Refusal::bad(format!("{text}: {error}."))
}

fn unknown(method: Method, path: &str) -> Refusal {
    let path = path.trim_start_matches('/');
    Refusal::bad(format!("Invalid request method and/or path: {} {path}.", method.name()))
}

#[cfg(test)]
#[path = "routes_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "openapi_tests.rs"]
mod openapi;
