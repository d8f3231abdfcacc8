//! Templates: named root filesystem images, and the recipes that they are built from.
//!
//! A VM boots one read-only, so a template is only ever replaced as a whole, never changed.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::cache::{self, Cache, CacheError};
use crate::oci::Image;
use crate::packages::{self, Apt, Package, PackagesError};
use crate::progress::Progress;
use crate::rootfs::{self, Import, ImportError, RootfsError};
use crate::source::{Origin, Settings, Source, SourceKind};
use crate::store;

/// The default template of `pvmm run`.
pub const BASE: &str = "base";

/// Increased when the build itself changes, so that templates of an older pvmm are rebuilt.
const RECIPE_VERSION: u32 = 1;
pub(crate) const KIND: &str = "templates";
pub(crate) const IMAGE: &str = "rootfs.ext4";
pub(crate) const MANIFEST: &str = "template.json";
/// The folder of downloaded packages; it exists only during a build.
const PACKAGES: &str = "packages";
const NAME_CAP: usize = 63;
/// Disk space for the packages, the unpacked tree and the image of `base` together.
const BUILD_MIB: u64 = 320;

/// Python with pip and venv, a shell, the usual small tools, certificates. No tzdata: it would add
/// 3 MB, and without it the time zone is UTC, which is right for a sandbox.
const BASE_PACKAGES: [&str; 20] = [
    "base-files",
    "base-passwd",
    "bash",
    "busybox-static",
    "ca-certificates",
    "coreutils",
    "dash",
    "findutils",
    "grep",
    "gzip",
    "libc-bin",
    "mawk",
    "ncurses-base",
    "netbase",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "sed",
    "tar",
];

/// The recipes that pvmm brings along, with their packages beside those of `base`, sorted.
const BUILT_IN: [(&str, &[&str]); 5] = [
    (BASE, &[]),
    (
        "code-interpreter",
        &[
            "git",
            "nodejs",
            "python-is-python3",
            "python3-matplotlib",
            "python3-numpy",
            "python3-pandas",
            "python3-pytest",
            "python3-requests",
            "python3-scipy",
        ],
    ),
    (
        "python-data",
        &[
            "python-is-python3",
            "python3-matplotlib",
            "python3-numpy",
            "python3-openpyxl",
            "python3-pandas",
            "python3-requests",
            "python3-scipy",
            "python3-sklearn",
            "python3-sqlalchemy",
        ],
    ),
    (
        "agent",
        &[
            "build-essential",
            "curl",
            "git",
            "jq",
            "nodejs",
            "npm",
            "openssh-client",
            "patch",
            "python-is-python3",
            "python3-dev",
            "python3-pytest",
            "python3-requests",
            "ripgrep",
        ],
    ),
    ("container", &["crun"]),
];

#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Packages(#[from] PackagesError),
    #[error("--template: {name:?} is not a template name (a-z, 0-9, then also . _ -, at most 63)")]
    Name { name: String },
    #[error(
        "--template: there is no template {name:?}: build it with `pvmm template build {name}`; {there}"
    )]
    Unknown { name: String, there: String },
    #[error("--packages: template base is built in and takes none: choose another name")]
    BasePackages,
    #[error("cannot read recipe {}", path.display())]
    ReadRecipe { path: PathBuf, source: io::Error },
    #[error("recipe {} is not as expected (for example {{\"name\": \"data\", \"packages\": [\"git\"]}})", path.display())]
    ParseRecipe { path: PathBuf, source: serde_json::Error },
    #[error("cannot build template {name}")]
    Build { name: String, source: Box<RootfsError> },
    #[error("template base is built in: choose another name")]
    BaseImport,
    #[error("cannot build template {name}")]
    Import { name: String, source: ImportError },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("template {name} is damaged: build it again with `pvmm template build {name}`")]
    Damaged { name: String },
    #[error("template {name} is refused: its files do not fit together")]
    Adopt { name: String },
}

/// The recipe of a template: `base`, and more Debian packages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    pub name: String,
    /// Packages in addition to those of `base`.
    #[serde(default)]
    pub packages: Vec<String>,
}

impl Recipe {
    pub fn base() -> Recipe {
        Recipe { name: BASE.to_owned(), packages: Vec::new() }
    }

    /// Returns the recipe that pvmm brings along under this name.
    pub fn built_in(name: &str) -> Option<Recipe> {
        let (name, packages) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        let packages = packages.iter().map(|package| (*package).to_owned()).collect();
        Some(Recipe { name: (*name).to_owned(), packages })
    }

    /// Returns the names of the recipes that pvmm brings along.
    pub fn built_in_names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// Makes a recipe of `base` with more packages, under another name.
    pub fn new(name: &str, packages: &[String]) -> Result<Recipe, TemplateError> {
        Recipe { name: name.to_owned(), packages: packages.to_vec() }.checked()
    }

    /// Reads a recipe from a JSON file.
    pub fn load(path: &Path) -> Result<Recipe, TemplateError> {
        let text = fs::read(path)
            .map_err(|source| TemplateError::ReadRecipe { path: path.to_owned(), source })?;
        let recipe: Recipe = serde_json::from_slice(&text)
            .map_err(|source| TemplateError::ParseRecipe { path: path.to_owned(), source })?;
        recipe.checked()
    }

    fn checked(mut self) -> Result<Recipe, TemplateError> {
        check_name(&self.name)?;
        if self.name == BASE && !self.packages.is_empty() {
            return Err(TemplateError::BasePackages);
        }
        for package in &self.packages {
            packages::check_name(package)?;
        }
        self.packages.sort();
        self.packages.dedup();
        Ok(self)
    }

    fn all_packages(&self) -> Vec<String> {
        let base = BASE_PACKAGES.iter().map(|name| (*name).to_owned());
        base.chain(self.packages.iter().cloned()).collect()
    }

    /// Returns the recipe's key, which depends on the recipe and not on newer packages at the
    /// mirrors.
    fn key(&self) -> String {
        let packages = self.all_packages();
        let version = RECIPE_VERSION.to_string();
        cache::key([version.as_bytes()].into_iter().chain(packages.iter().map(String::as_bytes)))
    }
}

/// The contents of `template.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub name: String,
    pub recipe: Recipe,
    /// The digest of the recipe, with its version.
    pub key: String,
    /// The name of the system, such as "Debian GNU/Linux 12 (bookworm)".
    pub system: String,
    /// The SHA-256 of the image.
    pub digest: String,
    pub image_bytes: u64,
    /// Seconds since 1970.
    pub created: u64,
    /// All installed packages, with the versions at the time of the build.
    pub packages: Vec<Package>,
    /// The origin of a template that is not made of packages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Box<Source>>,
}

/// A template that has been built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Template {
    /// The image, by its name in the store: it stays when the template is built again.
    pub rootfs: PathBuf,
    #[serde(flatten)]
    pub manifest: Manifest,
    /// The folder of the template.
    #[serde(skip)]
    pub(crate) folder: PathBuf,
}

impl Template {
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Returns the template of this recipe, and builds it only if it is missing or older than the
    /// recipe.
    pub fn ensure(
        cache: &Cache,
        recipe: &Recipe,
        progress: &mut dyn Progress,
    ) -> Result<Template, TemplateError> {
        let key = recipe.key();
        let fits =
            |path: &Path| load(cache, path).is_some_and(|template| template.manifest.key == key);
        // No lock is needed: while a template is replaced it is never missing.
        if fits(&cache.path(KIND, &recipe.name)) {
            return Template::find(cache, &recipe.name);
        }
        Template::make(cache, recipe, progress, fits)
    }

    /// Builds the template again, from the current packages.
    pub fn build(
        cache: &Cache,
        recipe: &Recipe,
        progress: &mut dyn Progress,
    ) -> Result<Template, TemplateError> {
        Template::make(cache, recipe, progress, |_| false)
    }

    fn make(
        cache: &Cache,
        recipe: &Recipe,
        progress: &mut dyn Progress,
        current: impl FnOnce(&Path) -> bool,
    ) -> Result<Template, TemplateError> {
        check_name(&recipe.name)?;
        let path = cache.publish(KIND, &recipe.name, progress, current, |dir, progress| {
            let (packages, debs) = fetch(cache, recipe, dir, progress)?;
            let rootfs =
                rootfs::build(&debs, dir, &dir.join(IMAGE), progress).map_err(|source| {
                    TemplateError::Build { name: recipe.name.clone(), source: Box::new(source) }
                })?;
            let path = dir.join(PACKAGES);
            fs::remove_dir_all(&path).map_err(|source| TemplateError::Write { path, source })?;
            write_manifest(cache, dir, recipe, rootfs.release, packages, None)
        })?;
        load(cache, &path).ok_or_else(|| TemplateError::Damaged { name: recipe.name.clone() })
    }

    /// Makes a template of the archive of a root filesystem: plain, gzip or zstd.
    pub fn from_tar(
        cache: &Cache,
        name: &str,
        archive: impl Read,
        progress: &mut dyn Progress,
    ) -> Result<Template, TemplateError> {
        let fill = |import: &mut Import<'_>| import.tar(Path::new(""), archive);
        Template::import(cache, name, Origin::of(SourceKind::Tar), progress, fill)
    }

    /// Makes a template of a folder that is a root filesystem.
    pub fn from_folder(
        cache: &Cache,
        name: &str,
        folder: &Path,
        progress: &mut dyn Progress,
    ) -> Result<Template, TemplateError> {
        let fill = |import: &mut Import<'_>| import.folder(folder);
        Template::import(cache, name, Origin::of(SourceKind::Folder), progress, fill)
    }

    /// Makes a template of a container image, unless the template of that name is of the same image
    /// already.
    pub fn from_image(
        cache: &Cache,
        name: &str,
        image: &Image,
        progress: &mut dyn Progress,
    ) -> Result<Template, TemplateError> {
        let key = image.id().to_string();
        if let Ok(there) = Template::find(cache, name)
            && let Some(source) = &there.manifest.source
            && source.build_key.as_ref() == Some(&key)
        {
            return Ok(there);
        }
        let (kind, settings) = (SourceKind::Image, image.settings());
        let defaults = settings.defaults();
        let origin = Origin { kind, build_key: Some(key), settings: Some(settings) };
        Template::import(cache, name, origin, progress, |import| {
            image.unpack(import)?;
            let file = Path::new(Settings::FILE.trim_start_matches('/'));
            import.file(file, 0o644, &mut defaults.as_slice())
        })
    }

    /// Makes a template of what `fill` takes in, and replaces the template of that name.
    pub fn import(
        cache: &Cache,
        name: &str,
        origin: Origin,
        progress: &mut dyn Progress,
        fill: impl FnOnce(&mut Import<'_>) -> Result<(), ImportError>,
    ) -> Result<Template, TemplateError> {
        check_name(name)?;
        if name == BASE {
            return Err(TemplateError::BaseImport);
        }
        let failed = |source| TemplateError::Import { name: name.to_owned(), source };
        let never = |_: &Path| false;
        let path = cache.publish(KIND, name, progress, never, |dir, progress| {
            progress.step("Unpacking the root filesystem");
            let root = dir.join("tree");
            let mut import = Import::begin(&root, progress).map_err(failed)?;
            fill(&mut import).map_err(failed)?;
            let (system, digest) = import.finish(&dir.join(IMAGE)).map_err(failed)?;
            fs::remove_dir_all(&root)
                .map_err(|source| TemplateError::Write { path: root, source })?;
            let recipe = Recipe { name: name.to_owned(), packages: Vec::new() };
            let Origin { kind, build_key, settings } = origin;
            let source = Source { kind, digest, build_key, settings };
            write_manifest(cache, dir, &recipe, system, Vec::new(), Some(source))
        })?;
        load(cache, &path).ok_or_else(|| TemplateError::Damaged { name: name.to_owned() })
    }

    /// Returns the template `name`.
    pub fn find(cache: &Cache, name: &str) -> Result<Template, TemplateError> {
        check_name(name)?;
        let path = cache.path(KIND, name);
        if let Some(template) = load(cache, &path) {
            return Ok(template);
        }
        if path.exists() {
            return Err(TemplateError::Damaged { name: name.to_owned() });
        }
        let names: Vec<_> =
            Template::list(cache)?.into_iter().map(|template| template.manifest.name).collect();
        let there = match names.as_slice() {
            [] => "there are none yet".to_owned(),
            names => format!("there are: {}", names.join(", ")),
        };
        Err(TemplateError::Unknown { name: name.to_owned(), there })
    }

    /// Lists all templates by name; damaged ones are skipped.
    pub fn list(cache: &Cache) -> Result<Vec<Template>, TemplateError> {
        let path = cache.root().join(KIND);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(TemplateError::Read { path, source }),
        };
        let named = |path: &PathBuf| {
            path.file_name().and_then(|n| n.to_str()).is_some_and(|n| check_name(n).is_ok())
        };
        let paths = entries.flatten().map(|entry| entry.path()).filter(named);
        let mut templates: Vec<_> = paths.filter_map(|path| load(cache, &path)).collect();
        templates.sort_by(|a, b| a.name().cmp(b.name()));
        Ok(templates)
    }

    /// Removes a template. Its image stays in the store for VMs and snapshots that need it.
    pub fn remove(
        cache: &Cache,
        name: &str,
        progress: &mut dyn Progress,
    ) -> Result<(), TemplateError> {
        check_name(name)?;
        if cache.remove(KIND, name, progress)? {
            return Ok(());
        }
        // Called for its error message, which lists the existing templates.
        Template::find(cache, name).map(drop)
    }
}

/// Checks for `[a-z0-9][a-z0-9._-]{0,62}`: neither a hidden file nor an option.
pub fn check_name(name: &str) -> Result<(), TemplateError> {
    let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = name.as_bytes();
    let valid = (1..=NAME_CAP).contains(&bytes.len())
        && plain(bytes[0])
        && bytes.iter().all(|&c| plain(c) || b"._-".contains(&c));
    if valid { Ok(()) } else { Err(TemplateError::Name { name: name.to_owned() }) }
}

/// Downloads the packages of the recipe and links them into `dir`, where they cannot be removed, so
/// that apt is free for the next builder while this one unpacks.
fn fetch(
    cache: &Cache,
    recipe: &Recipe,
    dir: &Path,
    progress: &mut dyn Progress,
) -> Result<(Vec<Package>, Vec<PathBuf>), TemplateError> {
    let apt = Apt::open(cache, progress)?;
    cache.need_mib(BUILD_MIB)?;
    let packages = apt.resolve(&recipe.all_packages())?;
    let downloaded = apt.download(&packages, progress)?;
    let path = dir.join(PACKAGES);
    fs::create_dir(&path).map_err(|source| TemplateError::Write { path: path.clone(), source })?;
    let mut debs = Vec::new();
    for deb in downloaded {
        let linked = path.join(deb.file_name().unwrap_or_default());
        fs::hard_link(&deb, &linked)
            .map_err(|source| TemplateError::Write { path: linked.clone(), source })?;
        debs.push(linked);
    }
    Ok((packages, debs))
}

pub(crate) fn load(cache: &Cache, folder: &Path) -> Option<Template> {
    let manifest: Manifest = serde_json::from_slice(&fs::read(folder.join(MANIFEST)).ok()?).ok()?;
    let image = folder.join(IMAGE);
    let whole = fs::metadata(&image).ok()?.len() == manifest.image_bytes;
    let rootfs = store::kept(cache, &image, &manifest.digest).unwrap_or(image);
    whole.then(|| Template { rootfs, manifest, folder: folder.to_owned() })
}

/// Writes `template.json` beside the image in `dir`, and puts the image into the store.
fn write_manifest(
    cache: &Cache,
    dir: &Path,
    recipe: &Recipe,
    system: String,
    packages: Vec<Package>,
    source: Option<Source>,
) -> Result<(), TemplateError> {
    let image = dir.join(IMAGE);
    let failed = |source| TemplateError::Read { path: image.clone(), source };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let manifest = Manifest {
        name: recipe.name.clone(),
        recipe: recipe.clone(),
        // A source is no recipe: a build of that name from packages replaces the template.
        key: source.as_ref().map_or_else(|| recipe.key(), |source| source.digest.clone()),
        system,
        digest: cache::file_digest(&image).map_err(failed)?,
        image_bytes: fs::metadata(&image).map_err(failed)?.len(),
        created: since.as_secs(),
        packages,
        source: source.map(Box::new),
    };
    store::keep(cache, &image, &manifest.digest)
        .map_err(|source| TemplateError::Write { path: image.clone(), source })?;
    let path = dir.join(MANIFEST);
    serde_json::to_vec_pretty(&manifest)
        .map_err(io::Error::from)
        .and_then(|json| fs::write(&path, json))
        .map_err(|source| TemplateError::Write { path, source })
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
