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
}

impl GuestSpec {
    /// Converts the configuration of the container `id`, whose files are in the folder `place` of
    /// the guest. With `own_resolver` names are asked of the VM's resolver, not of the host's.
    pub fn new(
        mut config: Value,
        id: &str,
        place: &str,
        own_resolver: bool,
    ) -> Result<Self, ShimError> {
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
            mounts.retain(|mount| !own_resolver || mount["destination"] != RESOLVER);
            for (number, mount) in mounts.iter_mut().enumerate() {
                if is_bind(mount) {
                    let to = format!("{place}/mounts/{number}");
                    let from = mount["source"].as_str().unwrap_or_default();
                    copies.push(Copy { from: PathBuf::from(from), to: to.clone() });
                    mount["source"] = to.into();
                }
            }
            if own_resolver {
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
            let asked =
                |kind: &str| kinds.is_some_and(|all| all.iter().any(|one| one["type"] == *kind));
            let own: Vec<_> = NAMESPACES
                .into_iter()
                .filter(|kind| asked(kind))
                .map(|kind| json!({"type": kind}))
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
        let spec = GuestSpec::new(config, "c", "/c", false).unwrap();
        assert_eq!(spec.config["ociVersion"], VERSION);
        assert_eq!(spec.config["root"], json!({"path": "/c/rootfs", "readonly": true}));
        let linux = &spec.config["linux"];
        assert_eq!(linux["namespaces"], json!([{"type": "pid"}, {"type": "ipc"}]));
        assert_eq!(linux["cgroupsPath"], "/containers/c");
        assert_eq!(linux["resources"], json!({"pids": {"limit": 5}}));
        assert_eq!(spec.config["process"], json!({"args": ["sh"]}));
        assert!(spec.config.get("hooks").is_none());
        let copied = Copy { from: "/etc/hosts".into(), to: "/c/mounts/1".to_owned() };
        assert_eq!(spec.copies, [copied]);
        assert_eq!(spec.config["mounts"][1]["source"], "/c/mounts/1");
    }

    #[test]
    fn resolver_of_the_vm_takes_the_place_of_the_hosts() {
        let config = json!({
            "process": {},
            "mounts": [{"type": "bind", "source": "/host/resolv.conf", "destination": RESOLVER}],
        });
        let spec = GuestSpec::new(config, "c", "/c", true).unwrap();
        assert!(spec.copies.is_empty());
        assert_eq!(spec.config["mounts"].as_array().map(Vec::len), Some(1));
        assert_eq!(spec.config["mounts"][0]["source"], RESOLVER);
    }

    #[test]
    fn configuration_without_a_process_is_refused() {
        assert!(GuestSpec::new(json!({}), "c", "/c", false).is_err());
        assert!(GuestSpec::new(json!([]), "c", "/c", false).is_err());
    }
}
