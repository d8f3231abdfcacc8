//! Freezing, refreshing and thawing: a copied guest is its own before its workload goes on.
//! The agent gets namespaces of its own, so that what it changes is not this machine's.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError, FreezeOptions, Interface, Refresh, RefreshStep};
use pvmm::exec::{ExecError, ExecRequest, Process, ProcessEvent};
use pvmm_guest_agent::message::Code;

use crate::fixture::{Fixture, wait_for};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// This machine's time is not ours to set.
fn refresh(generation: u64) -> Refresh {
    Refresh::new(generation).unwrap().without_clock()
}

fn prints(agent: &Agent, line: &str) -> String {
    let output = agent.exec(&ExecRequest::shell(line)).unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout.bytes).unwrap().trim_end().to_owned()
}

/// A process that says something all the time.
fn ticking(agent: &Agent) -> Process {
    let line = "while :; do echo tick; sleep 0.01; done";
    let mut process = agent.start(&ExecRequest::shell(line)).unwrap();
    assert!(ticks(&mut process, soon()));
    process
}

/// Whether it says something before the deadline.
fn ticks(process: &mut Process, deadline: Instant) -> bool {
    matches!(process.next_event(Some(deadline)).unwrap(), Some(ProcessEvent::Stdout(_)))
}

/// Takes what it said before, then listens a little.
fn stands_still(process: &mut Process) -> bool {
    let mut quiet = false;
    for _ in 0..1000 {
        quiet = !ticks(process, Instant::now() + Duration::from_millis(200));
        if quiet {
            break;
        }
    }
    quiet
}

#[test]
fn refresh_takes_its_steps_in_order_and_programs_see_them() {
    let prepare = "touch /etc/machine-id; ln -s /nowhere/resolv.conf /etc/resolv.conf; \
                   ip link add eth0 type veth peer name far; ip link set far up; \
                   ip link set eth0 up; ip addr add 10.9.9.9/24 dev eth0; \
                   ip route add default via 10.9.9.1; \
                   ip neigh add 10.9.9.1 lladdr 02:00:00:00:00:99 dev eth0 nud reachable";
    let fixture = Fixture::start_isolated(prepare);
    let agent = fixture.control();
    let before = prints(&agent, "cat /proc/sys/kernel/random/boot_id");
    let gateway: IpAddr = "10.1.0.1".parse().unwrap();
    let interface = Interface {
        name: "eth0".into(),
        mac: Some([2, 0, 0, 0, 0, 7]),
        mtu: Some(1400),
        addresses: vec![("10.1.0.7".parse().unwrap(), 16)],
        gateways: vec![gateway],
        keep_addresses: false,
    };
    let wish = refresh(7)
        .hostname("seven")
        .interface(&interface)
        .dns(&[gateway])
        .env("FROM_HOST", "yes")
        .secret("token", "s3cret");
    let steps = agent.refresh(&wish, soon()).unwrap();
    use RefreshStep::*;
    let all = [Entropy, Hostname, MachineId, BootId, Addresses, Generation, Env, Thaw];
    assert_eq!(steps, all);

    assert_eq!(prints(&agent, "hostname"), "seven");
    let machine_id = prints(&agent, "cat /etc/machine-id");
    assert!(machine_id.len() == 32 && machine_id.bytes().all(|b| b.is_ascii_hexdigit()));
    let boot_id = prints(&agent, "cat /proc/sys/kernel/random/boot_id");
    assert!(boot_id != before && boot_id.len() == 36 && &boot_id[14..15] == "4", "{boot_id}");
    assert_eq!(prints(&agent, "cat /run/pvmm/generation; echo $PVMM_GENERATION"), "7\n7");
    assert_eq!(prints(&agent, "echo $FROM_HOST"), "yes");
    assert_eq!(
        prints(&agent, "cat /run/pvmm/secrets/token; stat -c ' %a' /run/pvmm/secrets/token"),
        "s3cret 600"
    );
    assert_eq!(prints(&agent, "cat /etc/resolv.conf"), "nameserver 10.1.0.1");
    let link = prints(&agent, "ip -o link show eth0");
    assert!(link.contains("02:00:00:00:00:07") && link.contains("mtu 1400"), "{link}");
    assert_eq!(
        prints(&agent, "ip -4 -o addr show eth0 | tr -s ' ' | cut -d' ' -f4"),
        "10.1.0.7/16"
    );
    let routes = prints(&agent, "ip -4 route");
    assert!(routes.starts_with("default via 10.1.0.1 dev eth0"), "{routes}");
    assert_eq!(routes.lines().count(), 2, "{routes}");
    assert_eq!(prints(&agent, "ip -4 neigh show dev eth0"), "");
    assert_eq!(agent.info().unwrap().generation, 7);

    // Another hardware address, and nothing else changes; an interface that is gone is no matter
    // then.
    let same = Interface { name: "eth0".into(), keep_addresses: true, ..Interface::default() };
    let other = Interface { mac: Some([2, 0, 0, 0, 0, 8]), ..same.clone() };
    let gone = Interface { name: "eth7".into(), ..same.clone() };
    agent.refresh(&refresh(7).interface(&other).interface(&same).interface(&gone), soon()).unwrap();
    // Not from /sys, which is that of the network that it was mounted in.
    let kept = "ip -4 -o addr show eth0 | tr -s ' ' | cut -d' ' -f4; ip -4 route | wc -l; \
                ip -o link show eth0 | sed 's/.*ether \\([^ ]*\\).*/\\1/'";
    assert_eq!(prints(&agent, kept), "10.1.0.7/16\n2\n02:00:00:00:00:08");
    let machine_id = prints(&agent, "cat /etc/machine-id");
    let missing = Interface { mac: Some([2, 0, 0, 0, 0, 8]), ..gone };
    assert!(agent.refresh(&refresh(7).interface(&missing), soon()).is_err());

    // Once more: all of it is replaced, and what was a secret is gone.
    agent.refresh(&refresh(8).hostname("eight"), soon()).unwrap();
    assert_eq!(
        prints(&agent, "hostname; echo $FROM_HOST; ls /run/pvmm/secrets 2>&1 | wc -l"),
        "eight\n\n1"
    );
    assert_ne!(prints(&agent, "cat /etc/machine-id"), machine_id);
    assert_ne!(prints(&agent, "cat /proc/sys/kernel/random/boot_id"), boot_id);
    fixture.cgroup_place();
    // Copies would know the secret too, so it takes a word to freeze it.
    assert!(matches!(agent.freeze(soon()), Err(AgentError::HoldsSecrets)));
    assert_eq!(prints(&agent, "hostname"), "eight", "the workload goes on");
    let keep_secrets = FreezeOptions { keep_secrets: true, ..FreezeOptions::default() };
    assert!(agent.freeze_with(keep_secrets, soon()).is_ok_and(|frozen| frozen.secrets));
}

#[test]
fn refresh_where_etc_is_read_only_shows_the_new_id_all_the_same() {
    let prepare = "echo template > /etc/machine-id; mount -o remount,ro /etc";
    let fixture = Fixture::start_isolated(prepare);
    let agent = fixture.control();
    let mut seen = Vec::new();
    for generation in 1..=3 {
        agent.refresh(&refresh(generation), soon()).unwrap();
        seen.push(prints(&agent, "cat /etc/machine-id"));
    }
    seen.dedup();
    assert!(seen.len() == 3 && seen.iter().all(|id| id.len() == 32), "{seen:?}");
    // The mounts of the first are used again.
    assert_eq!(prints(&agent, "grep -c machine-id /proc/self/mounts"), "1");
}

#[test]
fn workload_frozen_stands_still_and_goes_on_after_a_thaw() {
    let fixture = Fixture::start();
    fixture.cgroup_place();
    let control = fixture.control();
    let mut process = ticking(&control);
    let frozen = control.freeze(soon()).unwrap();
    assert!(frozen.execs == 1 && !frozen.secrets, "{frozen:?}");
    assert!(control.info().unwrap().frozen);
    assert!(stands_still(&mut process));
    // Whatever is started now would never run.
    let refused = fixture.agent().exec(&ExecRequest::argv(["true"]));
    let Err(ExecError::Agent(AgentError::Refused(refusal))) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(refusal.code, Code::Frozen);
    control.thaw(soon()).unwrap();
    assert!(ticks(&mut process, soon()));
    assert!(control.exec(&ExecRequest::argv(["true"])).unwrap().status.success());
    // What is frozen can still be killed.
    control.freeze(soon()).unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
    control.thaw(soon()).unwrap();
}

#[test]
fn refresh_that_fails_at_a_step_names_it_and_leaves_the_workload_frozen() {
    let fixture = Fixture::start_isolated("true");
    fixture.cgroup_place();
    let agent = fixture.control();
    let mut process = ticking(&agent);
    agent.freeze(soon()).unwrap();
    let missing = Interface { name: "eth7".into(), ..Interface::default() };
    let failed = agent.refresh(&refresh(1).without_ids().interface(&missing), soon());
    match failed {
        Err(AgentError::NotRefreshed { step: RefreshStep::Addresses, why }) => {
            assert!(why.contains("eth7"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert!(stands_still(&mut process));
    assert!(agent.exec(&ExecRequest::argv(["true"])).is_err());
    assert_eq!(agent.info().unwrap().generation, 0, "no step was taken after the failed one");
    // A better request, of the same client, is all it takes.
    agent.refresh(&refresh(1).without_ids(), soon()).unwrap();
    assert!(ticks(&mut process, soon()));
}

#[test]
fn refresh_without_fresh_random_numbers_stops_even_a_workload_that_ran() {
    let drop = "set -- setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin \"$@\"";
    let fixture = Fixture::start_isolated(drop);
    fixture.cgroup_place();
    let agent = fixture.control();
    let mut process = ticking(&agent);
    let failed = agent.refresh(&refresh(1), soon());
    assert!(
        matches!(failed, Err(AgentError::NotRefreshed { step: RefreshStep::Entropy, .. })),
        "{failed:?}"
    );
    assert!(stands_still(&mut process));
}

#[test]
fn refresh_feeds_the_kernel_s_generator_and_has_it_reseed() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let trace = format!("set -- strace -D -f -e ioctl -o {} \"$@\"", log.path().display());
    let fixture = Fixture::start_isolated(&trace);
    fixture.control().refresh(&refresh(1).without_ids(), soon()).unwrap();
    let calls = std::fs::read_to_string(log.path()).unwrap();
    for name in ["RNDADDENTROPY", "RNDRESEEDCRNG"] {
        let done = |line: &str| line.contains(name) && line.ends_with("= 0");
        assert!(calls.lines().any(done), "{name}: {calls}");
    }
}

#[test]
fn refresh_of_a_frozen_copy_ends_the_connections_of_its_former_life() {
    let fixture = Fixture::start_isolated("true");
    fixture.cgroup_place();
    let old = fixture.agent();
    let process = ticking(&old);
    fixture.control().freeze(soon()).unwrap();
    let new = fixture.control();
    new.refresh(&refresh(1).without_ids(), soon()).unwrap();
    let lost = process.wait();
    assert!(matches!(lost, Err(ExecError::Agent(AgentError::Lost(_)))), "{lost:?}");
    wait_for("the end of what the old client ran", || new.info().unwrap().execs == 0);
    assert_eq!(new.info().unwrap().connections, 1);
    // A running guest that is merely told something new keeps its connections.
    let other = fixture.agent();
    new.refresh(&refresh(2).without_ids(), soon()).unwrap();
    assert!(other.info().is_ok());
}

#[test]
fn control_requests_on_the_ordinary_port_are_refused() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let refusals = [
        agent.freeze(soon()).map(drop),
        agent.thaw(soon()),
        agent.refresh(&refresh(1), soon()).map(drop),
    ];
    for refused in refusals {
        let Err(AgentError::Refused(refusal)) = refused else { panic!("{refused:?}") };
        assert_eq!(refusal.code, Code::Unsupported);
    }
    assert_eq!(agent.info().unwrap().generation, 0);
}

#[test]
fn freeze_without_control_groups_is_refused() {
    let fixture = Fixture::start_without_cgroups();
    let refused = fixture.control().freeze(soon());
    let Err(AgentError::Refused(refusal)) = refused else { panic!("{refused:?}") };
    assert_eq!(refusal.code, Code::Unsupported);
}

#[test]
fn refresh_is_quick() {
    let fixture = Fixture::start_isolated("touch /etc/machine-id");
    let agent = fixture.control();
    agent.refresh(&refresh(1).hostname("a"), soon()).unwrap();
    let mut best = Duration::MAX;
    for generation in 2..20 {
        let wish = refresh(generation).hostname("b");
        let begun = Instant::now();
        agent.refresh(&wish, soon()).unwrap();
        best = best.min(begun.elapsed());
    }
    assert!(best < Duration::from_millis(20), "{best:?}");
    println!("the quickest refresh took {best:?}");
}
