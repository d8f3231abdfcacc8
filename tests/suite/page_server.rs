//! Guest memory from a page server while the guest runs, and the end of the page server.

use std::time::{Duration, Instant};

use pvmm::agent::{Agent, Refresh};
use pvmm::exec::ExecRequest;
use pvmm::snapshot::{LoadOptions, WriteOptions};
use pvmm::{ErrorKind, Kvm, Outcome, Overrides, Template, Vsock};
use pvmm_tests::child::{Child, SOON};
use pvmm_tests::guest::Guest;
use pvmm_tests::page_server::PageServer;
use tempfile::TempDir;

#[test]
fn guest_served_by_a_page_server_runs_and_ends_with_it() {
    let place = TempDir::new().unwrap();
    let dir = place.path().join("snap");
    let mut guest = Guest::boot();
    guest.prints("echo served > /tmp/word");
    guest.vm.freeze().unwrap().write(&dir, WriteOptions::default()).unwrap();
    drop(guest);
    let memory = dir.join("memory.bin");
    let elsewhere = LoadOptions { without_memory: true, ..Default::default() };
    let template = Template::load(&Kvm::open().unwrap(), &dir, elsewhere).unwrap();

    // Without a page server, or with one that cannot be reached, the fork is refused with the
    // reason.
    let own_socket =
        || Overrides { vsock: Some(Vsock::new(3, place.path().join("v"))), ..Default::default() };
    let error = template.fork(own_socket()).err().unwrap();
    assert!(error.kind() == ErrorKind::InvalidConfig, "{error:#}");
    assert!(format!("{error:#}").contains("page server"), "{error:#}");
    let nowhere = Overrides { page_server: Some(place.path().join("none")), ..own_socket() };
    let error = template.fork(nowhere).err().unwrap();
    assert!(format!("{error:#}").contains("cannot reach the page server"), "{error:#}");

    let mut server = PageServer::start(&memory);
    let mut child = Child::with(&template, |o| o.page_server = Some(server.socket()));
    assert_eq!(child.prints("cat /tmp/word"), "served");
    let pages = server.served();
    assert!((100..40_000).contains(&pages), "{pages} pages");
    let error = child.vm.freeze().err().unwrap();
    assert!(format!("{error:#}").contains("page server"), "{error:#}");

    // The page server ends while the guest needs it.
    let agent = child.agent.clone();
    let busy = std::thread::spawn(move || {
        agent.exec(&ExecRequest::shell("md5sum /usr/bin/* >/dev/null").timeout(SOON))
    });
    std::thread::sleep(Duration::from_millis(200));
    server.end();
    assert_eq!(child.vm.wait(Some(SOON)), Some(Outcome::MemoryLost));
    let begun = Instant::now();
    assert!(child.vm.pause().is_err());
    drop(child);
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
    assert!(busy.join().unwrap().is_err());

    // The page server ends before it has served a page.
    let mut server = PageServer::start(&memory);
    let socket = server.socket();
    let ends = std::thread::spawn(move || server.end());
    match template.fork(Overrides { page_server: Some(socket), ..own_socket() }) {
        Err(error) => assert!(format!("{error:#}").contains("page server"), "{error:#}"),
        Ok(forked) => {
            let vm = forked.without_refresh();
            assert_eq!(vm.wait(Some(SOON)), Some(Outcome::MemoryLost));
        }
    }
    ends.join().unwrap();
    let refresh = Refresh::new(1).unwrap();
    let late = Instant::now() + Duration::from_millis(100);
    assert!(Agent::connect_refreshed(&place.path().join("v"), &refresh, late).is_err());
}
