//! Use of a VM by a container, as containerd's metrics of a control group.

use containerd_shim_protos::cgroups_v2::metrics::{CPUStat, MemoryStat, Metrics, PidsStat};
use pvmm::agent::Agent;

/// The longest file of a control group that is read.
const MAX_FILE: u64 = 64 << 10;

/// Reads the metrics of the control group of the container `id`. A file that is not there counts as
/// empty: a container that has ended has no group any more.
pub fn read(agent: &Agent, id: &str) -> Metrics {
    let file = |name: &str| {
        let path = format!("/sys/fs/cgroup/containers/{id}/{name}");
        let bytes = agent.read_file(path, MAX_FILE).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut metrics = Metrics::new();
    metrics.cpu = Some(cpu(&file("cpu.stat"))).into();
    let (usage, limit) = (file("memory.current"), file("memory.max"));
    metrics.memory = Some(memory(&file("memory.stat"), &usage, &limit)).into();
    let (current, limit) = (file("pids.current"), file("pids.max"));
    let mut pids = PidsStat::new();
    (pids.current, pids.limit) = (number(&current), number(&limit));
    metrics.pids = Some(pids).into();
    metrics
}

fn cpu(text: &str) -> CPUStat {
    let mut cpu = CPUStat::new();
    cpu.usage_usec = named(text, "usage_usec");
    cpu.user_usec = named(text, "user_usec");
    cpu.system_usec = named(text, "system_usec");
    cpu
}

fn memory(text: &str, usage: &str, limit: &str) -> MemoryStat {
    let mut memory = MemoryStat::new();
    memory.usage = number(usage);
    memory.usage_limit = number(limit);
    memory.anon = named(text, "anon");
    memory.file = named(text, "file");
    memory.inactive_file = named(text, "inactive_file");
    memory.active_file = named(text, "active_file");
    memory.pgfault = named(text, "pgfault");
    memory.pgmajfault = named(text, "pgmajfault");
    memory
}

/// Returns the number in a file that has only one: the largest for `max`, 0 for none.
fn number(text: &str) -> u64 {
    match text.trim() {
        "max" => u64::MAX,
        text => text.parse().unwrap_or(0),
    }
}

/// Returns the number after a name, in a file with a name and a number on each line.
fn named(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0, number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_control_group_are_read() {
        let text = "usage_usec 12\nuser_usec 7\nsystem_usec 5\n";
        let cpu = cpu(text);
        assert_eq!((cpu.usage_usec, cpu.user_usec, cpu.system_usec), (12, 7, 5));
        assert_eq!(named("anon_thp 1\nanon 2\n", "anon"), 2);
        let memory = memory("file 3\n", "4096\n", "max\n");
        assert_eq!((memory.usage, memory.usage_limit, memory.file), (4096, u64::MAX, 3));
        assert_eq!(number(""), 0);
    }
}
