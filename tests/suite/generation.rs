//! The generation identifier: a guest that gets a new one reseeds its random generator.

use std::time::{Duration, Instant};

use pvmm_images::{Kernel, Silent};
use pvmm_tests::guest::{self, Guest};

const DRIVER: &str = "ls /sys/bus/*/drivers/vmgenid/ | grep -c PVMM0001";
const RESEEDS: &str = "dmesg | grep -c 'crng reseeded due to virtual machine fork' || true";

fn hears_of_each_new_generation(guest: &Guest) {
    assert_eq!(guest.prints(DRIVER), "1");
    assert_eq!(guest.prints(RESEEDS), "0");
    for times in ["1", "2"] {
        guest.vm.renew_generation().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while guest.prints(RESEEDS) != times {
            assert!(Instant::now() < deadline, "no reseed after new generation {times}");
        }
    }
}

#[test]
fn renewed_generation_reseeds_our_kernel() {
    hears_of_each_new_generation(&Guest::boot());
}

#[test]
fn renewed_generation_reseeds_the_stock_debian_kernel() {
    let kernel = Kernel::debian(&guest::cache(), &mut Silent).unwrap();
    hears_of_each_new_generation(&Guest::boot_kernel(&kernel, |_| {}));
}
