//! No fork is handed out with the identity of another VM, neither by the library nor by the API.

use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError, FreezeOptions, Refresh};
use pvmm::{ErrorKind, Overrides, Vsock};
use pvmm_tests::firecracker::Firecracker;
use pvmm_tests::guest::Guest;
use serde_json::{Value, json};
use tempfile::TempDir;

/// An endless loop.
const LOOPS: [u8; 2] = [0xeb, 0xfe];
const IDS: &str = "cat /etc/machine-id /proc/sys/kernel/random/boot_id";
const GENERATION: &str = "cat /run/pvmm/generation";

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn own_socket(dir: &TempDir) -> Overrides {
    Overrides { vsock: Some(Vsock::new(3, dir.path().join("v"))), ..Default::default() }
}

#[test]
fn copy_that_is_refreshed_is_another_and_one_without_an_agent_is_an_error() {
    let mut guest = Guest::boot();
    let control = Agent::connect_control(&guest.socket(), soon()).unwrap();
    control.freeze(soon()).unwrap();
    let template = guest.vm.freeze().unwrap();
    control.thaw(soon()).unwrap();
    let dir = TempDir::new().unwrap();
    let forked = template.fork(own_socket(&dir)).unwrap();
    let (_vm, agent) = forked.refreshed(&Refresh::new(1).unwrap(), soon()).unwrap();
    assert_ne!(pvmm_tests::child::prints(&agent, IDS), guest.prints(IDS));

    let tiny = pvmm_tests::tiny::machine(&LOOPS).freeze().unwrap();
    let forked = tiny.fork(Overrides::default()).unwrap();
    let error = forked.refreshed(&Refresh::new(1).unwrap(), soon()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error:#}");
}

#[test]
fn guest_that_was_given_a_secret_is_frozen_only_by_who_says_so() {
    let guest = Guest::boot();
    let told = Refresh::new(0).unwrap().without_ids().secret("key", "hush");
    let agent = Agent::connect_refreshed(&guest.socket(), &told, soon()).unwrap();
    assert!(matches!(agent.freeze(soon()), Err(AgentError::HoldsSecrets)));
    // A refusal leaves the workload running.
    assert_eq!(pvmm_tests::child::prints(&agent, "cat /run/pvmm/secrets/key"), "hush");
    let options = FreezeOptions { keep_secrets: true, ..Default::default() };
    assert!(agent.freeze_with(options, soon()).unwrap().secrets);
    agent.thaw(soon()).unwrap();
}

/// Starts a VM of two bytes, whose agent never answers.
fn without_agent() -> (Firecracker, tempfile::NamedTempFile) {
    let (vm, kernel) = (Firecracker::new(), pvmm_tests::tiny::kernel(&LOOPS));
    vm.put("/boot-source", json!({"kernel_image_path": kernel.path()}));
    vm.put("/vsock", json!({"guest_cid": 3, "uds_path": vm.vsock()}));
    vm.put("/actions", json!({"action_type": "InstanceStart"}));
    (vm, kernel)
}

#[test]
fn fork_by_the_api_without_an_agents_answer_is_refused_unless_no_refresh_is_asked_for() {
    let (vm, _kernel) = without_agent();
    let socket = vm.dir().join("fork");
    let why = vm.refused("PUT", "/pvmm/fork", json!({"socket": socket}));
    assert!(why.contains(r#""refresh": "none""#), "{why}");
    assert!(!socket.exists());
    assert_eq!(vm.get("/")["state"], "Running");

    let offer = json!({"socket": socket, "children": 2, "refresh": "none"});
    assert_eq!(vm.ask("PUT", "/pvmm/fork", &offer).status, 200);
    let load = |child: &Firecracker, refresh: Value| {
        let load = json!({"socket": socket, "resume_vm": true, "refresh": refresh,
                          "vsock_override": {"uds_path": child.vsock()}});
        child.ask("PUT", "/pvmm/fork/load", &load)
    };
    let (one, other) = (Firecracker::new(), Firecracker::new());
    assert_eq!(load(&one, json!("none")).status, 204);
    assert_eq!(one.get("/")["state"], "Running");
    assert_eq!(load(&other, json!(null)).status, 400);
}

#[test]
fn rollback_by_the_api_without_an_agents_answer_leaves_the_machine_paused() {
    let (vm, _kernel) = without_agent();
    let why = vm.refused("PUT", "/pvmm/checkpoint", Value::Null);
    assert!(why.contains(r#""refresh": "none""#), "{why}");
    vm.put("/pvmm/checkpoint", json!({"refresh": "none"}));
    let why = vm.refused("PUT", "/pvmm/rollback", Value::Null);
    assert!(why.contains("paused"), "{why}");
    assert_eq!(vm.get("/")["state"], "Paused");
    // The refresh is still due, so a resume is refused too.
    vm.refused("PATCH", "/vm", json!({"state": "Resumed"}));
    assert_eq!(vm.get("/")["state"], "Paused");
    vm.put("/pvmm/rollback", json!({"refresh": "none"}));
    vm.patch("/vm", json!({"state": "Resumed"}));
    assert_eq!(vm.get("/")["state"], "Running");
}

#[test]
fn machine_that_is_paused_is_not_forked_and_is_refreshed_when_it_goes_on_after_a_rollback() {
    let vm = Firecracker::new();
    vm.describe();
    vm.start();
    let ids = vm.prints(IDS);
    vm.put("/pvmm/checkpoint", Value::Null);
    vm.put("/pvmm/rollback", Value::Null);
    assert_eq!(vm.prints(GENERATION), "2");
    vm.patch("/vm", json!({"state": "Paused"}));
    let socket = vm.dir().join("fork");
    let why = vm.refused("PUT", "/pvmm/fork", json!({"socket": socket}));
    assert!(why.contains("paused"), "{why}");
    vm.put("/pvmm/rollback", Value::Null);
    vm.patch("/vm", json!({"state": "Resumed"}));
    assert_eq!(vm.prints(GENERATION), "3");
    // A rollback keeps the identity.
    assert_eq!(vm.prints(IDS), ids);
}
