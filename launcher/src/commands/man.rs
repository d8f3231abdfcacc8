//! `pvmm man`: prints one manual page, or writes all pages into a folder.
//!
//! Generated from the parser's definitions, so that it always matches them.

use std::path::Path;

use clap::CommandFactory;

use crate::cli::{Cli, Man};
use crate::exit::{Failure, Outcome};

pub fn man(args: Man) -> Outcome {
    let mut command = Cli::command();
    // Gives every subcommand its full name, such as `pvmm run`, on its own page.
    command.build();
    match args.dir {
        None => crate::output::raw(&page(command)?)?,
        Some(dir) => write_all(command, "pvmm", &dir)?,
    }
    Ok(0)
}

fn page(command: clap::Command) -> std::io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let source = concat!("pvmm ", env!("CARGO_PKG_VERSION"));
    clap_mangen::Man::new(command).source(source).render(&mut page)?;
    Ok(page)
}

fn write_all(command: clap::Command, name: &str, dir: &Path) -> Result<(), Failure> {
    for verb in command.get_subcommands() {
        write_all(verb.clone(), &format!("{name}-{}", verb.get_name()), dir)?;
    }
    let path = dir.join(format!("{name}.1"));
    let page = page(command)?;
    std::fs::write(&path, page)
        .map_err(|error| Failure::usage(format!("--dir: cannot write {}: {error}", path.display())))
}
