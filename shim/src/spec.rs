//! The OCI configuration of a container, made one for crun in the guest.
//!
//! The VM is the boundary, so what speaks of the host is left out: namespaces of other processes,
//! the host's cgroup, devices and security modules. What is mounted from the host is copied.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::error::ShimError;

/// Namespaces that a container has of its own in the guest. The network is the VM's.
const NAMESPACES: [&str; 5] = ["pid", "ipc", "uts", "mount", "cgroup"];

/// The file with the addresses of resolvers.
const RESOLVER: &str = "/etc/resolv.conf";

/// The version of the specification that crun in the guest knows. It refuses a later number, and
/// ignores what later versions have added.
const VERSION: &str = "1.0.2";

/// The folder of the guest with what the containers of a pod share.
const SHARED: &str = "/var/lib/pod";
/// The part of a kubelet's path before the name of a volume that begins empty.
const EMPTY_DIR: &str = "/volumes/kubernetes.io~empty-dir/";

/// A configuration for the guest, and what it needs from the host.
#[derive(Debug)]
pub struct GuestSpec {
    pub config: Value,
    pub copies: Vec<Copy>,
}

/// A file or folder of the host that is copied into the guest.
#[derive(Debug, PartialEq, Eq)]
pub struct Copy {
    pub from: PathBuf,
    pub to: String,
    /// Whether it is one for all containers of the pod, and so may be there already.
    pub shared: bool,
}

/// Facts of a pod that its containers depend on.
#[derive(Clone, Copy, Debug, Default)]
pub struct PodFacts {
    /// The first process of the pod's first container, as the guest numbers it. Namespaces that the
    /// container shares with its pod are its.
    pub first: Option<u32>,
    /// Whether names are asked of the VM's own resolver, not of the host's.
    pub own_resolver: bool,
}

impl GuestSpec {
    /// Converts the configuration of the container `id`, whose files are in the folder `place` of
    /// the guest.
    pub fn new(mut config: Value, id: &str, place: &str, pod: PodFacts) -> Result<Self, ShimError> {
        let invalid = |what: &str| ShimError::Invalid(format!("config.json: {what}"));
        let root = config.as_object_mut().ok_or_else(|| invalid("is no object"))?;
        if !root.get("process").is_some_and(Value::is_object) {
            return Err(invalid("there is no process"));
        }
        root.insert("ociVersion".to_owned(), VERSION.into());
        root.remove("hooks");
        let read_only = root.get("root").and_then(|root| root["readonly"].as_bool());
        root.insert(
            "root".to_owned(),
            json!({"path": format!("{place}/rootfs"), "readonly": read_only.unwrap_or(false)}),
        );
        let mut copies = Vec::new();
        let mounts = root.entry("mounts").or_insert_with(|| json!([]));
        if let Some(mounts) = mounts.as_array_mut() {
            mounts.retain(|mount| !pod.own_resolver || mount["destination"] != RESOLVER);
            for (number, mount) in mounts.iter_mut().enumerate() {
                if is_bind(mount) {
                    let from = mount["source"].as_str().unwrap_or_default().to_owned();
                    let shared = shared_name(&from, &mount["destination"]);
                    let to = match &shared {
                        Some(name) => format!("{SHARED}/{name}"),
                        None => format!("{place}/mounts/{number}"),
                    };
                    mount["source"] = to.clone().into();
                    copies.push(Copy { from: from.into(), to, shared: shared.is_some() });
                }
            }
            if pod.own_resolver {
                let options = ["rbind", "ro"];
                mounts.push(json!({"destination": RESOLVER, "source": RESOLVER, "type": "bind",
                                   "options": options}));
            }
        }
        if let Some(process) = root.get_mut("process") {
            confine(process);
        }
        if let Some(linux) = root.get_mut("linux").and_then(Value::as_object_mut) {
            let kinds = linux.get("namespaces").and_then(Value::as_array);
            let asked = |kind: &str| kinds?.iter().find(|one| one["type"] == *kind);
            let own: Vec<_> = NAMESPACES
                .into_iter()
                .filter_map(|kind| {
                    let shared = asked(kind)?.get("path").is_some();
                    Some(match pod.first.filter(|_| shared) {
                        Some(pid) => {
                            json!({"type": kind, "path": format!("/proc/{pid}/ns/{kind}")})
                        }
                        None => json!({"type": kind}),
                    })
                })
                .collect();
            linux.insert("namespaces".to_owned(), own.into());
            linux.insert("cgroupsPath".to_owned(), format!("/containers/{id}").into());
            linux.remove("devices");
            linux.remove("mountLabel");
            if let Some(resources) = linux.get_mut("resources").and_then(Value::as_object_mut) {
                resources.remove("devices");
            }
        }
        Ok(Self { config, copies })
    }
}

/// Returns the name in the guest of a folder that all containers of a pod share: a volume that
/// lives as long as the pod, or its shared memory.
fn shared_name(source: &str, destination: &Value) -> Option<String> {
    if let Some((_, volume)) = source.split_once(EMPTY_DIR) {
        return Some(format!("volume-{}", volume.replace('/', "-")));
    }
    (*destination == "/dev/shm").then(|| "shm".to_owned())
}

/// Removes what names a security module of the host.
pub fn confine(process: &mut Value) {
    if let Some(process) = process.as_object_mut() {
        process.remove("apparmorProfile");
        process.remove("selinuxLabel");
        process.remove("oomScoreAdj");
    }
}

fn is_bind(mount: &Value) -> bool {
    let has = |word: &str| {
        mount["options"].as_array().is_some_and(|words| words.iter().any(|it| *it == *word))
    };
    mount["type"] == "bind" || has("bind") || has("rbind")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_speaks_of_the_host_is_left_out() {
        let config = json!({
            "ociVersion": "1.2.0",
            "process": {"args": ["sh"], "apparmorProfile": "x"},
            "root": {"path": "/host/rootfs", "readonly": true},
            "hooks": {"prestart": []},
            "mounts": [
                {"type": "proc", "source": "proc", "destination": "/proc"},
                {"type": "bind", "source": "/etc/hosts", "destination": "/etc/hosts",
                 "options": ["rbind"]},
            ],
            "linux": {
                "cgroupsPath": "/kubepods/x",
                "namespaces": [{"type": "pid"}, {"type": "network", "path": "/proc/1/ns/net"},
                               {"type": "ipc", "path": "/proc/1/ns/ipc"}],
                "resources": {"devices": [{"allow": false}], "pids": {"limit": 5}},
            },
        });
        let spec = GuestSpec::new(config, "c", "/c", PodFacts::default()).unwrap();
        assert_eq!(spec.config["ociVersion"], VERSION);
        assert_eq!(spec.config["root"], json!({"path": "/c/rootfs", "readonly": true}));
        let linux = &spec.config["linux"];
        assert_eq!(linux["namespaces"], json!([{"type": "pid"}, {"type": "ipc"}]));
        assert_eq!(linux["cgroupsPath"], "/containers/c");
        assert_eq!(linux["resources"], json!({"pids": {"limit": 5}}));
        assert_eq!(spec.config["process"], json!({"args": ["sh"]}));
        assert!(spec.config.get("hooks").is_none());
        let copied =
            Copy { from: "/etc/hosts".into(), to: "/c/mounts/1".to_owned(), shared: false };
        assert_eq!(spec.copies, [copied]);
        assert_eq!(spec.config["mounts"][1]["source"], "/c/mounts/1");
    }

    #[test]
    fn resolver_of_the_vm_takes_the_place_of_the_hosts() {
        let config = json!({
            "process": {},
            "mounts": [{"type": "bind", "source": "/host/resolv.conf", "destination": RESOLVER}],
        });
        let pod = PodFacts { own_resolver: true, ..PodFacts::default() };
        let spec = GuestSpec::new(config, "c", "/c", pod).unwrap();
        assert!(spec.copies.is_empty());
        assert_eq!(spec.config["mounts"].as_array().map(Vec::len), Some(1));
        assert_eq!(spec.config["mounts"][0]["source"], RESOLVER);
    }

    #[test]
    fn configuration_without_a_process_is_refused() {
        assert!(GuestSpec::new(json!({}), "c", "/c", PodFacts::default()).is_err());
        assert!(GuestSpec::new(json!([]), "c", "/c", PodFacts::default()).is_err());
    }

    #[test]
    fn container_of_a_pod_shares_what_kubelet_says() {
        let volume = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/data";
        let config = json!({
            "process": {"args": ["sh"]},
            "mounts": [
                {"type": "bind", "source": volume, "destination": "/data"},
                {"type": "bind", "source": "/run/containerd/pod/shm", "destination": "/dev/shm"},
            ],
            "linux": {
                "namespaces": [{"type": "pid"}, {"type": "uts", "path": "/proc/9/ns/uts"},
                               {"type": "network", "path": "/proc/9/ns/net"}],
            },
        });
        let pod = PodFacts { first: Some(5), ..PodFacts::default() };
        let spec = GuestSpec::new(config, "c", "/c", pod).unwrap();
        let namespaces = json!([{"type": "pid"}, {"type": "uts", "path": "/proc/5/ns/uts"}]);
        assert_eq!(spec.config["linux"]["namespaces"], namespaces);
        let targets: Vec<_> = spec.copies.iter().map(|copy| (&*copy.to, copy.shared)).collect();
        assert_eq!(targets, [("/var/lib/pod/volume-data", true), ("/var/lib/pod/shm", true)]);
        assert_eq!(spec.config["mounts"][0]["source"], "/var/lib/pod/volume-data");
    }
}
