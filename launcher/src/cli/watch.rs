//! Arguments of `pvmm watch`.

use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueHint};

use super::TEMPLATE;
use crate::args;

/// Tell what happens in a folder of a VM, until it is interrupted
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm watch web:/srv
  pvmm watch -r web:/srv               the whole tree
  pvmm watch --json web:/srv | jq .path
")]
pub struct Watch {
    /// Folder: VM:PATH
    #[arg(value_name = "VM:PATH", value_hint = ValueHint::Other, value_parser = OsStringValueParser::new().try_map(|text| args::guest_place(&text)))]
    pub place: (String, PathBuf),
    /// Also what is below it, however deep
    #[arg(short, long)]
    pub recursive: bool,
    /// One JSON document a line
    #[arg(long)]
    pub json: bool,
}
