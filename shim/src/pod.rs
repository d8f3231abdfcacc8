//! A pod: one VM, made with its first container, and the containers in it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use pvmm_sandbox::{CreateOptions, Sandbox, Sandboxes};
use serde_json::Value;

use crate::bundle::{self, Bundle};
use crate::container::Container;
use crate::error::ShimError;
use crate::events::Publisher;
use crate::process::lock;
use crate::rootfs::Mounted;
use crate::stdio::Paths;

/// The template of a pod's VM unless an annotation names one.
const TEMPLATE: &str = "container";
/// The folder of a checkpoint that has the VM's snapshot.
const SNAPSHOT: &str = "snapshot";
/// The annotation with the template of a pod's VM, which must have crun in it.
const TEMPLATE_ANNOTATION: &str = "pvmm/template";

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
        let container =
            Container::create(vm.agent()?, id, bundle, &rootfs, paths, first.as_deref())?;
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
        let template = config["annotations"][TEMPLATE_ANNOTATION].as_str().unwrap_or(TEMPLATE);
        let made = self.sandboxes.create(&CreateOptions::of(template))?;
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
        Ok(vm.snapshot(&folder.join(SNAPSHOT)).map(drop)?)
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
