//! Arguments of `pvmm template`, `doctor`, and other commands that concern the host.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use pvmm::CpuBaseline;

use super::TEMPLATE;
use super::start::EgressFlags;
use super::travel::{PullFlags, PushFlags};
use crate::args::{self, ImageFlag};

/// Build, list, remove, send and fetch templates
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, arg_required_else_help = true, before_help = "\
Examples:
  pvmm template build                        build 'base' now instead of on first use
  pvmm template build data -p git,jq         base with more Debian packages
  pvmm template build data --tar rootfs.tar.gz
  pvmm template build app --dockerfile Dockerfile --context . --allow-host pypi.org
  pvmm template ls
  pvmm template inspect base
  pvmm template push data /mnt/share         or a store such as s3://bucket/pvmm
  pvmm template pull /mnt/share/data         on another host
")]
pub struct Template {
    #[command(subcommand)]
    pub verb: TemplateVerb,
}

#[derive(Debug, Subcommand)]
pub enum TemplateVerb {
    /// Build a template now instead of on first use
    Build {
        /// What to call it; 'base' is built in, another name is base with more packages
        #[arg(default_value = "base", conflicts_with = "recipe")]
        name: String,
        /// Debian packages to add to those of base
        #[arg(short, long, value_name = "PACKAGE", value_delimiter = ',', num_args = 1..)]
        packages: Vec<String>,
        /// Recipe file: {"name": "data", "packages": ["git", "jq"]}
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "packages")]
        recipe: Option<PathBuf>,
        #[command(flatten)]
        source: Box<SourceFlags>,
        /// Build it again even if it is there
        #[arg(long)]
        force: bool,
        /// The result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Boot a template once and keep it warm, so that a run need not boot; done by `build` where
    /// there is KVM
    Bake {
        #[arg(default_value = "base")]
        name: String,
        /// Memory of the runs that start from it
        #[arg(short, long, value_name = "SIZE", default_value = "512M", value_parser = args::memory_mib)]
        memory: u64,
        /// Virtual CPUs of the runs that start from it
        #[arg(long, value_name = "N", default_value = "1", value_parser = args::cpus)]
        cpus: u32,
        /// Processor features of the runs that start from it, as for 'pvmm run --cpu'
        #[arg(long, value_name = "BASELINE", default_value = "host", value_parser = args::cpu)]
        cpu: CpuBaseline,
        /// Disk size of the runs that start from it
        #[arg(long, value_name = "SIZE", default_value = "8G", value_parser = args::disk_mib)]
        disk_size: u64,
        /// With a network card, for runs and sandboxes that have a policy
        #[arg(long)]
        net: bool,
        /// For runs and sandboxes with volumes, of which each is written or only read: rw,ro
        #[arg(long, value_name = "MODES", value_delimiter = ',')]
        volumes: Vec<VolumeMode>,
    },
    /// List the templates that are built or can be
    #[command(visible_alias = "list")]
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove built templates
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Send a template to a folder or an S3-compatible store: only the parts that it lacks
    Push {
        name: String,
        #[command(flatten)]
        flags: PushFlags,
    },
    /// Fetch a template from a store: only the parts that this host lacks. It replaces the one of
    /// its name
    Pull {
        #[command(flatten)]
        flags: PullFlags,
    },
    /// Show what a template is made of
    Inspect {
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

/// The flags that say what a template is built from, if not from packages.
#[derive(Debug, Args)]
pub struct SourceFlags {
    /// Archive of a root filesystem: plain, gzip or zstd; '-' for standard input
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, group = "source", conflicts_with_all = ["packages", "recipe"])]
    pub tar: Option<PathBuf>,
    /// Folder that is a root filesystem
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, group = "source", conflicts_with_all = ["packages", "recipe"])]
    pub dir: Option<PathBuf>,
    /// Container image: HOST/NAME:TAG of a registry, a folder with an OCI layout, or an archive of
    /// one or of `docker save`; PATH:NAME for one of several
    #[arg(long, value_name = "IMAGE", value_parser = args::image, group = "source", conflicts_with_all = ["packages", "recipe"])]
    pub image: Option<ImageFlag>,
    /// Dockerfile, whose steps run in a sandbox
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, group = "source", conflicts_with_all = ["packages", "recipe"])]
    pub dockerfile: Option<PathBuf>,
    /// Folder that COPY takes files from [default: none]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "dockerfile")]
    pub context: Option<PathBuf>,
    /// Value for an ARG of the Dockerfile
    #[arg(long, value_name = "NAME=VALUE", requires = "dockerfile", value_parser = args::variable)]
    pub build_arg: Vec<(String, String)>,
    #[command(flatten)]
    pub egress: EgressFlags,
}

/// Show what this host has and lacks
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm doctor
  pvmm doctor --json

Exits 0 if a VM can run here and 1 if not.
")]
pub struct Doctor {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Stand in for Firecracker: its flags, its API socket
#[derive(Debug, Args)]
#[command(disable_help_flag = true, help_template = TEMPLATE, before_help = "\
Examples:
  pvmm firecracker --api-sock /run/fc.sock
  pvmm firecracker --help
  ln -s $(command -v pvmm) /usr/local/bin/firecracker     the same, by that name
")]
pub struct Firecracker {
    /// Firecracker's own flags
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<OsString>,
}

/// Stand in for Firecracker's snapshot-editor, on pvmm's two files
#[derive(Debug, Args)]
#[command(disable_help_flag = true, help_template = TEMPLATE, before_help = "\
Examples:
  pvmm snapshot-editor edit-memory rebase --memory-path vm.mem --diff-path diff.mem
  pvmm snapshot-editor info-vmstate version --vmstate-path vm.state
")]
pub struct SnapshotEditor {
    /// Its own words
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<OsString>,
}

/// Make a PandaStack agent bake the templates again that another VMM has made
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm migrate-templates --dry-run /var/lib/pandastack     say what would be removed
  pvmm migrate-templates /var/lib/pandastack

Removes, of each template in DIR/template-snaps whose snapshot is not pvmm's, the marker `ready` and the files of the
snapshot. Disks and everything else stay.
")]
pub struct MigrateTemplates {
    /// The agent's data folder, or its template-snaps
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Only say what would be removed
    #[arg(long)]
    pub dry_run: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Print a shell's completion script
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm completions bash > /etc/bash_completion.d/pvmm
  pvmm completions zsh > \"${fpath[1]}/_pvmm\"
  pvmm completions fish > ~/.config/fish/completions/pvmm.fish
")]
pub struct Completions {
    pub shell: clap_complete::Shell,
}

/// Print the manual page, or write all of them to a folder
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm man | man -l -
  pvmm man --dir /usr/local/share/man/man1
")]
pub struct Man {
    /// Folder for one page per verb
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

/// What a sandbox may do with a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum VolumeMode {
    Rw,
    Ro,
}
