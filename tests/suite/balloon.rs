//! The balloon: memory that a guest gives back becomes free on the host.

use std::time::{Duration, Instant};

use pvmm::{Balloon, BalloonStats};
use pvmm_tests::guest::Guest;

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

fn guest_with(balloon: Balloon) -> Guest {
    Guest::boot_with(|config| {
        config.memory_mib = 320;
        config.balloon = Some(balloon);
    })
}

/// Returns the memory of this process, and so of the guest in it, on the host, in MiB.
fn pss_mib() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup.lines().find(|line| line.starts_with("Pss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// Makes the guest use `mib` MiB and free them. Returns the memory that the host still provides, in
/// MiB.
fn use_and_free(guest: &Guest, mib: u64) -> u64 {
    assert_eq!(
        guest.prints(&format!("python3 -c 'print(len(b\"x\" * ({mib} << 20)))'")),
        (mib << 20).to_string()
    );
    pss_mib()
}

fn stats(guest: &Guest) -> BalloonStats {
    guest.vm.balloon_stats(PATIENCE).unwrap()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn balloon_inflated_and_hinted_shrinks_the_host_and_deflates_before_the_guest_runs_out() {
    let guest =
        guest_with(Balloon { deflate_on_oom: true, free_page_hinting: true, ..Balloon::default() });

    let full = use_and_free(&guest, 120);
    let released = guest.vm.hint_free_pages(PATIENCE).unwrap();
    let hinted = pss_mib();
    println!("balloon: {} MiB hinted, PSS {full} -> {hinted} MiB", released / MIB);
    assert!(released > 120 * MIB && hinted + 60 < full, "{released} {full} {hinted}");

    let full = use_and_free(&guest, 120);
    let start = Instant::now();
    guest.vm.set_balloon(160).unwrap();
    until("the balloon inflates", || stats(&guest).actual_bytes == 160 * MIB);
    let inflated = pss_mib();
    println!("balloon: 160 MiB inflated in {:?}, PSS {full} -> {inflated} MiB", start.elapsed());
    assert!(inflated + 60 < full, "{full} {inflated}");
    let said = stats(&guest);
    assert_eq!((said.target_bytes, said.actual_bytes), (160 * MIB, 160 * MIB));
    assert!(said.total.unwrap() > 200 * MIB && said.free.unwrap() < 160 * MIB, "{said:?}");

    // The process needs more memory than is left, so the balloon deflates.
    use_and_free(&guest, 150);
    until("the balloon gave way", || stats(&guest).actual_bytes < 160 * MIB);

    guest.vm.set_balloon(0).unwrap();
    until("the balloon deflates", || stats(&guest).actual_bytes == 0);
    use_and_free(&guest, 150);
    assert!(guest.vm.set_balloon(321).is_err());
}

#[test]
fn free_pages_reported_by_the_guest_shrink_the_host() {
    let guest = guest_with(Balloon { free_page_reporting: true, ..Balloon::default() });
    // Compared with the time before: the guest reports two seconds after it has freed the pages,
    // which on a busy host may be before this thread runs again.
    let before = pss_mib();
    let full = use_and_free(&guest, 150);
    let start = Instant::now();
    until("free pages are reported", || pss_mib() < before + 70);
    println!("balloon: reported, PSS {full} -> {} MiB in {:?}", pss_mib(), start.elapsed());
    // Memory that was given back can be used again.
    use_and_free(&guest, 150);
}

#[test]
fn balloon_of_a_run_is_asked_for_memory_and_gives_it_back() {
    let user = pvmm_tests::cli::User::new();
    let vm = user.detached(&["--memory", "320M", "--balloon"]);
    let asked = |size: &str| {
        let said = user.pvmm(["balloon", "--json", &vm, size]);
        assert_eq!(said.code, Some(0), "{said:?}");
    };
    let given = || {
        let said = user.pvmm(["balloon", "--json", &vm]);
        let size: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
        size["actual_bytes"].as_u64().unwrap()
    };
    asked("100M");
    until("the balloon inflates", || given() == 100 * MIB);
    assert!(user.pvmm(["balloon", &vm]).text().contains("100"));
    asked("0");
    until("the balloon deflates", || given() == 0);
    assert_eq!(user.pvmm(["balloon", &vm, "2G"]).code, Some(2));
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));

    // Without a balloon, the error names the flag that adds one.
    let plain = user.detached(&[]);
    let said = user.pvmm(["balloon", &plain]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stderr.contains("--balloon"), "{said:?}");
    assert_eq!(user.pvmm(["kill", &plain]).code, Some(0));
}
