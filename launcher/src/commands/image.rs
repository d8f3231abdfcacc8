//! Container images as templates: `pvmm run --image` and `pvmm template build --image`.

use std::ffi::OsString;

use pvmm_images::oci::Image;
use pvmm_images::{Cache, Progress, Template};
use pvmm_registry::RegistryError;

use super::template_source;
use crate::args::ImageFlag;
use crate::exit::Failure;
use crate::interrupt::interruptible;
use crate::progress::Steps;
use pvmm_sandbox::prepare;
use pvmm_sandbox::warm::Shape;

/// The folder of the cache in which parts of fetched images are.
const STORE: &str = "oci";
/// The digits of an image's digest in the name of its template.
const DIGITS: usize = 16;

/// Whether a registry is asked for an image that was fetched before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    IfMissing,
    Always,
}

/// Opens the image that a flag names. One of a registry is fetched.
pub fn open(
    cache: &Cache,
    flag: &ImageFlag,
    ask: Ask,
    progress: &mut dyn Progress,
) -> Result<Image, Failure> {
    let opened = match flag {
        ImageFlag::Here { path, name } => Image::open(path, name.as_deref()),
        ImageFlag::Registry(reference) => {
            let store = cache.root().join(STORE);
            let fetched = pvmm_registry::known(&store, reference).filter(|_| ask == Ask::IfMissing);
            let there = fetched.and_then(|manifest| Image::in_store(&store, &manifest).ok());
            if let Some(image) = there {
                return Ok(image);
            }
            let manifest = pvmm_registry::pull(reference, &store, progress).map_err(refuse)?;
            Image::in_store(&store, &manifest)
        }
    };
    opened.map_err(prepare::refuse)
}

fn refuse(error: RegistryError) -> Failure {
    let text = prepare::chain(&error);
    match error {
        RegistryError::Write { .. } => Failure::fault(text),
        RegistryError::Denied { .. } => Failure::usage(text)
            .hint("log in with a container tool: its auth.json or config.json is read"),
        _ => Failure::usage(text),
    }
}

/// Returns the template of an image, which is built and baked at its first use.
pub fn template(flag: &ImageFlag, quiet: bool) -> Result<Template, Failure> {
    let cache = Cache::open().map_err(prepare::refuse)?;
    let image = interruptible(|| open(&cache, flag, Ask::IfMissing, &mut Steps::new(quiet)))?;
    let name = format!("image-{}", &image.id().hex()[..DIGITS]);
    if let Ok(template) = Template::find(&cache, &name) {
        return Ok(template);
    }
    let build = || {
        let built = Template::from_image(&cache, &name, &image, &mut Steps::new(quiet));
        built.map_err(prepare::refuse)
    };
    let template = interruptible(build)?;
    if pvmm::kvm::host::probe().is_ok() {
        // In a process of its own, because the run itself may have no second thread.
        interruptible(|| template_source::bake(&Shape::of(template.name())))?;
    }
    Ok(template)
}

/// Returns the command of a run: what the image begins its commands with, and then the given words
/// or, without any, those of the image.
pub fn words(template: &Template, given: Vec<OsString>) -> Vec<OsString> {
    let settings = template.manifest.source.as_ref().and_then(|source| source.settings.clone());
    let settings = settings.unwrap_or_default();
    let own =
        |words: Option<Vec<String>>| words.unwrap_or_default().into_iter().map(OsString::from);
    let mut words: Vec<_> = own(settings.entrypoint).collect();
    if given.is_empty() {
        words.extend(own(settings.cmd));
    } else {
        words.extend(given);
    }
    words
}
