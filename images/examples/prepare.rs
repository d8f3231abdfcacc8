//! Prepares kernel, template and disk, and says where they are and how long each took.
//! It is an example of the whole crate in one page; the initramfs goes to the path it is given.

use std::time::Instant;

use pvmm_agent_image::AGENT;
use pvmm_images::{Cache, Event, Kernel, Recipe, Template, overlay};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut since = Instant::now();
    let mut progress = |event: Event<'_>| match event {
        Event::Step(text) => {
            since = Instant::now();
            eprint!("{text}: ");
        }
        Event::Detail(_) => (),
        Event::Done => eprintln!("{:.1?}", since.elapsed()),
    };
    let cache = Cache::open()?;
    let start = Instant::now();
    let kernel = Kernel::default_in(&cache, &mut progress)?;
    println!("{} in {:.1?}: {}", kernel.label, start.elapsed(), kernel.vmlinux.display());
    let start = Instant::now();
    let initramfs = kernel.initramfs(AGENT)?;
    if let Some(path) = std::env::args_os().nth(1) {
        std::fs::write(path, &initramfs)?;
    }
    let bytes = initramfs.len();
    println!("initramfs of {bytes} bytes, agent {}, in {:.1?}", AGENT.len(), start.elapsed());
    let start = Instant::now();
    let template = Template::ensure(&cache, &Recipe::base(), &mut progress)?;
    println!(
        "template {} in {:.1?}: {}",
        template.name(),
        start.elapsed(),
        template.rootfs.display()
    );
    overlay::pristine(&cache, overlay::DEFAULT_BYTES, &mut progress)?;
    let start = Instant::now();
    let disk = overlay::create_upper(&cache, cache.root(), overlay::DEFAULT_BYTES)?;
    println!("disk of {} bytes in {:.1?}", disk.metadata()?.len(), start.elapsed());
    Ok(())
}
