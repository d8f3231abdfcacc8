//! A pod: one VM, made with its first container, and the containers in it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use pvmm_sandbox::vm_dir::Egress;
use pvmm_sandbox::{CreateOptions, Sandbox, Sandboxes, snapshots};
use serde_json::Value;

use crate::bundle::{self, Bundle};
use crate::checkpoint;
use crate::container::Container;
use crate::error::ShimError;
use crate::events::Publisher;
use crate::process::lock;
use crate::rootfs::Mounted;
use crate::spec::PodFacts;
use crate::stdio::Paths;

/// The template of a pod's VM unless an annotation names one.
const TEMPLATE: &str = "container";
/// The VM's snapshot in a checkpoint: its folder while it is made, and the archive of it.
const SNAPSHOT: &str = "snapshot";
const ARCHIVE: &str = "snapshot.tar";
/// The annotation with the template of a pod's VM, which must have crun in it.
const TEMPLATE_ANNOTATION: &str = "pvmm/template";
/// The annotation with the name of a snapshot that a pod's VM goes on from, not from a template.
const FROM_ANNOTATION: &str = "pvmm/from";
/// The annotation with what a pod's VM may reach: networks and names, with commas between them.
const EGRESS_ANNOTATION: &str = "pvmm/egress";

pub struct Pod {
    pub events: Publisher,
    id: String,
    namespace: String,
    /// The folder of the container that the pod began with.
    bundle: Bundle,
    sandboxes: Sandboxes,
    vm: Mutex<Option<Sandbox>>,
    containers: Mutex<HashMap<String, Arc<Container>>>,
}

/// The VM that a pod's annotations ask for.
#[derive(Debug)]
struct Wish {
    /// The folder of a snapshot.
    from: Option<PathBuf>,
    options: CreateOptions,
}

impl Wish {
    fn of(config: &Value) -> Result<Self, ShimError> {
        let annotation = |key: &str| config["annotations"][key].as_str();
        let mut options = CreateOptions::of(annotation(TEMPLATE_ANNOTATION).unwrap_or(TEMPLATE));
        if let Some(rules) = annotation(EGRESS_ANNOTATION) {
            let rules = rules.split(',').map(str::trim).filter(|rule| !rule.is_empty());
            let egress = Egress::allowing(rules).map_err(|error| {
                ShimError::Invalid(format!("annotation {EGRESS_ANNOTATION}: {error}"))
            })?;
            options.egress = Some(egress);
        }
        let place = |name: &str| {
            // Whoever writes a pod's annotations does not choose among the host's files.
            if name.contains('/') {
                let why =
                    format!("annotation {FROM_ANNOTATION}: {name:?} is no name of a snapshot");
                return Err(ShimError::Invalid(why));
            }
            Ok(snapshots::place(name)?)
        };
        let from = annotation(FROM_ANNOTATION).map(place).transpose()?;
        Ok(Self { from, options })
    }
}

impl Pod {
    pub fn open(
        id: &str,
        namespace: &str,
        bundle: Bundle,
        events: Publisher,
    ) -> Result<Self, ShimError> {
        Ok(Self {
            events,
            id: id.to_owned(),
            namespace: namespace.to_owned(),
            bundle,
            sandboxes: Sandboxes::open()?,
            vm: Mutex::default(),
            containers: Mutex::default(),
        })
    }

    /// Makes a container, and the VM if it is the first.
    pub fn create(
        &self,
        id: &str,
        bundle: Bundle,
        mounts: &[containerd_shim_protos::api::Mount],
        paths: Paths,
    ) -> Result<Arc<Container>, ShimError> {
        bundle::check_id(id)?;
        if lock(&self.containers).contains_key(id) {
            return Err(ShimError::Exists(format!("container {id}")));
        }
        let vm = self.vm(&bundle.config()?)?;
        let rootfs = Mounted::new(mounts, &bundle.rootfs())?;
        // The pod has the name of its first container.
        let first = lock(&self.containers).get(&self.id).cloned();
        let facts = PodFacts {
            first: first.and_then(|first| first.first_process()),
            own_resolver: vm.egress().is_some(),
        };
        let container = Container::create(vm.agent()?, id, bundle, &rootfs, paths, facts)?;
        drop(rootfs);
        let container = Arc::new(container);
        lock(&self.containers).insert(id.to_owned(), container.clone());
        Ok(container)
    }

    /// Returns the VM, made at the first call.
    fn vm(&self, config: &Value) -> Result<Sandbox, ShimError> {
        let mut vm = lock(&self.vm);
        if let Some(vm) = &*vm {
            return Ok(vm.clone());
        }
        let wish = Wish::of(config)?;
        let made = match &wish.from {
            Some(snapshot) => self.sandboxes.restore(snapshot, &wish.options)?,
            None => self.sandboxes.create(&wish.options)?,
        };
        // So that `delete` finds it if this process is killed.
        self.bundle.write_vm(made.id()).inspect_err(|_| drop(made.end()))?;
        log::info!("pod {} of {} is VM {}", self.id, self.namespace, made.id());
        Ok(vm.insert(made).clone())
    }

    pub fn container(&self, id: &str) -> Result<Arc<Container>, ShimError> {
        let found = lock(&self.containers).get(id).cloned();
        found.ok_or_else(|| ShimError::NotFound(format!("container {id}")))
    }

    pub fn forget(&self, id: &str) {
        lock(&self.containers).remove(id);
    }

    pub fn is_empty(&self) -> bool {
        lock(&self.containers).is_empty()
    }

    /// Returns the process id of the VM's monitor, which stands for every process in the guest: on
    /// this host they have none of their own.
    pub fn pid(&self) -> u32 {
        lock(&self.vm).as_ref().and_then(|vm| vm.record().pid).unwrap_or(0)
    }

    /// Writes a snapshot of the whole VM into a folder, which containerd packs into an image.
    pub fn checkpoint(&self, folder: &Path) -> Result<(), ShimError> {
        let vm = lock(&self.vm).clone();
        let vm = vm.ok_or_else(|| ShimError::NotFound("VM".to_owned()))?;
        let snapshot = folder.join(SNAPSHOT);
        vm.snapshot(&snapshot)?;
        let packed = checkpoint::pack(&snapshot, &folder.join(ARCHIVE));
        let removed = fs::remove_dir_all(&snapshot);
        packed.and(removed).map_err(ShimError::io("cannot pack the snapshot"))
    }

    /// Ends the VM.
    pub fn end(&self) {
        if let Some(vm) = lock(&self.vm).take()
            && let Err(failure) = vm.end()
        {
            log::warn!("the VM does not end: {}", failure.message);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn annotations_choose_template_snapshot_and_network() {
        let wish = Wish::of(&json!({})).unwrap();
        assert_eq!((wish.options.template.as_str(), wish.from), (TEMPLATE, None));
        assert!(wish.options.egress.is_none());
        let annotations = json!({
            TEMPLATE_ANNOTATION: "mine",
            FROM_ANNOTATION: "warm",
            EGRESS_ANNOTATION: "192.0.2.0/24, *.example.org",
        });
        let wish = Wish::of(&json!({"annotations": annotations})).unwrap();
        assert_eq!(wish.options.template, "mine");
        assert!(wish.from.unwrap().ends_with("snapshots/warm"));
        let policy = wish.options.egress.unwrap().policy;
        assert_eq!(
            (policy.allow, policy.allow_host),
            (vec!["192.0.2.0/24".to_owned()], vec!["*.example.org".to_owned()])
        );
    }

    #[test]
    fn annotations_lead_to_no_file_of_the_host() {
        for (key, value) in [
            (FROM_ANNOTATION, "/etc"),
            (FROM_ANNOTATION, "../other"),
            (FROM_ANNOTATION, ""),
            (EGRESS_ANNOTATION, "no name"),
        ] {
            let config = json!({"annotations": {key: value}});
            assert!(Wish::of(&config).is_err(), "{key} {value}");
        }
    }
}
