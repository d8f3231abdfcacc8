//! ACPI tables, from which the kernel learns of processors, interrupts and devices.
//!
//! The machine is hardware-reduced ACPI: no PIC, no PIT, no PM timer, no SCI. It has the local
//! APICs, one I/O APIC, two registers to sleep and to reset, and a DSDT that lists a serial port,
//! the generation identifier and the virtio-mmio devices.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Arg, Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed, Method, Name,
};
use acpi_tables::aml::{Notify, Package, Path, ResourceTemplate, Scope};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use pvmm_devices::GuestMemory;
use pvmm_devices::legacy::power;
use vm_memory::{Bytes, GuestAddress};

use super::layout;
use crate::error::{Error, ErrorKind};

const OEM: [u8; 6] = *b"PVMM  ";
const OEM_TABLE: [u8; 8] = *b"PVMMTABL";
const REVISION: u32 = 1;
const DSDT_HEADER: u32 = 36;
const DSDT_REVISION: u8 = 6;
/// The boot flags of the FADT. The machine has no VGA and no CMOS clock to probe for; the wall
/// clock is kvm-clock's.
const KEYBOARD_CONTROLLER: u16 = 1 << 1;
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_RTC: u16 = 1 << 5;

/// The notification value for the driver of the generation identifier.
const GENERATION_CHANGED: u8 = 0x80;

/// A virtio-mmio device on the bus.
#[derive(Clone, Copy, Debug)]
pub struct MmioDevice {
    pub address: u64,
    pub gsi: u32,
}

/// Reasons why the tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum TablesError {
    #[error("ACPI tables of {0} bytes do not fit into their range")]
    TooBig(u64),
    #[error("guest memory cannot be written")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

impl From<TablesError> for Error {
    fn from(error: TablesError) -> Self {
        Self::new(ErrorKind::Bug, "cannot write the machine's tables", error)
    }
}

/// Writes all tables and returns the address of the RSDP.
pub fn write(
    vcpus: u32,
    devices: &[MmioDevice],
    keyboard: bool,
    memory: &GuestMemory,
) -> Result<GuestAddress, TablesError> {
    let mut area = Area { memory, next: layout::ACPI.0 + Rsdp::len() as u64 };
    let dsdt = area.place(&dsdt(devices, keyboard))?;
    let fadt = area.place(&fadt(dsdt, keyboard))?;
    let madt = area.place(&madt(vcpus))?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = area.place(&xsdt)?;
    area.next = layout::ACPI.0;
    area.place(&Rsdp::new(OEM, xsdt))?;
    Ok(layout::ACPI)
}

/// The range that tables are written to, one after another.
struct Area<'a> {
    memory: &'a GuestMemory,
    next: u64,
}

impl Area<'_> {
    fn place(&mut self, table: &dyn Aml) -> Result<u64, TablesError> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        // Linux maps tables at any address; alignment only keeps dumps readable.
        let address = self.next.next_multiple_of(16);
        self.next = address + bytes.len() as u64;
        if self.next > layout::ACPI_END {
            return Err(TablesError::TooBig(self.next - layout::ACPI.0));
        }
        self.memory.write_slice(&bytes, GuestAddress(address)).map_err(TablesError::Memory)?;
        Ok(address)
    }
}

fn fadt(dsdt: u64, keyboard: bool) -> impl Aml {
    let port =
        |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    let controller = if keyboard { KEYBOARD_CONTROLLER } else { 0 };
    fadt.iapc_boot_arch = (NO_VGA | NO_CMOS_RTC | controller).into();
    fadt.reset_reg = port(layout::POWER_PORT + power::RESET as u16);
    fadt.reset_value = power::RESET_VALUE;
    fadt.sleep_control_reg = port(layout::POWER_PORT + power::SLEEP_CONTROL as u16);
    fadt.sleep_status_reg = port(layout::POWER_PORT + power::SLEEP_STATUS as u16);
    fadt.finalize()
}

fn madt(vcpus: u32) -> impl Aml {
    let apic = LocalInterruptController::Address(layout::LOCAL_APIC as u32);
    let mut madt = MADT::new(OEM, OEM_TABLE, REVISION, apic);
    for id in 0..vcpus as u8 {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IOAPIC as u32, 0));
    madt
}

fn dsdt(devices: &[MmioDevice], keyboard: bool) -> Sdt {
    let mut aml = Vec::new();
    // The value of the sleep register for "off".
    let (off, zero) = (power::SLEEP_TYPE_S5, 0u8);
    Name::new("_S5_".into(), &Package::new(vec![&off, &zero, &zero, &zero])).to_aml_bytes(&mut aml);
    serial(&mut aml);
    if keyboard {
        keyboard_controller(&mut aml);
    }
    generation(&mut aml);
    for (index, device) in devices.iter().enumerate() {
        virtio(index, device, &mut aml);
    }
    let mut table = Sdt::new(*b"DSDT", DSDT_HEADER, DSDT_REVISION, OEM, OEM_TABLE, REVISION);
    table.append_slice(&aml);
    table
}

fn serial(aml: &mut Vec<u8>) {
    let port = layout::SERIAL_PORT;
    let resources = ResourceTemplate::new(vec![
        &edge(layout::SERIAL_GSI) as &dyn Aml,
        &IO::new(port, port, 1, 8),
    ])
    .bytes();
    device("COM1", &EISAName::new("PNP0501"), 0, &Raw(resources), aml);
}

fn keyboard_controller(aml: &mut Vec<u8>) {
    let (data, command) = (layout::I8042_PORT, layout::I8042_PORT + 4);
    let resources = ResourceTemplate::new(vec![
        &edge(layout::KEYBOARD_GSI) as &dyn Aml,
        &IO::new(data, data, 1, 1),
        &IO::new(command, command, 1, 1),
    ])
    .bytes();
    device("PS2K", &EISAName::new("PNP0303"), 0, &Raw(resources), aml);
}

/// Describes the generation identifier, and the event that notifies its driver of a change.
fn generation(aml: &mut Vec<u8>) {
    let address = layout::GENERATION.0;
    let (low, high) = (address as u32, (address >> 32) as u32);
    let resources = ResourceTemplate::new(vec![&edge(layout::GENERATION_GSI) as &dyn Aml]).bytes();
    Scope::new(
        Path::new("_SB_"),
        vec![
            &Device::new(
                "VGEN".into(),
                vec![
                    &Name::new("_HID".into(), &"PVMM0001"),
                    &Name::new("_CID".into(), &"VM_Gen_Counter"),
                    &Name::new("_DDN".into(), &"VM_Gen_Counter"),
                    &Name::new("ADDR".into(), &Package::new(vec![&low, &high])),
                ],
            ),
            // Without an SCI, interrupts become events of this device (ACPI 6.5 section 5.6.9).
            &Device::new(
                "GED_".into(),
                vec![
                    &Name::new("_HID".into(), &"ACPI0013"),
                    &Name::new("_UID".into(), &0u8),
                    &Name::new("_CRS".into(), &Raw(resources)),
                    &Method::new(
                        "_EVT".into(),
                        1,
                        true,
                        vec![&If::new(
                            &Equal::new(&Arg(0), &layout::GENERATION_GSI),
                            vec![&Notify::new(&Path::new("VGEN"), &GENERATION_CHANGED)],
                        )],
                    ),
                ],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

fn virtio(index: usize, mmio: &MmioDevice, aml: &mut Vec<u8>) {
    let resources = ResourceTemplate::new(vec![
        &Memory32Fixed::new(true, mmio.address as u32, layout::VIRTIO_MMIO_SIZE as u32) as &dyn Aml,
        &edge(mmio.gsi),
    ])
    .bytes();
    device(&format!("VR{index:02}"), &"LNRO0005", index as u32, &Raw(resources), aml);
}

fn device(name: &str, hid: &dyn Aml, uid: u32, resources: &dyn Aml, aml: &mut Vec<u8>) {
    Scope::new(
        Path::new("_SB_"),
        vec![&Device::new(
            name.into(),
            vec![
                &Name::new("_HID".into(), hid),
                &Name::new("_UID".into(), &uid),
                // Devices access guest memory only through coherent rings.
                &Name::new("_CCA".into(), &1u8),
                &Name::new("_CRS".into(), resources),
            ],
        )],
    )
    .to_aml_bytes(aml);
}

fn edge(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

/// AML that is already encoded.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

trait Encoded {
    fn bytes(&self) -> Vec<u8>;
}

impl<T: Aml> Encoded for T {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.to_aml_bytes(&mut bytes);
        bytes
    }
}
