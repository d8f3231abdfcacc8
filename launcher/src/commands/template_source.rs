//! `pvmm template build` from an archive, a folder, a container image or a Dockerfile.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use pvmm_images::{Cache, Template};

use super::image::{self, Ask};
use crate::cli::SourceFlags;
use crate::exit::{self, Failure};
use crate::interrupt::interruptible;
use crate::progress::Steps;
use pvmm_sandbox::Sandboxes;
use pvmm_sandbox::dockerfile::{self, BuildOptions};
use pvmm_sandbox::prepare;
use pvmm_sandbox::sys::{process, signals};
use pvmm_sandbox::warm::Shape;

/// How often the end of a bake and an interrupt are looked for.
const LOOK: Duration = Duration::from_millis(50);
/// The largest Dockerfile that is read.
const MAX_DOCKERFILE: u64 = 2 << 20;

/// Builds the template `name` from what the flags name; `None` if they name nothing.
pub fn build(
    cache: &Cache,
    name: &str,
    flags: &SourceFlags,
    quiet: bool,
) -> Result<Option<Template>, Failure> {
    if flags.egress.is_given() && flags.dockerfile.is_none() {
        let message = "--allow and --allow-host are for the commands of a --dockerfile";
        return Err(Failure::usage(message));
    }
    let mut steps = Steps::new(quiet);
    let built = interruptible(|| match flags {
        SourceFlags { tar: Some(path), .. } => {
            let archive = open(path)?;
            Template::from_tar(cache, name, archive, &mut steps).map(Some).map_err(prepare::refuse)
        }
        SourceFlags { dir: Some(dir), .. } => {
            Template::from_folder(cache, name, dir, &mut steps).map(Some).map_err(prepare::refuse)
        }
        SourceFlags { image: Some(flag), .. } => {
            let image = image::open(cache, flag, Ask::Always, &mut steps)?;
            let built = Template::from_image(cache, name, &image, &mut steps);
            built.map(Some).map_err(prepare::refuse)
        }
        SourceFlags { dockerfile: Some(path), .. } => {
            let text = read_text(path)?;
            let egress = flags.egress.is_given().then(|| flags.egress.egress(None)).transpose()?;
            let options = BuildOptions {
                name,
                dockerfile: &text,
                context: flags.context.as_deref(),
                args: flags.build_arg.clone(),
                egress,
            };
            let sandboxes = Sandboxes::open()?;
            dockerfile::build(cache, &sandboxes, &options, &mut bake, &mut steps).map(Some)
        }
        _ => Ok(None),
    });
    drop(steps);
    built
}

fn open(path: &Path) -> Result<Box<dyn Read>, Failure> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdin().lock()));
    }
    Ok(Box::new(File::open(path).map_err(|error| unreadable(path, &error))?))
}

fn read_text(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let file = fs::File::open(path).map_err(|error| unreadable(path, &error))?;
    let read = file.take(MAX_DOCKERFILE).read_to_string(&mut text);
    read.map(|_| text).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::usage(format!("cannot read {}: {}", path.display(), exit::io_text(error)))
}

/// Bakes a warm template in a process of its own, which boots a VM and has its own way to end.
pub fn bake(shape: &Shape) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::fault(format!("cannot bake a template: {error}"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(shape.bake_words()).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(failed)?;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if signals::caught().is_some() {
            end(&mut child);
            return Err(Failure::fault("interrupted"));
        }
        thread::sleep(LOOK);
    };
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    let _ = child.stderr.take().map(|stderr| stderr.take(4096).read_to_string(&mut said));
    let line = said.lines().next().unwrap_or("no reason given");
    Err(Failure::fault(line.strip_prefix("error: ").unwrap_or(line)))
}

/// Ends a bake, which removes what it has half made.
fn end(child: &mut Child) {
    let _ = process::Other::open(child.id()).and_then(|bake| bake.signal(libc::SIGTERM));
    let _ = child.wait();
}
