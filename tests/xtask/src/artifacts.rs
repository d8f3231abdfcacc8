//! Prepares what guests are made from, before anything runs in a host without a network.
//!
//! The nested host has no network, and a guest should not wait for a mirror. Kernel and root file
//! system are downloaded and built here, with a line for each step.

use std::error::Error;
use std::fs;
use std::time::Instant;

use pvmm_images::cache::CacheError;
use pvmm_images::kernel::KernelError;
use pvmm_images::template::TemplateError;
use pvmm_images::{Cache, Event, Kernel, Recipe, Template};

use crate::packages::{self, PackageError};
use crate::stock::{self, StockError};
use crate::{cache, progress};

/// Packages that the preparation needs and a minimal Debian may lack.
const PACKAGES: [&str; 2] = ["e2fsprogs", "ca-certificates"];

/// The packages that the template of `prepare_science` has in addition to `base`.
const SCIENCE: [&str; 2] = ["python3-matplotlib", "python3-pandas"];

/// The packages that the template of `prepare_tools` has in addition to `base`.
const TOOLS: [&str; 3] = ["nodejs", "git", "curl"];

#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error(transparent)]
    Package(#[from] PackageError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("cannot prepare a guest kernel")]
    Kernel(#[source] KernelError),
    #[error("cannot prepare a template")]
    Template(#[source] TemplateError),
    #[error("cannot prepare Debian's kernel and initrd")]
    Stock(#[source] StockError),
}

/// The kernel and the template that `pvmm run` uses by default.
pub struct Artifacts {
    pub kernel: Kernel,
    pub template: Template,
    cache: Cache,
}

/// Downloads and builds what is not in the cache.
pub fn prepare() -> Result<Artifacts, ArtifactError> {
    packages::install(&PACKAGES)?;
    let cache = Cache::open()?;
    let kernel = Kernel::default_in(&cache, &mut lines()).map_err(ArtifactError::Kernel)?;
    let template =
        Template::ensure(&cache, &Recipe::base(), &mut lines()).map_err(ArtifactError::Template)?;
    Ok(Artifacts { kernel, template, cache })
}

/// Prepares a template with matplotlib and pandas, for the one long test that runs them in a guest.
pub fn prepare_science() -> Result<Template, ArtifactError> {
    packages::install(&PACKAGES)?;
    let recipe = Recipe::new("soak-science", &SCIENCE.map(str::to_owned));
    recipe
        .and_then(|recipe| Template::ensure(&Cache::open()?, &recipe, &mut lines()))
        .map_err(ArtifactError::Template)
}

/// Prepares a template with Node, git and curl, for the tests that run them in a guest.
pub fn prepare_tools() -> Result<Template, ArtifactError> {
    Recipe::new("suite-tools", &TOOLS.map(str::to_owned))
        .and_then(|recipe| Template::ensure(&Cache::open()?, &recipe, &mut lines()))
        .map_err(ArtifactError::Template)
}

/// Unpacks Debian's container registry, unless it is there. It is not installed, because its
/// package would start a server.
pub fn prepare_registry() -> Result<(), Box<dyn Error>> {
    let place = cache::dir().join("tools/docker-registry");
    if place.exists() {
        return Ok(());
    }
    let new = place.with_extension("new");
    let _ = fs::remove_dir_all(&new);
    fs::create_dir_all(&new)?;
    packages::unpack("docker-registry", &new)?;
    Ok(fs::rename(new, place)?)
}

/// Prepares the templates that pvmm brings recipes for.
pub fn prepare_built_in() -> Result<(), ArtifactError> {
    Recipe::built_in_names().try_for_each(prepare_template)
}

/// Prepares a template that pvmm brings a recipe for.
pub fn prepare_template(name: &str) -> Result<(), ArtifactError> {
    let Some(recipe) = Recipe::built_in(name) else { return Ok(()) };
    Cache::open()
        .map_err(TemplateError::from)
        .and_then(|cache| Template::ensure(&cache, &recipe, &mut lines()))
        .map(drop)
        .map_err(ArtifactError::Template)
}

impl Artifacts {
    /// Prepares Debian's kernel image and initrd, for the test that boots them unmodified.
    pub fn with_stock_initrd(&self) -> Result<(), ArtifactError> {
        stock::prepare(&self.cache, &mut lines()).map_err(ArtifactError::Stock)
    }

    /// Prepares Debian's kernel, for tests that boot it in addition to the project's own.
    pub fn with_debian_kernel(&self) -> Result<Kernel, ArtifactError> {
        Kernel::debian(&self.cache, &mut lines()).map_err(ArtifactError::Kernel)
    }
}

/// Returns a callback that prints each step as a line, and the progress of a long step every few
/// seconds.
fn lines() -> impl FnMut(Event<'_>) {
    const OFTEN_ENOUGH: std::time::Duration = std::time::Duration::from_secs(2);
    let mut last = Instant::now();
    move |event| match event {
        Event::Step(text) => {
            progress::step(text);
            last = Instant::now();
        }
        Event::Detail(text) if last.elapsed() >= OFTEN_ENOUGH => {
            progress::step(format!("  {text}"));
            last = Instant::now();
        }
        Event::Detail(_) | Event::Done => {}
    }
}
