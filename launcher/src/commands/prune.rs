//! `pvmm prune`: removes from the cache what nothing needs any more.

use pvmm_images::Cache;
use pvmm_sandbox::prepare;
use pvmm_sandbox::prune::{PruneOptions, prune as sweep};

use crate::cli::Prune;
use crate::exit::Outcome;
use crate::interrupt::interruptible;
use crate::output::{self, Table};
use crate::progress::Steps;

pub fn prune(args: &Prune, quiet: bool) -> Outcome {
    let cache = Cache::open().map_err(prepare::refuse)?;
    let options = PruneOptions { dry_run: args.dry_run, all: args.all };
    let pruned = interruptible(|| sweep(&cache, options, &mut Steps::new(quiet)))?;
    if args.json {
        output::json(&pruned)?;
        return Ok(0);
    }
    let mut table = Table::new(&["KIND", "SIZE", "PATH"]);
    for one in &pruned {
        let path = one.path.strip_prefix(cache.root()).unwrap_or(&one.path);
        let path = path.display().to_string();
        table.row(vec![one.kind.to_owned(), output::bytes(one.bytes), path]);
    }
    if !pruned.is_empty() {
        table.print()?;
    }
    if !quiet {
        let freed = output::bytes(pruned.iter().map(|one| one.bytes).sum());
        let verb = if args.dry_run { "would be freed" } else { "freed" };
        eprintln!("{freed} {verb}");
    }
    Ok(0)
}
