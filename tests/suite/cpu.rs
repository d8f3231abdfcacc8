//! CPU baselines with a real guest: what it sees of its processor, and what comes back of it.

use pvmm_tests::cli::User;
use pvmm_tests::firecracker::{Firecracker, prints};
use serde_json::json;

/// Prints how many processors have each of some features, one word for each feature.
const COUNT: &str = "for f in sse4_2 avx avx2 rdrand; do grep -cw $f /proc/cpuinfo; done | xargs";

/// Checks that this host has a feature, which a guest without a baseline then has too.
fn host_has(feature: &str) {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    assert!(text.split_whitespace().any(|word| word == feature), "this host lacks {feature}");
}

#[test]
fn guest_of_a_level_sees_no_avx_on_any_vcpu_and_its_snapshot_restores() {
    host_has("avx2");
    let user = User::new();
    let vm = user.detached(&["--cpu", "x86-64-v2", "--cpus", "2"]);
    let seen = |vm: &str| user.pvmm(["exec", vm, "--", "sh", "-c", COUNT]).text().to_owned();
    assert_eq!(seen(&vm), "2 0 0 0");
    let python = |vm: &str| user.pvmm(["exec", vm, "--", "python3", "-c", "print(6*7)"]);
    assert_eq!(python(&vm).text(), "42");
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("snap");
    let path = folder.to_str().unwrap();
    user.ok(&["snapshot", &vm, path]);
    let manifest = std::fs::read_to_string(folder.join("manifest.json")).unwrap();
    assert!(manifest.contains(r#""cpu_baseline": "x86-64-v2""#), "{manifest}");
    user.ok(&["restore", path, "--name", "back"]);
    assert_eq!((seen("back").as_str(), python("back").text()), ("2 0 0 0", "42"));
    user.ok(&["kill", "--signal", "KILL", &vm, "back"]);
}

#[test]
fn feature_that_cpu_config_masks_is_gone_in_the_guest() {
    host_has("rdrand");
    let vm = Firecracker::new();
    let modifiers =
        json!([{"register": "ecx", "bitmap": "0bx0xx_xxxx_xxxx_xxxx_xxxx_xxxx_xxxx_xxxx"}]);
    let leaf = json!({"leaf": "0x1", "subleaf": "0x0", "flags": 0, "modifiers": modifiers});
    vm.put("/cpu-config", json!({"cpuid_modifiers": [leaf]}));
    let refused = vm.refused("PUT", "/cpu-config", json!({"cpuid_modifiers": [{"leaf": "x"}]}));
    assert!(refused.contains("cpuid_modifiers[0].leaf"), "{refused}");
    vm.describe();
    let agent = vm.start();
    assert_eq!(
        prints(&agent, "grep -cw rdrand /proc/cpuinfo; grep -cw sse4_2 /proc/cpuinfo"),
        "0\n1"
    );
}
