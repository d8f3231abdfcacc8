//! Loads kernel, initrd, command line and boot information into guest memory.
//!
//! A kernel has two entry points: PVH, which an ELF image announces by a note, and the 64-bit Linux
//! boot protocol, which every image has. Image files belong to the caller and are still untrusted:
//! anything that does not fit into memory is refused.

use std::fs::File;
use std::io::{self, Seek};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult};
use pvmm_devices::{GuestMemory, open};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::layout;
use super::regs::EntryPoint;
use crate::config::{BootProtocol, Initrd, KernelSource};
use crate::error::{Error, ErrorKind};

const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
const BZIMAGE_MAGIC: [u8; 4] = *b"HdrS";
const BZIMAGE_MAGIC_AT: u64 = 0x202;
/// The offset of a bzImage's 64-bit entry point from its load address.
const BZIMAGE_ENTRY_64: u64 = 0x200;
const PVH_MAGIC: u32 = 0x336e_c578;
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
const LOADER_UNDEFINED: u8 = 0xff;
const KERNEL_ALIGNMENT: u32 = 0x100_0000;

/// Reasons why a kernel could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("kernel: cannot open {path}")]
    Open { path: PathBuf, source: io::Error },
    #[error("kernel: {path} is not a regular file; give an ELF vmlinux or a bzImage")]
    NotAFile { path: PathBuf },
    #[error("kernel: {path} is neither an ELF vmlinux nor a bzImage")]
    Format { path: PathBuf },
    #[error("kernel: {path} does not load; it may be cut short or need more memory")]
    Load { path: PathBuf, source: linux_loader::loader::Error },
    #[error("kernel: {path} has no PVH entry; use the 64-bit protocol")]
    NoPvh { path: PathBuf },
    #[error("kernel: a bzImage has no PVH entry; use the 64-bit protocol")]
    BzImagePvh,
    #[error("kernel: it ends at {end:#x}, outside the {memory:#x} bytes of low memory")]
    Outside { end: u64, memory: u64 },
    #[error("initrd: cannot read {path}")]
    Initrd { path: PathBuf, source: io::Error },
    #[error("initrd: {len} bytes do not fit beside the kernel; give the machine more memory")]
    InitrdTooBig { len: u64 },
    #[error("cmdline: {len} bytes with the devices are more than {max}", max = crate::config::MAX_CMDLINE)]
    Cmdline { len: usize },
    #[error("boot information does not fit into memory")]
    BootInfo(#[source] linux_loader::configurator::Error),
    #[error("guest memory cannot be written")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

impl From<KernelError> for Error {
    fn from(error: KernelError) -> Self {
        Self::new(ErrorKind::InvalidConfig, "cannot load the guest", error)
    }
}

/// Everything that is loaded before the first instruction.
pub struct Image<'a> {
    pub kernel: &'a KernelSource,
    pub initrd: Option<&'a Initrd>,
    pub cmdline: &'a str,
    pub protocol: BootProtocol,
    pub memory_mib: u64,
    pub rsdp: GuestAddress,
}

/// Loads `image` and returns its entry point.
pub fn load(image: &Image<'_>, memory: &GuestMemory) -> Result<EntryPoint, KernelError> {
    let (loaded, entry) = load_kernel(image, memory)?;
    let low_memory = low_memory_end(memory);
    if loaded.kernel_end > low_memory {
        return Err(KernelError::Outside { end: loaded.kernel_end, memory: low_memory });
    }
    let initrd = match image.initrd {
        Some(initrd) => Some(load_initrd(initrd, loaded.kernel_end, memory)?),
        None => None,
    };
    load_cmdline(image.cmdline, memory)?;
    match entry {
        EntryPoint::Pvh(_) => write_pvh_info(image, initrd, memory)?,
        EntryPoint::Linux64(_) => write_zero_page(image, &loaded, initrd, memory)?,
    }
    Ok(entry)
}

fn load_kernel(
    image: &Image<'_>,
    memory: &GuestMemory,
) -> Result<(KernelLoaderResult, EntryPoint), KernelError> {
    let (mut file, path) = match image.kernel {
        KernelSource::Path(path) => {
            let opened = open::file(path, open::Access::Read);
            let file = opened.map_err(|source| match source.kind() {
                io::ErrorKind::InvalidInput => KernelError::NotAFile { path: path.clone() },
                _ => KernelError::Open { path: path.clone(), source },
            })?;
            (file, path.clone())
        }
        KernelSource::File(file) => {
            let path = PathBuf::from("(passed open)");
            let cloned = file.try_clone();
            (cloned.map_err(|source| KernelError::Open { path: path.clone(), source })?, path)
        }
    };
    let path = || path.clone();
    let high = Some(layout::HIGH_MEMORY);
    let failed = |source| KernelError::Load { path: path(), source };
    if magic_at(&file, 0) == Some(ELF_MAGIC) {
        let loaded = Elf::load(memory, None, &mut file, high).map_err(failed)?;
        let entry = match (image.protocol, loaded.pvh_boot_cap) {
            (BootProtocol::Linux64, _) => EntryPoint::Linux64(loaded.kernel_load),
            (_, PvhBootCapability::PvhEntryPresent(entry)) => EntryPoint::Pvh(entry),
            (BootProtocol::Pvh, _) => return Err(KernelError::NoPvh { path: path() }),
            (BootProtocol::Auto, _) => EntryPoint::Linux64(loaded.kernel_load),
        };
        Ok((loaded, entry))
    } else if magic_at(&file, BZIMAGE_MAGIC_AT) == Some(BZIMAGE_MAGIC) {
        if image.protocol == BootProtocol::Pvh {
            return Err(KernelError::BzImagePvh);
        }
        let mut loaded = BzImage::load(memory, None, &mut file, high).map_err(failed)?;
        // While it decompresses itself, the kernel uses as much memory as its header says.
        if let Some(header) = loaded.setup_header {
            let needs = header.pref_address.saturating_add(u64::from(header.init_size));
            loaded.kernel_end = loaded.kernel_end.max(needs);
        }
        let entry = EntryPoint::Linux64(GuestAddress(loaded.kernel_load.0 + BZIMAGE_ENTRY_64));
        Ok((loaded, entry))
    } else {
        Err(KernelError::Format { path: path() })
    }
}

fn magic_at(file: &File, offset: u64) -> Option<[u8; 4]> {
    let mut magic = [0; 4];
    file.read_exact_at(&mut magic, offset).ok().map(|()| magic)
}

fn low_memory_end(memory: &GuestMemory) -> u64 {
    memory.iter().next().map_or(0, |region| region.last_addr().0 + 1)
}

/// Copies the initrd to the top of low memory, page-aligned, and returns its address and length.
fn load_initrd(
    initrd: &Initrd,
    kernel_end: u64,
    memory: &GuestMemory,
) -> Result<(GuestAddress, u64), KernelError> {
    match initrd {
        Initrd::Bytes(bytes) => {
            let len = bytes.len() as u64;
            let address = initrd_address(len, kernel_end, memory)?;
            memory.write_slice(bytes, address).map_err(KernelError::Memory)?;
            Ok((address, len))
        }
        Initrd::Path(path) => {
            let failed = |source| KernelError::Initrd { path: path.clone(), source };
            let mut file = open::image(path, open::Access::Read).map_err(failed)?;
            let len = file.seek(io::SeekFrom::End(0)).map_err(failed)?;
            let address = initrd_address(len, kernel_end, memory)?;
            file.rewind().map_err(failed)?;
            // The file may change its size meanwhile; the measured length is read.
            memory
                .read_exact_volatile_from(address, &mut file, len as usize)
                .map_err(|error| failed(io::Error::other(error)))?;
            Ok((address, len))
        }
    }
}

fn initrd_address(
    len: u64,
    kernel_end: u64,
    memory: &GuestMemory,
) -> Result<GuestAddress, KernelError> {
    let address = low_memory_end(memory).checked_sub(len).map(|address| address & !0xfff);
    match address {
        Some(address) if address >= kernel_end => Ok(GuestAddress(address)),
        _ => Err(KernelError::InitrdTooBig { len }),
    }
}

fn load_cmdline(cmdline: &str, memory: &GuestMemory) -> Result<(), KernelError> {
    if cmdline.len() >= crate::config::MAX_CMDLINE {
        return Err(KernelError::Cmdline { len: cmdline.len() });
    }
    let end = GuestAddress(layout::CMDLINE.0 + cmdline.len() as u64);
    memory.write_slice(cmdline.as_bytes(), layout::CMDLINE).map_err(KernelError::Memory)?;
    memory.write_obj(0u8, end).map_err(KernelError::Memory)
}

fn write_pvh_info(
    image: &Image<'_>,
    initrd: Option<(GuestAddress, u64)>,
    memory: &GuestMemory,
) -> Result<(), KernelError> {
    let map: Vec<_> = layout::memory_map(image.memory_mib)
        .into_iter()
        .map(|(addr, size, kind)| hvm_memmap_table_entry {
            addr,
            size,
            type_: kind as u32,
            reserved: 0,
        })
        .collect();
    let mut info = hvm_start_info {
        magic: PVH_MAGIC,
        version: 1,
        cmdline_paddr: layout::CMDLINE.0,
        rsdp_paddr: image.rsdp.0,
        memmap_paddr: layout::PVH_MEMORY_MAP.0,
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    let module = initrd.map(|(address, size)| hvm_modlist_entry {
        paddr: address.0,
        size,
        ..Default::default()
    });
    if module.is_some() {
        info.nr_modules = 1;
        info.modlist_paddr = layout::PVH_MODULES.0;
    }
    let mut params = BootParams::new(&info, layout::PVH_START_INFO);
    params.set_sections(&map, layout::PVH_MEMORY_MAP);
    if let Some(module) = module {
        params.set_modules(&[module], layout::PVH_MODULES);
    }
    PvhBootConfigurator::write_bootparams(&params, memory).map_err(KernelError::BootInfo)
}

fn write_zero_page(
    image: &Image<'_>,
    loaded: &KernelLoaderResult,
    initrd: Option<(GuestAddress, u64)>,
    memory: &GuestMemory,
) -> Result<(), KernelError> {
    let mut page = boot_params::default();
    match loaded.setup_header {
        Some(header) => page.hdr = header,
        None => {
            page.hdr.boot_flag = BOOT_FLAG;
            page.hdr.header = HEADER_MAGIC;
            page.hdr.kernel_alignment = KERNEL_ALIGNMENT;
        }
    }
    page.hdr.type_of_loader = LOADER_UNDEFINED;
    page.hdr.cmd_line_ptr = layout::CMDLINE.0 as u32;
    page.hdr.cmdline_size = image.cmdline.len() as u32;
    if let Some((address, size)) = initrd {
        // Both values fit: the initrd lies below the hole.
        page.hdr.ramdisk_image = address.0 as u32;
        page.hdr.ramdisk_size = size as u32;
    }
    page.acpi_rsdp_addr = image.rsdp.0;
    for (index, (addr, size, kind)) in layout::memory_map(image.memory_mib).into_iter().enumerate()
    {
        page.e820_table[index] = boot_e820_entry { addr, size, r#type: kind as u32 };
        page.e820_entries = index as u8 + 1;
    }
    let params = BootParams::new(&page, layout::ZERO_PAGE);
    LinuxBootConfigurator::write_bootparams(&params, memory).map_err(KernelError::BootInfo)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&layout::ram(32)).unwrap()
    }

    fn refused(content: &[u8]) -> KernelError {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        let image = Image {
            kernel: &file.path().into(),
            initrd: None,
            cmdline: "",
            protocol: BootProtocol::Auto,
            memory_mib: 32,
            rsdp: layout::ACPI,
        };
        load(&image, &memory()).unwrap_err()
    }

    /// Builds an ELF header with one program header: enough to be taken for a kernel.
    fn elf(entry: u64, at: u64, in_file: u64, in_memory: u64) -> Vec<u8> {
        let mut image = vec![0; 120];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(24, &entry.to_le_bytes());
        put(32, &64u64.to_le_bytes());
        put(54, &56u16.to_le_bytes());
        put(56, &1u16.to_le_bytes());
        put(64, &1u32.to_le_bytes());
        put(88, &at.to_le_bytes());
        put(96, &in_file.to_le_bytes());
        put(104, &in_memory.to_le_bytes());
        image
    }

    #[test]
    fn j4_empty_or_text_file_is_refused_as_no_kernel() {
        assert!(matches!(refused(b""), KernelError::Format { .. }));
        assert!(matches!(refused(b"hello, this is a text file\n"), KernelError::Format { .. }));
    }

    #[test]
    fn j1_program_headers_past_the_end_are_refused() {
        let mut image = elf(0x10_0000, 0x10_0000, 64, 64);
        image[56..58].copy_from_slice(&u16::MAX.to_le_bytes());
        assert!(matches!(refused(&image), KernelError::Load { .. }));
        assert!(matches!(refused(&image[..70]), KernelError::Load { .. }));
    }

    #[test]
    fn j2_segments_outside_memory_are_refused() {
        assert!(matches!(refused(&elf(0x10_0000, 1 << 40, 64, 64)), KernelError::Load { .. }));
        let bss_too_big = elf(0x10_0000, 0x10_0000, 64, 1 << 30);
        assert!(matches!(refused(&bss_too_big), KernelError::Outside { .. }));
    }

    #[test]
    fn j3_bzimage_with_odd_header_is_refused() {
        let mut image = vec![0; 0x400];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        assert!(matches!(refused(&image), KernelError::Load { .. }));
    }

    #[test]
    fn j6_initrd_larger_than_memory_is_refused() {
        let initrd = Initrd::Bytes(vec![0; 33 << 20]);
        let error = load_initrd(&initrd, 0x10_0000, &memory()).unwrap_err();
        assert!(matches!(error, KernelError::InitrdTooBig { .. }));
        let overlapping = Initrd::Bytes(vec![0; 8 << 20]);
        assert!(load_initrd(&overlapping, 30 << 20, &memory()).is_err());
    }

    #[test]
    fn directory_or_missing_kernel_is_refused_by_name() {
        let mut image = Image {
            kernel: &"/".into(),
            initrd: None,
            cmdline: "",
            protocol: BootProtocol::Auto,
            memory_mib: 32,
            rsdp: layout::ACPI,
        };
        assert!(matches!(load(&image, &memory()), Err(KernelError::NotAFile { .. })));
        let missing = "/no/such/kernel".into();
        image.kernel = &missing;
        assert!(matches!(load(&image, &memory()), Err(KernelError::Open { .. })));
    }
}
