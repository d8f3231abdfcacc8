//! Which request is which: method, path and body in, a typed request out, or why it is none.
//!
//! Nothing here knows the state of a machine; what may be asked when is decided by those who carry it out.

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::bodies::{
    Action, ActionType, Balloon, BalloonUpdate, BootSource, Drive, DriveUpdate, Entropy, Exec,
    Fork, ForkLoad, HintingStart, LoadWithDrives, Logger, MachineConfig, MachineUpdate, Metrics,
    MmdsConfig, MmdsVersion, Moment, NetUpdate, NetworkInterface, Serial, SnapshotCreate,
    SnapshotLoad, StatsUpdate, VmState, VmUpdate, Vsock,
};
use super::http::{Method, Refusal};

/// The fields that are lists.
const LISTS: [&str; 4] = ["argv", "drive_overrides", "network_interfaces", "network_overrides"];

/// What is asked.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    GetInstance,
    GetVersion,
    GetMachine,
    GetConfig,
    PutBootSource(BootSource),
    PutMachine(MachineConfig),
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
    /// Something of Firecracker that is not here.
    Unsupported(Unsupported),
}

/// What Firecracker has and pvmm has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsupported {
    CpuConfig,
    Pmem,
    HotplugMemory,
    Unplug,
}

impl Unsupported {
    pub fn refusal(self) -> Refusal {
        Refusal::bad(match self {
            Self::CpuConfig => {
                "cpu-config: custom CPU templates are not supported yet; leave it out."
            }
            Self::Pmem => "pmem: virtio-pmem is not supported yet; attach the image as a drive.",
            Self::HotplugMemory => {
                "hotplug/memory: virtio-mem is not supported yet; give the machine its memory at \
                 boot and use a balloon."
            }
            Self::Unplug => "Devices cannot be unplugged: PCI is not supported yet.",
        })
    }
}

/// A request, and whether it uses something that will go away.
#[derive(Clone, Debug, PartialEq)]
pub struct Routed {
    pub request: Request,
    pub deprecated: Option<&'static str>,
}

impl From<Request> for Routed {
    fn from(request: Request) -> Self {
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
            Ok(Request::Unsupported(Unsupported::Unplug).into())
        }
        Method::Delete => Err(unknown(method, path)),
    }
}

fn get(first: &str, rest: &[&str]) -> Option<Routed> {
    let request = match (first, rest) {
        ("", []) => Request::GetInstance,
        ("version", []) => Request::GetVersion,
        ("machine-config", []) => Request::GetMachine,
        ("vm", ["config"]) => Request::GetConfig,
        ("mmds", []) => Request::GetMmds,
        ("balloon", []) => Request::GetBalloon,
        ("balloon", ["statistics"]) => Request::GetBalloonStats,
        ("balloon", ["hinting", "status"]) => Request::GetHinting,
        ("hotplug", ["memory"]) => Request::Unsupported(Unsupported::HotplugMemory),
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
        ("boot-source", []) => Request::PutBootSource(read(body)?),
        ("machine-config", []) => return put_machine(body),
        ("drives", ids) => Request::PutDrive(named(body, ids, |drive: &Drive| &drive.drive_id)?),
        ("network-interfaces", ids) => {
            Request::PutNet(named(body, ids, |net: &NetworkInterface| &net.iface_id)?)
        }
        ("vsock", []) => return put_vsock(body),
        ("entropy", []) => Request::PutEntropy(read(body)?),
        ("balloon", []) => Request::PutBalloon(read(body)?),
        ("logger", []) => Request::PutLogger(read(body)?),
        ("metrics", []) => Request::PutMetrics(read(body)?),
        ("serial", []) => Request::PutSerial(read(body)?),
        ("mmds", []) => Request::PutMmds(read_any(body)?),
        ("mmds", ["config"]) => return put_mmds_config(body),
        ("actions", []) => match read::<Action>(body)?.action_type {
            ActionType::FlushMetrics => Request::FlushMetrics,
            ActionType::InstanceStart => Request::InstanceStart,
            ActionType::SendCtrlAltDel => Request::SendCtrlAltDel,
        },
        ("snapshot", ["create"]) => Request::CreateSnapshot(read(body)?),
        ("snapshot", ["load"]) => {
            return load(LoadWithDrives { load: read(body)?, drive_overrides: Vec::new() });
        }
        ("cpu-config", []) => Request::Unsupported(Unsupported::CpuConfig),
        ("pmem", _) => Request::Unsupported(Unsupported::Pmem),
        ("hotplug", ["memory"]) => Request::Unsupported(Unsupported::HotplugMemory),
        ("pvmm", ["snapshot", "load"]) => return load(read(body)?),
        ("pvmm", ["fork"]) => Request::Fork(read(body)?),
        ("pvmm", ["fork", "load"]) => Request::LoadFork(read(body)?),
        ("pvmm", ["checkpoint"]) => Request::Checkpoint(read(body)?),
        ("pvmm", ["rollback"]) => Request::Rollback(read(body)?),
        ("pvmm", ["exec"]) => Request::Exec(read(body)?),
        _ => return Err(unknown(Method::Put, path)),
    };
    Ok(request.into())
}

fn patch(first: &str, rest: &[&str], body: Option<&[u8]>, path: &str) -> Result<Routed, Refusal> {
    let request = match (first, rest, body) {
        ("balloon", ["hinting", "start"], None) => Request::StartHinting(HintingStart::default()),
        ("balloon", ["hinting", "start"], Some(body)) => Request::StartHinting(read(body)?),
        ("balloon", ["hinting", "stop"], _) => Request::StopHinting,
        (.., None) => return Err(Refusal::bad("Empty PATCH request.")),
        ("machine-config", [], Some(body)) => {
            let update: MachineUpdate = read(body)?;
            if update.is_empty() {
                return Err(Refusal::bad("Empty PATCH request."));
            }
            let deprecated = update.cpu_template.map(|_| "cpu_template");
            return Ok(Routed { request: Request::PatchMachine(update), deprecated });
        }
        ("drives", ids, Some(body)) => {
            Request::PatchDrive(named(body, ids, |update: &DriveUpdate| &update.drive_id)?)
        }
        ("network-interfaces", ids, Some(body)) => {
            Request::PatchNet(named(body, ids, |update: &NetUpdate| &update.iface_id)?)
        }
        ("balloon", [], Some(body)) => Request::PatchBalloon(read(body)?),
        ("balloon", ["statistics"], Some(body)) => Request::PatchBalloonStats(read(body)?),
        ("mmds", [], Some(body)) => Request::PatchMmds(read_any(body)?),
        ("vm", [], Some(body)) => match read::<VmUpdate>(body)?.state {
            VmState::Paused => Request::Pause,
            VmState::Resumed => Request::Resume,
        },
        ("pmem", ..) => Request::Unsupported(Unsupported::Pmem),
        ("hotplug", ["memory"], _) => Request::Unsupported(Unsupported::HotplugMemory),
        _ => return Err(unknown(Method::Patch, path)),
    };
    Ok(request.into())
}

fn put_machine(body: &[u8]) -> Result<Routed, Refusal> {
    let machine: MachineConfig = read(body)?;
    let deprecated = machine.cpu_template.map(|_| "cpu_template");
    Ok(Routed { request: Request::PutMachine(machine), deprecated })
}

fn put_vsock(body: &[u8]) -> Result<Routed, Refusal> {
    let vsock: Vsock = read(body)?;
    let deprecated = vsock.vsock_id.as_ref().map(|_| "vsock_id");
    Ok(Routed { request: Request::PutVsock(vsock), deprecated })
}

fn put_mmds_config(body: &[u8]) -> Result<Routed, Refusal> {
    let config: MmdsConfig = read(body)?;
    let deprecated = (config.version == MmdsVersion::V1).then_some("version V1");
    Ok(Routed { request: Request::PutMmdsConfig(config), deprecated })
}

fn load(with: LoadWithDrives) -> Result<Routed, Refusal> {
    let SnapshotLoad { mem_file_path, enable_diff_snapshots, .. } = &with.load;
    with.load.memory().map_err(bad_body)?;
    let deprecated = (mem_file_path.is_some() || *enable_diff_snapshots)
        .then_some("mem_file_path or enable_diff_snapshots");
    Ok(Routed { request: Request::LoadSnapshot(with), deprecated })
}

/// A body that names the resource that the path names.
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
    match id_of(&value) == id {
        true => Ok(value),
        false => Err(Refusal::bad("The id from the path does not match the id from the body!")),
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    let value = read_any(body)?;
    match is_by_name(&read_any(body)?) {
        true => Ok(value),
        false => Err(bad_body("an array stands where an object belongs")),
    }
}

fn read_any<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(bad_body)
}

/// Whether every field is named. The types themselves would also take an array of fields in their order.
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
