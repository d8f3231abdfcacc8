//! The results of a run as a page of the documentation: a table of medians beside their peers and
//! goals.

use std::fmt::Write;

use serde_json::Value;

use crate::board::{Cell, is_ours};
use crate::stats::{Random, Ratio, Summary};

/// The most that a contender may take of what Firecracker takes, or the least if it says so. A
/// contender is named by the begin of its name.
const GOALS: [(&str, &str, &str); 20] = [
    ("create", "pvmm, new process", "≤ 0.25"),
    ("create", "pvmm, held template", "≤ 0.20"),
    ("load → ready for KVM_RUN", "pvmm, from its folder", "≤ 0.25"),
    ("load → ready for KVM_RUN", "pvmm, held template", "≤ 0.20"),
    ("live fork: parent's pause", "pvmm", "≤ 0.02"),
    ("live fork: children answered", "pvmm", "≤ 0.20"),
    ("rollback → exec", "pvmm", "≤ 0.16"),
    ("full snapshot", "pvmm", "≤ 0.20"),
    ("idle fork: private dirty", "pvmm", "≤ 0.40"),
    ("idle fork: host's memory", "pvmm", "≤ 0.60"),
    ("create + exec + destroy", "pvmm", "≥ 4"),
    ("grow by 64 MiB", "pvmm, restored", "≤ 0.25"),
    ("grow: faults per MiB", "pvmm, restored", "≤ 8 faults"),
    ("api", "pvmm, later loads", "≤ 0.50"),
    ("VMM beside its guest", "pvmm", "≤ 0.60"),
    ("boot → first exec", "pvmm", "≤ 0.80"),
    ("warm exec of /bin/true", "pvmm", "≤ 0.80"),
    ("block", "pvmm", "≥ 1.2"),
    ("vsock", "pvmm", "≥ 1.2"),
    ("TCP", "pvmm", "≥ 1.2"),
];

/// Returns the page. `made` says when and from which commit.
pub fn write(made: &str, facts: &Value, cells: &[Cell]) -> String {
    let mut page = String::new();
    let fact = |name: &str| match &facts[name] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let processor = match facts["emulated"].as_bool() {
        Some(true) => "emulated, in a nested host: read the ratios, not the times",
        _ => "of the host itself",
    };
    let _ = write!(
        page,
        "# Results\n\n\
         Written by the benchmark. {made}. Processor: {} ({} of them; {processor}). KVM: {}. Host kernel: \
         {}. Huge pages: {}. The method is in [benchmarks.md](../benchmarks.md).\n\n\
         Medians of n samples; fewer is better, except for rates. The ratio is that of the medians, \
         with the range in which 95 of 100 ratios of redrawn samples lie. The goal is one for the \
         ratio to Firecracker.\n\n\
         | moment | contender | n | p50 | best to p90 | ÷ peer | goal |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        fact("cpu"),
        fact("processors"),
        fact("kvm"),
        fact("host_kernel"),
        fact("huge_pages"),
    );
    let mut random = Random::new(1);
    for cell in cells {
        let Some(s) = Summary::of(&cell.samples) else { continue };
        let unit = cell.unit.name();
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} {unit} | {} to {} | {} | {} |",
            cell.moment,
            cell.contender,
            s.count,
            short(s.p50),
            short(s.min),
            short(s.p90),
            ratios(cell, cells, &mut random),
            goal(cell),
        );
    }
    page + "\n![Each sample of each time](times.svg)\n"
}

/// Returns the ratios of one of pvmm's cells to each peer of the same moment.
fn ratios(cell: &Cell, cells: &[Cell], random: &mut Random) -> String {
    if !is_ours(cell) {
        return String::new();
    }
    let peers = cells.iter().filter(|peer| peer.moment == cell.moment && !is_ours(peer));
    let ratios = peers.filter_map(|peer| {
        let Ratio { value, low, high } = Ratio::of(&cell.samples, &peer.samples, random)?;
        Some(format!("{} {} [{}, {}]", peer.contender, short(value), short(low), short(high)))
    });
    ratios.collect::<Vec<_>>().join("; ")
}

fn goal(cell: &Cell) -> &'static str {
    let is_for = |(moment, contender, _): &&(&str, &str, &str)| {
        cell.moment.starts_with(moment) && cell.contender.starts_with(contender)
    };
    let exact = GOALS.iter().filter(|(moment, ..)| cell.moment == *moment).find(is_for);
    let goal = exact.or_else(|| GOALS.iter().rev().take(3).find(is_for));
    goal.map_or("", |(.., goal)| goal)
}

/// Three digits.
fn short(value: f64) -> String {
    match value.abs() {
        0.0..0.1 => format!("{value:.3}"),
        ..10.0 => format!("{value:.2}"),
        ..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::board::Unit;

    fn cell(moment: &'static str, contender: &str, samples: &[f64]) -> Cell {
        let (contender, samples) = (contender.to_owned(), samples.to_vec());
        Cell { moment, contender, unit: Unit::Millis, samples }
    }

    #[test]
    fn page_has_medians_ratios_and_goals() {
        let cells = [
            cell("create", "pvmm, held template", &[1.0, 2.0, 3.0]),
            cell("create", "firecracker", &[8.0, 8.0, 8.0]),
            cell("vsock: guest to host", "pvmm", &[1.0]),
        ];
        let page =
            write("2026-01-01, commit abc", &json!({ "cpu": "X", "emulated": true }), &cells);
        let line =
            "| create | pvmm, held template | 3 | 2.00 ms | 1.00 to 2.80 | firecracker 0.25 [";
        assert!(page.contains(line), "{page}");
        assert!(page.contains("| ≤ 0.20 |\n| create | firecracker | 3 | 8.00 ms"), "{page}");
        assert!(
            page.contains(
                "| vsock: guest to host | pvmm | 1 | 1.00 ms | 1.00 to 1.00 |  | ≥ 1.2 |"
            )
        );
        assert!(page.contains("2026-01-01, commit abc. Processor: X ("), "{page}");
    }

    #[test]
    fn goals_name_moments_that_are_measured() {
        let sources = [
            include_str!("moments/create.rs"),
            include_str!("moments/load.rs"),
            include_str!("moments/live_fork.rs"),
            include_str!("moments/rollback.rs"),
            include_str!("moments/snapshot.rs"),
            include_str!("moments/fork_memory.rs"),
            include_str!("moments/rate.rs"),
            include_str!("moments/grow.rs"),
            include_str!("moments/api.rs"),
            include_str!("moments/overhead.rs"),
            include_str!("moments/boot.rs"),
            include_str!("moments/exec.rs"),
            include_str!("moments/throughput.rs"),
        ];
        for (moment, ..) in GOALS {
            assert!(sources.iter().any(|text| text.contains(&format!("\"{moment}"))), "{moment}");
        }
    }
}
