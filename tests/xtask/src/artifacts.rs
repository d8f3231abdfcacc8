//! Prepares what guests are made from, before anything runs in a host that cannot download.
//!
//! The nested host has no network, and a guest should not wait for a mirror: kernel and root file
//! system are fetched and built here, with a line for every step.

use std::time::Instant;

use pvmm_sandbox::cache::CacheError;
use pvmm_sandbox::kernel::KernelError;
use pvmm_sandbox::template::TemplateError;
use pvmm_sandbox::{Cache, Event, Kernel, Recipe, Template};

use crate::packages::{self, PackageError};
use crate::progress;
use crate::stock::{self, StockError};

/// Programs that preparing needs and a minimal Debian may lack.
const PACKAGES: [&str; 2] = ["e2fsprogs", "ca-certificates"];

/// What the template of `prepare_science` has beyond `base`.
const SCIENCE: [&str; 2] = ["python3-matplotlib", "python3-pandas"];

/// What the template of `prepare_tools` has beyond `base`.
const TOOLS: [&str; 2] = ["nodejs", "git"];

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

/// What `pvmm run` will use when it is told nothing.
pub struct Artifacts {
    pub kernel: Kernel,
    pub template: Template,
    cache: Cache,
}

/// Fetches and builds what is not in the cache.
pub fn prepare() -> Result<Artifacts, ArtifactError> {
    packages::install(&PACKAGES)?;
    let cache = Cache::open()?;
    let kernel = Kernel::default_in(&cache, &mut lines()).map_err(ArtifactError::Kernel)?;
    let template =
        Template::ensure(&cache, &Recipe::base(), &mut lines()).map_err(ArtifactError::Template)?;
    Ok(Artifacts { kernel, template, cache })
}

/// Also a template with matplotlib and pandas, for the one long test that runs them in a guest.
pub fn prepare_science() -> Result<Template, ArtifactError> {
    packages::install(&PACKAGES)?;
    let recipe = Recipe::new("soak-science", &SCIENCE.map(str::to_owned));
    recipe
        .and_then(|recipe| Template::ensure(&Cache::open()?, &recipe, &mut lines()))
        .map_err(ArtifactError::Template)
}

/// Also a template with Node and git, for the tests that run them in a guest.
pub fn prepare_tools() -> Result<Template, ArtifactError> {
    Recipe::new("suite-tools", &TOOLS.map(str::to_owned))
        .and_then(|recipe| Template::ensure(&Cache::open()?, &recipe, &mut lines()))
        .map_err(ArtifactError::Template)
}

impl Artifacts {
    /// Also Debian's kernel image and initrd, for the test that boots them as they are.
    pub fn with_stock_initrd(&self) -> Result<(), ArtifactError> {
        stock::prepare(&self.cache, &mut lines()).map_err(ArtifactError::Stock)
    }

    /// Also Debian's kernel, for tests that boot it beside our own.
    pub fn with_debian_kernel(&self) -> Result<Kernel, ArtifactError> {
        Kernel::debian(&self.cache, &mut lines()).map_err(ArtifactError::Kernel)
    }
}

/// Prints each step as a line, and a long one's progress now and then.
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
