//! Reads the JSON of Firecracker's custom CPU templates.
//!
//! The text may come from a client that is not trusted, and a template that was read by half would
//! offer a guest more than its author meant. So each field is looked at by name: an unknown one, a
//! wrong type or a bit that does not exist is refused with the place of the field.

use serde_json::{Map, Value};

use super::modifiers::MAX_MODIFIERS;
use super::{Bitmap, CpuError, CpuModifiers, CpuidModifier, CpuidRegister, MsrModifier};

/// The longest text of a CPU template, in bytes.
pub const TEMPLATE_FILE_MAX: usize = 256 << 10;
/// The longest number or bitmap that is looked at, separators included.
const MAX_TEXT: usize = 256;

type Object = Map<String, Value>;

impl CpuModifiers {
    /// Reads a CPU template in Firecracker's JSON.
    ///
    /// Fails if the text is longer than [`TEMPLATE_FILE_MAX`], if there are more than 256 modifiers
    /// of a kind, or if a field is not known or cannot be read; the error names the field.
    pub fn from_json(text: &[u8]) -> Result<Self, CpuError> {
        if text.len() > TEMPLATE_FILE_MAX {
            return Err(refuse("CPU template", "longer than 256 KiB"));
        }
        let value: Value = serde_json::from_slice(text)
            .map_err(|error| refuse("CPU template", &format!("not JSON: {error}")))?;
        Self::from_value(&value)
    }

    /// Reads a CPU template that is a value of a larger JSON text.
    pub fn from_value(value: &Value) -> Result<Self, CpuError> {
        const FIELDS: [&str; 3] = ["kvm_capabilities", "cpuid_modifiers", "msr_modifiers"];
        let template = object(value, "CPU template")?;
        for name in ["vcpu_features", "reg_modifiers"] {
            if template.contains_key(name) {
                return Err(refuse(name, "is for aarch64; leave it out"));
            }
        }
        only(template, &FIELDS, "")?;
        let mut modifiers = Self::default();
        for (at, value) in list(template, "kvm_capabilities", "")? {
            modifiers.capabilities.extend(capability(value, &at)?);
        }
        for (at, value) in list(template, "cpuid_modifiers", "")? {
            cpuid_modifiers(value, &at, &mut modifiers.cpuid)?;
        }
        for (at, value) in list(template, "msr_modifiers", "")? {
            let modifier = object(value, &at)?;
            only(modifier, &["addr", "bitmap"], &at)?;
            let address = number(modifier, "addr", &at)?;
            let Bitmap { clear, set } = bitmap(modifier, &at, u64::BITS)?;
            if modifiers.msrs.iter().any(|known| known.address == address) {
                return Err(refuse(&format!("{at}.addr"), "is modified twice"));
            }
            modifiers.msrs.push(MsrModifier { address, bitmap: Bitmap { clear, set } });
        }
        Ok(modifiers)
    }
}

/// Adds the modifiers of one leaf.
fn cpuid_modifiers(value: &Value, at: &str, to: &mut Vec<CpuidModifier>) -> Result<(), CpuError> {
    let entry = object(value, at)?;
    only(entry, &["leaf", "subleaf", "flags", "modifiers"], at)?;
    let (leaf, subleaf) = (number(entry, "leaf", at)?, number(entry, "subleaf", at)?);
    // KVM's own flags of the leaf stay: others would change which leaf a guest reads.
    let flags = entry.get("flags").and_then(Value::as_u64);
    if flags.is_none_or(|flags| flags > u32::MAX.into()) {
        return Err(refuse(&format!("{at}.flags"), "must be a number, such as 0 or 1"));
    }
    if !entry.contains_key("modifiers") {
        return Err(refuse(&format!("{at}.modifiers"), "is missing"));
    }
    for (at, value) in list(entry, "modifiers", &format!("{at}."))? {
        let modifier = object(value, &at)?;
        only(modifier, &["register", "bitmap"], &at)?;
        let register = match text(modifier, "register", &at)? {
            "eax" => CpuidRegister::Eax,
            "ebx" => CpuidRegister::Ebx,
            "ecx" => CpuidRegister::Ecx,
            "edx" => CpuidRegister::Edx,
            _ => return Err(refuse(&format!("{at}.register"), "must be eax, ebx, ecx or edx")),
        };
        let Bitmap { clear, set } = bitmap(modifier, &at, u32::BITS)?;
        let same = |known: &&CpuidModifier| {
            (known.leaf, known.subleaf, known.register) == (leaf, subleaf, register)
        };
        if to.iter().find(same).is_some() {
            return Err(refuse(&format!("{at}.register"), "is modified twice"));
        }
        if to.len() >= MAX_MODIFIERS {
            return Err(refuse("cpuid_modifiers", "more than 256 registers"));
        }
        // A bitmap of 32 bits has no others.
        let bitmap = Bitmap { clear: clear as u32, set: set as u32 };
        to.push(CpuidModifier { leaf, subleaf, register, bitmap });
    }
    Ok(())
}

/// Reads a capability that KVM must have; `None` for one whose check is removed, since pvmm checks
/// for nothing that it can do without.
fn capability(value: &Value, at: &str) -> Result<Option<u32>, CpuError> {
    let text = value.as_str().unwrap_or_default();
    let (removed, digits) = match text.strip_prefix('!') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    // Longer digits would not be a number of 32 bits; `parse` also accepts a sign.
    let parsed = digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()));
    match parsed {
        None => Err(refuse(at, "must be the number of a capability as text, such as \"171\"")),
        Some(_) if removed => Ok(None),
        Some(number) => Ok(Some(number)),
    }
}

/// Reads the field `bitmap`: 0 clears a bit, 1 sets it, x keeps it, the last character is bit 0.
/// Bits that are left out at the beginning are kept.
fn bitmap(object: &Object, at: &str, width: u32) -> Result<Bitmap<u64>, CpuError> {
    let text = text(object, "bitmap", at)?;
    let refused = |why: &str| Err(refuse(&format!("{at}.bitmap"), why));
    let mut bitmap = Bitmap::<u64>::default();
    let mut bit = 0;
    for character in text.strip_prefix("0b").unwrap_or(text).bytes().rev() {
        if character == b'_' {
            continue;
        }
        if bit >= width {
            return refused(&format!("has more than {width} bits"));
        }
        match character {
            b'x' => {}
            b'0' => bitmap.clear |= 1 << bit,
            b'1' => bitmap.set |= 1 << bit,
            _ => return refused("may only have the characters 0, 1, x and _ after 0b"),
        }
        bit += 1;
    }
    if bit == 0 { refused("has no bits") } else { Ok(bitmap) }
}

/// Reads a field with a number as text: hexadecimal after 0x, binary after 0b, otherwise decimal.
fn number(object: &Object, name: &str, at: &str) -> Result<u32, CpuError> {
    let text = text(object, name, at)?;
    let (radix, digits) = match (text.strip_prefix("0x"), text.strip_prefix("0b")) {
        (Some(digits), _) => (16, digits),
        (_, Some(digits)) => (2, digits),
        _ => (10, text),
    };
    let plain = digits.bytes().all(|byte| byte.is_ascii_alphanumeric());
    u32::from_str_radix(digits, radix).ok().filter(|_| plain).ok_or_else(|| {
        refuse(&format!("{at}.{name}"), "must be a number of 32 bits as text, such as \"0x7\"")
    })
}

fn text<'a>(object: &'a Object, name: &str, at: &str) -> Result<&'a str, CpuError> {
    let place = || format!("{at}.{name}");
    let value = object.get(name).ok_or_else(|| refuse(&place(), "is missing"))?;
    let text = value.as_str().filter(|text| text.len() <= MAX_TEXT);
    text.ok_or_else(|| refuse(&place(), "must be a text of at most 256 characters"))
}

/// Returns the elements of a list, each with its place; none if the list is left out.
fn list<'a>(
    object: &'a Object,
    name: &str,
    prefix: &str,
) -> Result<Vec<(String, &'a Value)>, CpuError> {
    let place = format!("{prefix}{name}");
    let items = match object.get(name) {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(refuse(&place, "must be a list")),
    };
    if items.len() > MAX_MODIFIERS {
        return Err(refuse(&place, "has more than 256 elements"));
    }
    Ok(items.iter().enumerate().map(|(at, item)| (format!("{place}[{at}]"), item)).collect())
}

fn object<'a>(value: &'a Value, at: &str) -> Result<&'a Object, CpuError> {
    value.as_object().ok_or_else(|| refuse(at, "must be an object"))
}

/// Refuses fields of an object that are not known.
fn only(object: &Object, known: &[&str], at: &str) -> Result<(), CpuError> {
    match object.keys().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let name: String = name.chars().take(40).collect();
            let dot = if at.is_empty() { "" } else { "." };
            let why = format!("is not known; the fields are {}", known.join(", "));
            Err(refuse(&format!("{at}{dot}{name}"), &why))
        }
    }
}

fn refuse(field: &str, why: &str) -> CpuError {
    CpuError::Field { field: field.to_owned(), why: why.to_owned() }
}
