//! Single bits of CPUID leaves and MSRs that are cleared or set for a guest.
//!
//! This is the meaning of Firecracker's CPU templates, whether they come from a file or by name, so
//! they are all one type.

use kvm_bindings::kvm_cpuid_entry2;
use serde::{Deserialize, Serialize};

use super::{
    CpuBaseline, CpuError, EXTENDED_FEATURES, EXTENDED_STATE, FEATURES, Registers,
    STRUCTURED_FEATURES, leaf, own, registers, set_registers,
};

/// The most modifiers of each kind.
pub(super) const MAX_MODIFIERS: usize = 256;

/// Bits of a value that are cleared or set; the others stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bitmap<T> {
    /// The bits that become 0.
    pub clear: T,
    /// The bits that become 1.
    pub set: T,
}

impl Bitmap<u32> {
    fn applied_to(self, value: u32) -> u32 {
        value & !self.clear | self.set
    }
}

impl Bitmap<u64> {
    /// Returns `value` with the bits cleared and set.
    pub(crate) fn applied_to(self, value: u64) -> u64 {
        value & !self.clear | self.set
    }
}

/// A register of the CPUID instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // each variant is its register
pub enum CpuidRegister {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

/// A change of one register of a CPUID leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuidModifier {
    /// The leaf, which KVM must have.
    pub leaf: u32,
    /// The sub-leaf; 0 in leaves without any.
    pub subleaf: u32,
    /// The register.
    pub register: CpuidRegister,
    /// The bits.
    pub bitmap: Bitmap<u32>,
}

/// A change of a model-specific register before the guest's first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsrModifier {
    /// The number of the register, which must be one that KVM saves and restores.
    pub address: u32,
    /// The bits.
    pub bitmap: Bitmap<u64>,
}

/// Changes of what KVM offers on this host. Bits that pvmm writes for each vCPU, such as the
/// topology, stay as pvmm writes them, and so do features that no guest is offered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuModifiers {
    /// Numbers of capabilities that KVM must have.
    pub capabilities: Vec<u32>,
    /// Changes of CPUID leaves, in order.
    pub cpuid: Vec<CpuidModifier>,
    /// Changes of MSRs.
    pub msrs: Vec<MsrModifier>,
}

impl CpuModifiers {
    /// Returns whether nothing is changed or required.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Applies the changes to the leaves that KVM supports. Fails if a leaf is not there, or if a
    /// bit is set that stands for instructions which the host lacks.
    pub(super) fn apply(&self, entries: &mut [kvm_cpuid_entry2]) -> Result<(), CpuError> {
        for modifier in &self.cpuid {
            let CpuidModifier { leaf: function, subleaf, register, bitmap } = *modifier;
            let here = leaf(entries, function, subleaf)[register as usize];
            let lacking = bitmap.set & !here & instructions(function, subleaf)[register as usize];
            if lacking != 0 {
                let register = format!("{register:?}").to_lowercase();
                let bit = lacking.trailing_zeros();
                return Err(CpuError::Missing {
                    baseline: CpuBaseline::CUSTOM,
                    feature: format!("cpuid {function:#x}.{subleaf:#x} {register} bit {bit}"),
                });
            }
            let found = entries
                .iter_mut()
                .find(|entry| entry.function == function && entry.index == subleaf);
            let Some(entry) = found else { return Err(CpuError::Leaf { leaf: function, subleaf }) };
            let mut values = registers(entry);
            values[register as usize] = bitmap.applied_to(here);
            set_registers(entry, values);
        }
        Ok(())
    }

    /// Clears in saved leaves the bits that [`Self::apply`] has cleared and that no later step of a
    /// boot writes.
    pub(super) fn clear(&self, saved: &mut [kvm_cpuid_entry2]) {
        for entry in saved {
            let (cleared, own) = (
                self.bits(entry.function, entry.index, |bitmap| bitmap.clear),
                own(entry.function, entry.index),
            );
            let mut values = registers(entry);
            for ((value, cleared), own) in values.iter_mut().zip(cleared).zip(own) {
                *value &= !(cleared & !own);
            }
            set_registers(entry, values);
        }
    }

    /// Returns the bits of a leaf that are set and stand for no instruction.
    pub(super) fn asserted(&self, function: u32, index: u32) -> Registers {
        let mut set = self.bits(function, index, |bitmap| bitmap.set);
        for (set, instructions) in set.iter_mut().zip(instructions(function, index)) {
            *set &= !instructions;
        }
        set
    }

    fn bits(&self, function: u32, index: u32, of: impl Fn(Bitmap<u32>) -> u32) -> Registers {
        let mut bits = [0; 4];
        for modifier in &self.cpuid {
            if modifier.leaf == function && modifier.subleaf == index {
                bits[modifier.register as usize] |= of(modifier.bitmap);
            }
        }
        bits
    }

    pub(super) fn check(&self) -> Result<(), &'static str> {
        match self {
            _ if self.capabilities.len() > MAX_MODIFIERS => Err("capabilities"),
            _ if self.cpuid.len() > MAX_MODIFIERS => Err("modifiers of CPUID leaves"),
            _ if self.msrs.len() > MAX_MODIFIERS => Err("modifiers of registers"),
            _ => Ok(()),
        }
    }
}

/// Returns the bits of a leaf that stand for instructions and registers, which a guest uses as soon
/// as it sees them.
fn instructions(function: u32, index: u32) -> Registers {
    let all = match (function, index) {
        (FEATURES | EXTENDED_FEATURES, 0) => [0, 0, u32::MAX, u32::MAX],
        (STRUCTURED_FEATURES, 0) => [0, u32::MAX, u32::MAX, 0],
        (STRUCTURED_FEATURES, 1) => [u32::MAX, 0, 0, u32::MAX],
        (EXTENDED_STATE, 0) => [u32::MAX, 0, 0, u32::MAX],
        (EXTENDED_STATE, 1) => [u32::MAX, 0, u32::MAX, u32::MAX],
        _ => [0; 4],
    };
    let own = own(function, index);
    std::array::from_fn(|at| all[at] & !own[at])
}
