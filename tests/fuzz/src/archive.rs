//! Archives of any entries, unpacked into a folder: whatever they say, nothing beside it changes.
//!
//! Names and links are picked from those that lead somewhere, so that entries meet: a link first,
//! and then a file behind it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pvmm_guest_agent::archive::{MAX_ENTRIES, Unpack, unpack};
use tar::{Builder, EntryType, Header};

use crate::input::Input;

const NAMES: [&str; 14] = [
    "a",
    "a/b",
    "a/b/c",
    "./a/../b",
    "..",
    "../outside/new",
    "/outside",
    "link",
    "link/file",
    "link/new",
    "",
    ".",
    "a//b/",
    "file",
];
const LINKS: [&str; 8] = ["../outside", "../outside/file", "/", "a", ".", "..", "link", "a/b"];

pub fn entries(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let place = tempfile::tempdir().unwrap();
    let (target, outside) = (place.path().join("target"), place.path().join("outside"));
    fs::create_dir(&target).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "mine").unwrap();
    let archive = archive(&mut input);
    let options = Unpack { owners: false, modes: 0o777, max_entries: MAX_ENTRIES };
    let result = unpack(&archive[..], &target, options, &mut |path| {
        assert!(path.starts_with(&target), "left out something elsewhere");
    });
    if let Err(error) = &result {
        // It can be shown, and says where.
        assert!(!error.to_string().is_empty());
    }
    check(place.path(), &outside);
    assert!(
        !fs::read_dir(&target)
            .unwrap()
            .flatten()
            .any(|entry| { entry.file_name().to_string_lossy().starts_with(".pvmm-") })
    );
}

fn check(place: &Path, outside: &Path) {
    assert_eq!(fs::read_dir(place).unwrap().count(), 2, "something was made beside the folder");
    assert_eq!(fs::read_dir(outside).unwrap().count(), 1, "something was made outside");
    let file = outside.join("file");
    assert_eq!(fs::read(&file).unwrap(), b"mine", "something outside was written");
    let facts = fs::metadata(&file).unwrap();
    assert_eq!((facts.nlink(), facts.mode() & 0o111), (1, 0), "something outside was touched");
    assert_eq!(fs::metadata(outside).unwrap().mode() & 0o700, 0o700);
}

fn archive(input: &mut Input) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    let mut count = 0;
    while !input.is_empty() && count < 24 {
        count += 1;
        let kinds = *b"00122555SLKx346gA";
        let kind = kinds[usize::from(input.below(kinds.len() as u8))];
        let mut header = Header::new_gnu();
        let old = header.as_old_mut();
        let name = NAMES[usize::from(input.below(NAMES.len() as u8))];
        old.name[..name.len()].copy_from_slice(name.as_bytes());
        let link = LINKS[usize::from(input.below(LINKS.len() as u8))];
        old.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(EntryType::new(kind));
        header.set_mode(if input.u8() < 128 { 0o755 } else { input.u16().into() });
        let data: Vec<u8> = match kind {
            // A long name, or something like it.
            b'L' | b'K' | b'x' => NAMES[usize::from(input.below(14))].bytes().chain([0]).collect(),
            _ => vec![input.u8(); usize::from(input.u8()) * 5],
        };
        let told = if input.u8() < 230 { data.len() as u64 } else { input.number() };
        header.set_size(told);
        if kind == b'S'
            && let Some(gnu) = header.as_gnu_mut()
        {
            for piece in &mut gnu.sparse {
                piece.set_offset(input.number());
                piece.set_length(input.u8().into());
            }
            gnu.set_real_size(input.number());
            gnu.set_is_extended(input.u8() > 200);
        }
        header.set_cksum();
        builder.append(&header, &data[..]).unwrap();
    }
    let mut bytes = builder.into_inner().unwrap();
    if input.u8() > 200 {
        bytes.truncate(usize::from(input.u16()) % (bytes.len() + 1));
    }
    bytes
}
