//! `pvmm top`: all VMs of this user, with what their processes use of this host.
//!
//! Reads the VMs' directories and `/proc` only. `pvmm stats` asks a guest for its own numbers; here
//! no guest is asked, so a stuck one cannot block the list.

mod screen;

use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use pvmm_sandbox::hibernated;
use pvmm_sandbox::usage::Usage;
use pvmm_sandbox::vm_dir::{Base, Record, now};
use serde::Serialize;

use crate::cli::Top;
use crate::exit::{Failure, Outcome};
use crate::output::{self, Table};

/// The time between two readings of a single frame, for the share of a processor.
const LOOK: Duration = Duration::from_millis(500);
const HEADING: [&str; 10] =
    ["ID", "NAME", "STATE", "AGE", "CPU", "PRIVATE", "SHARED", "MEMORY", "FORKS", "FROM"];

pub fn top(args: Top) -> Outcome {
    if !args.once && !args.json {
        if !(io::stdout().is_terminal() && io::stdin().is_terminal()) {
            let failure = Failure::usage("standard input and output are not a terminal");
            return Err(failure.hint("print one frame: pvmm top --once"));
        }
        return screen::run();
    }
    let mut readings = Readings::default();
    readings.take()?;
    std::thread::sleep(LOOK);
    let mut rows = readings.take()?;
    Order::Cpu.sort(&mut rows);
    if args.json {
        output::json(&rows)?;
    } else {
        output::line(&totals(&rows))?;
        let mut table = Table::new(&HEADING);
        rows.iter().for_each(|row| table.row(row.cells()));
        table.print()?;
    }
    Ok(0)
}

/// A VM; sizes are in bytes.
#[derive(Clone, Debug, Default, Serialize)]
struct Row {
    id: String,
    name: Option<String>,
    state: &'static str,
    age_s: u64,
    template: String,
    cpus: u32,
    memory: u64,
    /// The share of one processor since the last reading.
    cpu_percent: Option<f64>,
    memory_private: Option<u64>,
    memory_shared: Option<u64>,
    /// The VMs that were forked from this one and are still listed.
    forks: usize,
}

impl Row {
    fn of(record: &Record, state: &'static str) -> Self {
        Self {
            id: record.id.clone(),
            name: record.name.clone(),
            state,
            age_s: now().saturating_sub(record.created),
            template: record.template.clone(),
            cpus: record.cpus,
            memory: record.memory_mib << 20,
            ..Self::default()
        }
    }

    fn label(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.id)
    }

    fn cells(&self) -> Vec<String> {
        let size = |size: Option<u64>| size.map_or_else(|| "-".to_owned(), output::bytes);
        let cells = [
            self.id.clone(),
            self.name.clone().unwrap_or_else(|| "-".to_owned()),
            self.state.to_owned(),
            output::age(self.age_s),
            self.cpu_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.0}%")),
            size(self.memory_private),
            size(self.memory_shared),
            output::bytes(self.memory),
            self.forks.to_string(),
            self.template.clone(),
        ];
        cells.iter().map(|cell| output::one_line(cell)).collect()
    }
}

/// Returns the line above the list.
fn totals(rows: &[Row]) -> String {
    let alive = rows.iter().filter(|row| row.memory_private.is_some()).count();
    let sum = |size: fn(&Row) -> Option<u64>| output::bytes(rows.iter().filter_map(size).sum());
    let (private, shared) = (sum(|row| row.memory_private), sum(|row| row.memory_shared));
    let cpu: f64 = rows.iter().filter_map(|row| row.cpu_percent).fold(0.0, |sum, it| sum + it);
    format!("{} VMs, {alive} alive; {private} private, {shared} shared; CPU {cpu:.0}%", rows.len())
}

/// The order of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Cpu,
    Private,
    Shared,
    Age,
    Name,
    Forks,
}

impl Order {
    /// Returns the order for a key, if the key has one.
    fn of_key(key: char) -> Option<Self> {
        Some(match key {
            'c' => Self::Cpu,
            'm' => Self::Private,
            's' => Self::Shared,
            'a' => Self::Age,
            'n' => Self::Name,
            'f' => Self::Forks,
            _ => return None,
        })
    }

    /// Returns the number of the column that is sorted by.
    fn column(self) -> usize {
        match self {
            Self::Name => 1,
            Self::Age => 3,
            Self::Cpu => 4,
            Self::Private => 5,
            Self::Shared => 6,
            Self::Forks => 8,
        }
    }

    /// Sorts rows, the largest first and names in their order.
    fn sort(self, rows: &mut [Row]) {
        rows.sort_by(|a, b| {
            let by = match self {
                Self::Cpu => {
                    b.cpu_percent.unwrap_or(-1.0).total_cmp(&a.cpu_percent.unwrap_or(-1.0))
                }
                Self::Private => b.memory_private.cmp(&a.memory_private),
                Self::Shared => b.memory_shared.cmp(&a.memory_shared),
                Self::Age => b.age_s.cmp(&a.age_s),
                Self::Name => a.label().cmp(b.label()),
                Self::Forks => b.forks.cmp(&a.forks),
            };
            by.then_with(|| a.id.cmp(&b.id))
        });
    }
}

/// Readings of all VMs, each with the one before it for what has passed in between.
#[derive(Default)]
struct Readings {
    before: HashMap<String, (Instant, Duration)>,
}

impl Readings {
    /// Reads all VMs.
    fn take(&mut self) -> Result<Vec<Row>, Failure> {
        let mut before = HashMap::new();
        let mut rows = Vec::new();
        for vm in Base::open()?.list()? {
            let mut row = Row::of(&vm.record, vm.state.word());
            let pid = vm.record.pid.filter(|_| vm.state.is_alive());
            if let Some(usage) = pid.and_then(Usage::of) {
                let now = (Instant::now(), usage.cpu);
                let last = self.before.get(&row.id);
                row.cpu_percent = last.and_then(|last| percent(*last, now));
                (row.memory_private, row.memory_shared) = (Some(usage.private), Some(usage.shared));
                before.insert(row.id.clone(), now);
            }
            rows.push(row);
        }
        rows.extend(hibernated::list()?.iter().map(|vm| Row::of(&vm.record, "hibernated")));
        self.before = before;
        count_forks(&mut rows);
        Ok(rows)
    }
}

/// Returns the share of one processor between two readings.
fn percent(before: (Instant, Duration), now: (Instant, Duration)) -> Option<f64> {
    let passed = now.0.duration_since(before.0).as_secs_f64();
    let busy = now.1.saturating_sub(before.1).as_secs_f64();
    (passed > 0.0).then(|| 100.0 * busy / passed)
}

/// Counts the forks of each VM, by what their descriptions say they come from.
fn count_forks(rows: &mut [Row]) {
    let mut forks: HashMap<String, usize> = HashMap::new();
    for row in rows.iter() {
        if let Some(parent) = row.template.strip_prefix("fork of ") {
            *forks.entry(parent.to_owned()).or_default() += 1;
        }
    }
    for row in rows {
        row.forks = forks.get(row.label()).copied().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, template: &str, cpu: Option<f64>) -> Row {
        let (id, template) = (id.to_owned(), template.to_owned());
        Row { id, template, cpu_percent: cpu, ..Row::default() }
    }

    #[test]
    fn rows_are_sorted_with_unknown_numbers_last() {
        let mut rows =
            [row("a", "", None), row("b", "", Some(1.0)), row("c", "", Some(f64::INFINITY))];
        Order::Cpu.sort(&mut rows);
        assert_eq!(rows.each_ref().map(|row| &row.id[..]), ["c", "b", "a"]);
        Order::Name.sort(&mut rows);
        assert_eq!(rows.each_ref().map(|row| &row.id[..]), ["a", "b", "c"]);
    }

    #[test]
    fn forks_are_counted_by_their_parents_label() {
        let mut rows =
            [row("a", "base", None), row("b", "fork of a", None), row("c", "fork of a", None)];
        count_forks(&mut rows);
        assert_eq!(rows.each_ref().map(|row| row.forks), [2, 0, 0]);
    }

    #[test]
    fn percent_is_of_the_time_that_has_passed() {
        let begin = Instant::now();
        let (before, later) = ((begin, Duration::ZERO), begin + Duration::from_secs(2));
        assert_eq!(percent(before, (later, Duration::from_secs(1))), Some(50.0));
        assert_eq!(percent(before, before), None);
    }
}
