//! Warm templates: a VM that has booted, run a command and been frozen, so that `pvmm run` forks it
//! instead of booting.
//!
//! A warm template is baked for a root filesystem and a size. Its key covers everything that it
//! depends on: with another kernel, agent, image or size the key differs, and the old one is never
//! found.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, FreezeOptions, Language, Refresh};
use pvmm::exec::ExecRequest;
use pvmm::snapshot::{Durability, LoadOptions, WriteOptions};
use pvmm::{
    Console, CpuBaseline, Drive, ErrorKind, HostOptions, Kvm, Net, Overrides, TapSource, Template,
    Vm, Vsock, next_trim,
};
use pvmm_agent_image::AGENT_KEY;
use pvmm_images::{Cache, Event, Kernel, Progress, Recipe, Silent, cache};

use crate::egress;
use crate::failure::Failure;
use crate::kernel_file::KernelFile;
use crate::machine;
use crate::machine::SETTLE_MAX;
use crate::prepare::{self, RootfsSource, Sources};
use crate::scratch;
use crate::sys::process;
use crate::vm_dir::Record;

const KIND: &str = "warm";
/// The file with the kernel's name for display.
const LABEL: &str = "kernel-label";
/// The file with the program, kernel and image that a warm template was baked with.
const SOURCES: &str = "sources";
/// The hexadecimal digits of a key.
const KEY_DIGITS: usize = 64;
/// Increased when the bake itself changes.
const VERSION: &str = "7";
/// The size of a drive that no volume has replaced yet.
const SPARE_DRIVE_BYTES: u64 = 1 << 20;
const BOOT_PATIENCE: Duration = Duration::from_secs(120);
/// Commands run before the freeze, so that the first real command finds their effects in memory.
const REHEARSAL: [&str; 2] =
    ["/bin/true", "command -v python3 >/dev/null && python3 -c pass; true"];

/// How long the guest is idle before it is frozen: work that its kernel defers is then done once,
/// and not in every fork.
const SETTLE: Duration = Duration::from_secs(1);

/// Told of folders that are unfinished until they are renamed or removed.
pub type Note = Box<dyn Fn(&Path)>;

/// The root filesystem and the size of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    pub template: String,
    pub cpus: u32,
    pub memory_mib: u64,
    pub disk_mib: u64,
    /// The processor features that the guest is offered.
    pub cpu: CpuBaseline,
    /// Has a network card behind an egress process.
    pub net: bool,
    /// Drives that are given an image when a VM is made, and whether the guest only reads them.
    pub spare_drives: Vec<bool>,
}

impl Shape {
    /// Returns the default shape of `pvmm run`.
    pub fn of(template: &str) -> Self {
        Self {
            template: template.to_owned(),
            cpus: 1,
            memory_mib: 512,
            disk_mib: 8 << 10,
            cpu: CpuBaseline::Host,
            net: false,
            spare_drives: Vec::new(),
        }
    }

    /// Returns the arguments of the `pvmm` command that bakes this shape, for programs that do not
    /// boot a VM in their own process. The processor baseline must be one that has a name.
    pub fn bake_words(&self) -> Vec<String> {
        let mut words: Vec<String> = ["-q", "template", "bake"].map(str::to_owned).into();
        words.extend([self.template.clone(), "--cpus".to_owned(), self.cpus.to_string()]);
        words.extend(["--memory".to_owned(), format!("{}M", self.memory_mib)]);
        words.extend(["--disk-size".to_owned(), format!("{}M", self.disk_mib)]);
        if !self.cpu.is_host() {
            words.extend(["--cpu".to_owned(), self.cpu.name().to_owned()]);
        }
        if self.net {
            words.push("--net".to_owned());
        }
        if !self.spare_drives.is_empty() {
            let mode = |read_only: &bool| if *read_only { "ro" } else { "rw" };
            let modes: Vec<_> = self.spare_drives.iter().map(mode).collect();
            words.extend(["--volumes".to_owned(), modes.join(",")]);
        }
        words
    }
}

/// A warm template, loaded.
pub struct Warm {
    pub template: Template,
    pub kernel: String,
    pub kernel_file: Option<KernelFile>,
}

/// Returns the folder of the warm template of a shape for the current kernel, agent and image, if
/// there is one.
pub fn folder(shape: &Shape) -> Option<PathBuf> {
    let cache = Cache::open().ok()?;
    let kernel = Kernel::default_file(&cache)?;
    let rootfs = pvmm_images::Template::find(&cache, &shape.template).ok()?.rootfs;
    dir(&cache, shape, &kernel, &rootfs).filter(|dir| dir.exists())
}

/// Loads the warm template of a shape for the current kernel, agent and image.
pub fn find(shape: &Shape) -> Option<Warm> {
    let dir = folder(shape)?;
    match Kvm::open().and_then(|kvm| Template::load(&kvm, &dir, LoadOptions::default())) {
        Ok(template) => {
            let kernel = fs::read_to_string(dir.join(LABEL)).unwrap_or_default();
            // The folder of another kernel would not have been found.
            Some(Warm { template, kernel, kernel_file: KernelFile::default_of_host() })
        }
        Err(error) => {
            log::info!("the warm template cannot be used: {error:#}");
            None
        }
    }
}

/// Finds the warm template of the default shape by the name of its root filesystem.
pub fn find_named(name: &str) -> Result<Option<Warm>, Failure> {
    let known = Cache::open().is_ok_and(|cache| pvmm_images::Template::find(&cache, name).is_ok());
    match (find(&Shape::of(name)), known) {
        (None, true) => Err(Failure::usage(format!("template '{name}' is not warm"))
            .hint(format!("bake it with 'pvmm template bake {name}'"))),
        (warm, _) => Ok(warm),
    }
}

/// Boots a VM of this shape, runs the rehearsal commands, freezes it and writes it to disk. Does
/// nothing if a usable one exists; one that is damaged or came from another host is baked again.
///
/// `watch` is called before the VM has threads, which inherit the signal mask; the function that it
/// returns is told of each unfinished folder.
pub fn bake(
    shape: &Shape,
    steps: &mut dyn Progress,
    watch: impl FnOnce() -> Result<Note, Failure>,
) -> Result<PathBuf, Failure> {
    let cache = Cache::open().map_err(prepare::refuse)?;
    let sources = Sources::check(None, None, &shape.template, shape.disk_mib)?;
    let rootfs = match &sources.rootfs {
        RootfsSource::Template(template) => template.rootfs.clone(),
        // A host that nobody has run a VM on does not have it yet.
        _ => {
            let base = pvmm_images::Template::ensure(&cache, &Recipe::base(), steps);
            base.map_err(prepare::refuse)?.rootfs
        }
    };
    let kernel = Kernel::default_in(&cache, steps).map_err(prepare::refuse)?;
    let place = dir(&cache, shape, &kernel.vmlinux, &rootfs)
        .ok_or_else(|| Failure::fault("the template's image cannot be read"))?;
    let _lock = cache.lock(KIND, &shape.template, &mut Silent).map_err(prepare::refuse)?;
    let kvm = Kvm::open().map_err(failed)?;
    if Template::load(&kvm, &place, LoadOptions::default()).is_ok() {
        return Ok(place);
    }
    steps.event(Event::Step("baking a warm template"));
    let parts = sources.prepare(steps)?;
    let note = watch()?;
    let room = tempdir()?;
    note(&room);
    let sources = baked_from(&kernel.vmlinux, &rootfs).unwrap_or_default();
    let baked = bake_in(&kvm, &room, shape, parts, &place, &note);
    let _ = fs::remove_dir_all(&room);
    baked?;
    // Without it the template works too, and is taken for an outdated one by `prune`.
    let _ = fs::write(place.join(SOURCES), sources);
    // Only for display; a template without it works too.
    let _ = fs::write(place.join(LABEL), kernel.label);
    Ok(place)
}

fn failed(error: pvmm::Error) -> Failure {
    Failure::fault(format!("cannot bake a warm template: {error:#}"))
        .hint("'pvmm run --cold' works without one")
}

fn bake_in(
    kvm: &Kvm,
    room: &Path,
    shape: &Shape,
    parts: prepare::Parts,
    place: &Path,
    note: &Note,
) -> Result<(), Failure> {
    let deadline = Instant::now() + BOOT_PATIENCE;
    let record = Record {
        name: Some("pvmm".to_owned()),
        cpus: shape.cpus,
        memory_mib: shape.memory_mib,
        ..Record::default()
    };
    let mut config = machine::config(parts, &record, false);
    config.cpu = shape.cpu.clone();
    let uds_path = room.join("v");
    config.vsock = Some(Vsock::new(3, uds_path.clone()));
    config.host.console = Console::Discard;
    let scratch = scratch::place()?;
    for read_only in &shape.spare_drives {
        let drive = Drive::from_file(spare_drive(&scratch.dir)?);
        config.drives.push(Drive { read_only: *read_only, ..drive });
    }
    // Nobody answers at the other end while the template is baked.
    let mut far_ends = Vec::new();
    config.nets.extend(shape.net.then(|| idle_card(&mut far_ends)).transpose()?);
    config.host.scratch_dir = Some(scratch.dir.clone());
    config.host.scratch_in_memory = scratch.in_memory;
    let mut vm = Vm::boot(kvm, config).map_err(failed)?;
    vm.resume().map_err(failed)?;
    let agent = vm.agent(deadline).map_err(failed)?;
    for line in REHEARSAL {
        agent
            .exec(&ExecRequest::shell(line).timeout(BOOT_PATIENCE))
            .map_err(|error| Failure::fault(format!("the guest does not run commands: {error}")))?;
    }
    // A root filesystem without Python has none to spare.
    if let Err(error) = agent.open_spare_session(Language::Python) {
        log::info!("{} has no interpreter: {error}", shape.template);
    }
    drop(agent);
    let agent_failed = |error: pvmm::agent::AgentError| failed(error.into());
    let control = Agent::connect_control(&uds_path, deadline).map_err(agent_failed)?;
    // Every fork is refreshed first, so a refresh is rehearsed: its files and mounts then exist.
    let rehearsed = Refresh::new(0).map_err(agent_failed)?.without_thaw();
    control.refresh(&rehearsed, deadline).map_err(agent_failed)?;
    let options = FreezeOptions { sync: true, ..FreezeOptions::default() };
    control.freeze_with(options, deadline).map_err(agent_failed)?;
    // A template must have no open connection.
    drop(control);
    thread::sleep(SETTLE);
    vm.settle(SETTLE_MAX);
    let mut template = vm.freeze().map_err(failed)?;
    drop(vm);
    // Records the working set of a first command, to be prefaulted in a run.
    let vsock = Some(Vsock::new(3, uds_path.clone()));
    let nets = shape.net.then(|| idle_card(&mut far_ends)).transpose()?;
    let overrides = Overrides {
        vsock,
        nets: nets.into_iter().map(|card| (0, card)).collect(),
        host: HostOptions {
            scratch_dir: Some(scratch.dir),
            scratch_in_memory: scratch.in_memory,
            ..HostOptions::default()
        },
        ..Overrides::default()
    };
    let first_use = |vm: &mut Vm| {
        vm.resume()?;
        let agent = Agent::connect_refreshed(&uds_path, &Refresh::new(1)?, deadline)?;
        agent
            .exec(&ExecRequest::argv(["/bin/true"]))
            .map_err(|error| pvmm::Error::new(ErrorKind::AgentLost, "first command", error))?;
        Ok(())
    };
    template.record_working_set(overrides, next_trim(Duration::ZERO), first_use).map_err(failed)?;
    let parent = place.parent().unwrap_or(place);
    fs::create_dir_all(parent)
        .map_err(|error| Failure::fault(format!("cannot make {}: {error}", parent.display())))?;
    let durability = Durability::Full;
    let mut begun = |folder: &Path| note(folder);
    let begun: Option<&mut dyn FnMut(&Path)> = Some(&mut begun);
    let options = WriteOptions { durability, replace: true, begun, ..WriteOptions::default() };
    template.write(place, options).map_err(failed)?;
    Ok(())
}

/// A drive's image until a VM gets a volume in its place.
fn spare_drive(dir: &Path) -> Result<File, Failure> {
    let made = pvmm_images::overlay::unnamed(dir).map_err(prepare::refuse)?;
    made.set_len(SPARE_DRIVE_BYTES)?;
    Ok(made)
}

/// A network card on a socket, whose other end is put into `far_ends`.
fn idle_card(far_ends: &mut Vec<OwnedFd>) -> Result<Net, Failure> {
    let (frames, far_end) = process::packet_pair()?;
    far_ends.push(far_end);
    let mut card = egress::card()?.config("");
    card.tap = TapSource::Socket(frames);
    Ok(card)
}

/// Lists the folders of all warm templates.
pub(crate) fn folders(cache: &Cache) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache.root().join(KIND)).into_iter().flatten().flatten();
    let is_one = |path: &PathBuf| template_of(path).is_some() && path.is_dir();
    entries.map(|entry| entry.path()).filter(is_one).collect()
}

/// Returns the template's name in the name of a warm template's folder, NAME-KEY.
fn template_of(folder: &Path) -> Option<&str> {
    let (template, key) = folder.file_name()?.to_str()?.rsplit_once('-')?;
    let is_whole = !template.starts_with('.') && key.len() == KEY_DIGITS;
    is_whole.then_some(template)
}

/// Waits until nobody bakes the template of `folder`, and keeps others from it.
pub(crate) fn lock(
    cache: &Cache,
    folder: &Path,
    progress: &mut dyn Progress,
) -> Result<cache::Lock, Failure> {
    cache.lock(KIND, template_of(folder).unwrap_or_default(), progress).map_err(prepare::refuse)
}

/// Whether a warm template was baked with the program, kernel and image of today. Any other is
/// never used again.
pub(crate) fn is_current(cache: &Cache, folder: &Path) -> bool {
    let current = || {
        let template = pvmm_images::Template::find(cache, template_of(folder)?).ok()?;
        let sources = baked_from(&Kernel::default_file(cache)?, &template.rootfs)?;
        Some(fs::read_to_string(folder.join(SOURCES)).ok()? == sources)
    };
    current().unwrap_or(false)
}

/// Describes what a warm template is baked with, beside its shape.
fn baked_from(kernel: &Path, rootfs: &Path) -> Option<String> {
    let looks = |path: &Path| {
        let facts = fs::metadata(path).ok()?;
        Some(format!(
            "{} {} {} {}",
            path.display(),
            facts.size(),
            facts.mtime(),
            facts.mtime_nsec()
        ))
    };
    let parts = [VERSION, env!("CARGO_PKG_VERSION"), AGENT_KEY, &looks(kernel)?, &looks(rootfs)?];
    Some(parts.join("\n"))
}

/// Returns the folder of a shape's warm template.
fn dir(cache: &Cache, shape: &Shape, kernel: &Path, rootfs: &Path) -> Option<PathBuf> {
    let mut size = format!("{} {} {}", shape.cpus, shape.memory_mib, shape.disk_mib);
    if shape.net || !shape.spare_drives.is_empty() {
        size += &format!(" net {} drives {:?}", shape.net, shape.spare_drives);
    }
    if !shape.cpu.is_host() {
        size += &format!(" cpu {}", shape.cpu.key());
    }
    let key = cache::key([baked_from(kernel, rootfs)?.as_bytes(), size.as_bytes()]);
    Some(cache.path(KIND, &format!("{}-{key}", shape.template)))
}

/// Creates a private folder with a short name for the bake's socket.
fn tempdir() -> Result<PathBuf, Failure> {
    let random: [u8; 6] =
        process::random().map_err(|error| Failure::fault(format!("no random bytes: {error}")))?;
    let name: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let path = std::env::temp_dir().join(format!("pvmm-bake-{name}"));
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&path)
        .map_err(|error| Failure::fault(format!("cannot make {}: {error}", path.display())))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bake_words_of_a_shape_name_all_of_it() {
        let cpu = CpuBaseline::named("x86-64-v2").unwrap();
        let spare_drives = vec![false, true];
        let shape = Shape { cpu, net: true, spare_drives, ..Shape::of("data") };
        let line = shape.bake_words().join(" ");
        assert!(line.starts_with("-q template bake data --cpus 1 --memory 512M"), "{line}");
        assert!(line.ends_with("--cpu x86-64-v2 --net --volumes rw,ro"), "{line}");
    }

    #[test]
    fn bake_folder_is_open_to_its_owner_alone() {
        let folder = tempdir().unwrap();
        let mode = fs::metadata(&folder).unwrap().mode();
        fs::remove_dir(folder).unwrap();
        assert_eq!(mode & 0o777, 0o700);
    }
}
