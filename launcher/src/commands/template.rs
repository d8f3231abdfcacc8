//! `pvmm template`: builds, lists, shows and removes root filesystem templates.
//!
//! The `images` crate does the work; this file only prints results and progress.

use std::path::PathBuf;

use pvmm_images::{Cache, Recipe, SourceKind, Template};
use serde::Serialize;

use super::{template_source, travel};
use crate::cli::{self, TemplateVerb, VolumeMode};
use crate::exit::{Failure, Outcome};
use crate::interrupt::{interruptible, or_interrupted};
use crate::leftovers::Leftovers;
use crate::output::{self, Table};
use crate::progress::Steps;
use pvmm_sandbox::prepare;
use pvmm_sandbox::vm_dir::now;
use pvmm_sandbox::warm::{self, Shape};

pub fn template(args: cli::Template, quiet: bool) -> Outcome {
    let cache = Cache::open().map_err(prepare::refuse)?;
    match args.verb {
        TemplateVerb::Build { name, packages, recipe, source, force, json } => {
            let template = match template_source::build(&cache, &name, &source, quiet)? {
                Some(template) => template,
                None => {
                    let recipe = recipe_of(&name, &packages, recipe)?;
                    build(&cache, &recipe, force, quiet)?
                }
            };
            if pvmm::kvm::host::probe().is_ok() {
                bake(&Shape::of(template.name()), quiet)?;
            }
            if json { output::json(&template)? } else { output::line(template.name())? }
        }
        TemplateVerb::Bake { name, memory, cpus, cpu, disk_size, net, volumes } => {
            let shape = Shape {
                cpus,
                memory_mib: memory,
                disk_mib: disk_size,
                cpu,
                net,
                spare_drives: volumes.into_iter().map(|mode| mode == VolumeMode::Ro).collect(),
                ..Shape::of(&name)
            };
            bake(&shape, quiet)?;
            output::line(&name)?;
        }
        TemplateVerb::Ls { json } => list(&cache, json)?,
        TemplateVerb::Rm { names } => {
            for name in names {
                let mut steps = Steps::new(quiet);
                Template::remove(&cache, &name, &mut steps).map_err(prepare::refuse)?;
            }
        }
        TemplateVerb::Push { name, flags } => travel::push_template(&cache, &name, &flags, quiet)?,
        TemplateVerb::Pull { flags } => travel::pull_template(&cache, &flags, quiet)?,
        TemplateVerb::Inspect { name, json } => {
            let template = Template::find(&cache, &name).map_err(prepare::refuse)?;
            inspect(&template, json)?;
        }
    }
    Ok(0)
}

fn recipe_of(name: &str, packages: &[String], file: Option<PathBuf>) -> Result<Recipe, Failure> {
    let recipe = match file {
        Some(path) => Recipe::load(&path),
        None => match Recipe::built_in(name).filter(|_| packages.is_empty()) {
            Some(recipe) => Ok(recipe),
            None => Recipe::new(name, packages),
        },
    };
    recipe.map_err(prepare::refuse)
}

fn build(cache: &Cache, recipe: &Recipe, force: bool, quiet: bool) -> Result<Template, Failure> {
    interruptible(|| {
        let mut steps = Steps::new(quiet);
        let built = if force {
            Template::build(cache, recipe, &mut steps)
        } else {
            Template::ensure(cache, recipe, &mut steps)
        };
        built.map_err(prepare::refuse)
    })
}

fn bake(shape: &Shape, quiet: bool) -> Result<(), Failure> {
    let watch = || -> Result<warm::Note, Failure> {
        or_interrupted(Ok(()))?;
        let leftovers = Leftovers::watch()?;
        Ok(Box::new(move |folder| leftovers.note(folder)))
    };
    interruptible(|| warm::bake(shape, &mut Steps::new(quiet), watch)).map(drop)
}

/// A template in the `--json` output: what `inspect` shows, without the packages.
#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    system: &'a str,
    image_bytes: u64,
    created: u64,
    digest: &'a str,
    rootfs: String,
    packages: &'a [String],
}

fn list(cache: &Cache, json: bool) -> Result<(), Failure> {
    let templates = Template::list(cache).map_err(prepare::refuse)?;
    if json {
        let rows: Vec<_> = templates.iter().map(row).collect();
        return Ok(output::json(&rows)?);
    }
    let mut table = Table::new(&["NAME", "SYSTEM", "SIZE", "AGE", "ADDED PACKAGES"]);
    for template in &templates {
        let row = row(template);
        table.row(vec![
            row.name.to_owned(),
            row.system.to_owned(),
            output::bytes(row.image_bytes),
            output::age(now().saturating_sub(row.created)),
            if row.packages.is_empty() { "-".to_owned() } else { row.packages.join(" ") },
        ]);
    }
    Ok(table.print()?)
}

fn row(template: &Template) -> Row<'_> {
    let manifest = &template.manifest;
    Row {
        name: &manifest.name,
        system: &manifest.system,
        image_bytes: manifest.image_bytes,
        created: manifest.created,
        digest: &manifest.digest,
        rootfs: template.rootfs.display().to_string(),
        packages: &manifest.recipe.packages,
    }
}

fn inspect(template: &Template, json: bool) -> Result<(), Failure> {
    if json {
        return Ok(output::json(template)?);
    }
    let manifest = &template.manifest;
    let mut text = format!(
        "name      {}\nsystem    {}\nimage     {}\nsize      {}\ndigest    {}\nbuilt     {} ago\npackages  {}\n",
        manifest.name,
        manifest.system,
        template.rootfs.display(),
        output::bytes(manifest.image_bytes),
        manifest.digest,
        output::age(now().saturating_sub(manifest.created)),
        manifest.packages.len(),
    );
    if let Some(source) = &manifest.source {
        let kind = match source.kind {
            SourceKind::Tar => "archive",
            SourceKind::Folder => "folder",
            SourceKind::Dockerfile => "Dockerfile",
            SourceKind::Image => "image",
        };
        text += &format!("source    {kind} {}\n", source.digest);
    }
    for package in &manifest.packages {
        text += &format!("  {} {}\n", package.name, package.version);
    }
    Ok(output::raw(text.as_bytes())?)
}
