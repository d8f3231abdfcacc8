//! The outcomes of a VM: each way in which it can end has its own.

use std::time::{Duration, Instant};

use pvmm::{Outcome, Vm};
use pvmm_tests::tiny;

const OUT_0X64: [u8; 4] = [0xb0, 0xfe, 0xe6, 0x64]; // mov al, 0xfe; out 0x64, al
const CLI_HLT: [u8; 2] = [0xfa, 0xf4];
const SPIN: [u8; 2] = [0xeb, 0xfe]; // jmp self

#[test]
fn b13_write_to_the_sleep_register_is_poweroff() {
    // mov dx, 0x600; mov al, 5 << 2 | 1 << 5; out dx, al
    let code = [0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe];
    assert_eq!(tiny::run(&code), Outcome::Poweroff);
}

#[test]
fn b13_pulse_of_the_keyboard_controller_is_reboot() {
    assert_eq!(tiny::run(&[&OUT_0X64[..], &SPIN].concat()), Outcome::Reboot);
}

#[test]
fn b13_fault_without_handlers_is_a_triple_fault() {
    assert_eq!(tiny::run(&[0xcc]), Outcome::TripleFault); // int3
}

#[test]
fn jump_into_a_device_is_an_internal_error() {
    // mov eax, 0xc0000000; jmp rax
    let outcome = tiny::run(&[0xb8, 0x00, 0x00, 0x00, 0xc0, 0xff, 0xe0]);
    assert!(matches!(outcome, Outcome::InternalError { .. }), "{outcome:?}");
}

#[test]
fn b12_unmapped_port_and_address_read_all_ones_and_are_counted() {
    // in al, 0x99; inc al; jnz spin
    let mut code = vec![0xe4, 0x99, 0xfe, 0xc0, 0x75, 0x0f];
    // mov eax, 0xc0000000; mov ebx, [rax]; inc ebx; jnz spin
    code.extend([0xb8, 0x00, 0x00, 0x00, 0xc0, 0x8b, 0x18, 0xff, 0xc3, 0x75, 0x04]);
    code.extend(OUT_0X64);
    code.extend(SPIN);
    let mut vm = tiny::machine(&code);
    vm.resume().unwrap();
    assert_eq!(vm.wait(Some(tiny::PATIENCE)), Some(Outcome::Reboot));
    assert_eq!(vm.missed_accesses(), 2);
}

#[test]
fn b13_guest_halted_for_good_is_stopped_by_its_owner() {
    ends_when_dropped(tiny::machine(&CLI_HLT));
}

#[test]
fn guest_that_never_exits_is_stopped_by_its_owner() {
    ends_when_dropped(tiny::machine(&SPIN));
}

#[test]
fn pause_of_a_spinning_guest_stops_it_and_resume_goes_on() {
    let mut vm = tiny::machine(&SPIN);
    for _ in 0..20 {
        vm.resume().unwrap();
        vm.pause().unwrap();
    }
    ends_when_dropped(vm);
}

fn ends_when_dropped(mut vm: Vm) {
    vm.resume().unwrap();
    assert_eq!(vm.wait(Some(Duration::from_millis(300))), None);
    let start = Instant::now();
    drop(vm);
    assert!(start.elapsed() < Duration::from_secs(5));
}
