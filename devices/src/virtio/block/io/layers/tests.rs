//! A layered disk compared with a plain array of bytes.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const SIZE: u64 = 64 * BLOCK + 512;

fn file() -> io::Result<File> {
    tempfile::tempfile()
}

fn disk() -> LayeredDisk {
    let image = file().unwrap();
    image.set_len(SIZE).unwrap();
    LayeredDisk::new(image).unwrap()
}

fn write(disk: &LayeredDisk, offset: u64, bytes: &[u8]) {
    let (mut bytes, mut done) = (bytes.to_vec(), 0);
    while done < bytes.len() {
        let rest = VolatileSlice::from(&mut bytes[done..]);
        done += disk.write(&[rest], offset + done as u64).unwrap();
    }
}

fn read(disk: &LayeredDisk) -> Vec<u8> {
    let mut bytes = vec![0xee; SIZE as usize];
    let mut done = 0;
    while done < bytes.len() {
        done += disk.read(&[VolatileSlice::from(&mut bytes[done..])], done as u64).unwrap();
    }
    bytes
}

fn frozen(disk: &LayeredDisk) -> Vec<u8> {
    let to = file().unwrap();
    disk.write_frozen(&to).unwrap();
    let mut bytes = vec![0xee; SIZE as usize];
    to.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn forks_share_what_was_frozen_and_nothing_else() {
    let parent = disk();
    write(&parent, 5, b"before");
    parent.freeze(file).unwrap();
    let child = parent.fork(file().unwrap()).unwrap();
    write(&parent, 5, b"parent");
    write(&child, BLOCK * 3, b"child!");
    assert_eq!(&read(&parent)[5..11], b"parent");
    assert_eq!(&read(&child)[5..11], b"before");
    assert_eq!(read(&parent)[3 * BLOCK as usize], 0);
    assert_eq!(&frozen(&parent)[5..11], b"before");
}

#[test]
fn rewind_goes_back_to_the_freeze_as_often_as_it_is_asked() {
    let disk = disk();
    write(&disk, 0, &[1; 9000]);
    disk.freeze(file).unwrap();
    let (then, bytes) = (disk.fork(file().unwrap()).unwrap(), read(&disk));
    for round in 2..5 {
        write(&disk, 100, &[round; 5000]);
        disk.clear(Clear::Punch, 0, 50).unwrap();
        if round == 3 {
            // The rollback also discards what was frozen meanwhile.
            disk.freeze(file).unwrap();
            write(&disk, 7000, &[round; 500]);
        }
        disk.rewind(&then).unwrap();
        assert_eq!(read(&disk), bytes);
    }
}

#[test]
fn rewind_goes_to_any_freeze_of_any_branch() {
    let disk = disk();
    let mut kept = Vec::new();
    let mut keep = |value: u8| {
        write(&disk, u64::from(value) * 1000, &[value; 3000]);
        disk.freeze(file).unwrap();
        kept.push((disk.fork(file().unwrap()).unwrap(), read(&disk)));
    };
    (1..4).for_each(&mut keep);
    disk.rewind(&kept[0].0).unwrap();
    let mut keep = |value: u8| {
        write(&disk, u64::from(value) * 500, &[value; 2000]);
        disk.freeze(file).unwrap();
        kept.push((disk.fork(file().unwrap()).unwrap(), read(&disk)));
    };
    // So many that layers are merged.
    (4..30).for_each(&mut keep);
    for step in 0..2 * kept.len() {
        let (then, bytes) = &kept[step * 7 % kept.len()];
        write(&disk, 0, &[99; 5000]);
        assert!(disk.can_rewind(then));
        disk.rewind(then).unwrap();
        assert_eq!(read(&disk), *bytes, "step {step}");
    }
}

#[test]
fn frozen_image_under_a_disk_is_never_written() {
    let base = file().unwrap();
    base.write_all_at(&[7; SIZE as usize], 0).unwrap();
    let kept = base.try_clone().unwrap();
    let disk = LayeredDisk::over(base, file().unwrap()).unwrap();
    write(&disk, 1, &[1; 3]);
    write(&disk, SIZE - 512, &[2; 512]);
    disk.clear(Clear::Zero, 4 * BLOCK, 2 * BLOCK).unwrap();
    let mut bytes = vec![0; SIZE as usize];
    kept.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    let seen = read(&disk);
    assert_eq!((seen[0], seen[1], seen[4], seen[4 * BLOCK as usize]), (7, 1, 7, 0));
    assert_eq!(&seen[SIZE as usize - 512..], [2; 512]);
}

#[test]
fn layers_taken_apart_and_put_together_read_the_same() {
    let disk = disk();
    write(&disk, 5, b"one");
    disk.freeze(file).unwrap();
    write(&disk, 9000, b"two");
    disk.freeze(file).unwrap();
    let copy = LayeredDisk::from_frozen(disk.frozen_layers().unwrap(), file().unwrap()).unwrap();
    assert_eq!(read(&copy), read(&disk));
    for (file, _) in disk.frozen_layers().unwrap() {
        assert_eq!(file.write_at(&[1], 0).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
    let upper_only = disk.frozen_layers().unwrap().split_off(1);
    assert!(LayeredDisk::from_frozen(upper_only, file().unwrap()).is_err());
    let mut beyond = disk.frozen_layers().unwrap();
    beyond[1].1 = Some(vec![(0, u64::MAX)]);
    assert!(LayeredDisk::from_frozen(beyond, file().unwrap()).is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, Vec<u8>),
    Clear(u64, u64),
    Freeze,
    Rewind,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let write = (0..SIZE, prop::collection::vec(any::<u8>(), 1..9000))
        .prop_map(|(at, bytes)| Step::Write(at, bytes));
    let clear = (0..SIZE, 1..20_000u64).prop_map(|(at, len)| Step::Clear(at, len));
    let step =
        prop_oneof![4 => write, 2 => clear, 2 => Just(Step::Freeze), 1 => Just(Step::Rewind)];
    prop::collection::vec(step, 1..40)
}

/// Eight words of a map, across the end of one piece.
const MAPPED: Range<u64> = PIECE - 256..PIECE + 256;

proptest! {
    #[test]
    fn map_of_blocks_has_what_was_added_and_nothing_else(
        adds in prop::collection::vec((MAPPED, 0..200u64), 0..8),
    ) {
        let (mut map, mut model) = (BlockMap::default(), BTreeSet::new());
        for (start, len) in adds {
            let blocks = start..(start + len).min(MAPPED.end);
            map.add(blocks.clone());
            model.extend(blocks);
        }
        for block in MAPPED.start - 64..MAPPED.end + 64 {
            prop_assert_eq!(map.has(block), model.contains(&block));
        }
        // The last block may be incomplete.
        let size = MAPPED.end * BLOCK - 512;
        let ranges = map.ranges(size);
        prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        prop_assert!(ranges.iter().all(|range| range.end <= size));
        let blocks = ranges.iter().flat_map(|r| r.start / BLOCK..r.end.div_ceil(BLOCK));
        prop_assert!(blocks.eq(model.iter().copied()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn layers_read_like_a_plain_array(steps in steps()) {
        let disk = disk();
        let mut model = vec![0; SIZE as usize];
        let mut kept: Option<(LayeredDisk, Vec<u8>)> = None;
        for step in steps {
            match step {
                Step::Write(at, mut bytes) => {
                    bytes.truncate((SIZE - at) as usize);
                    write(&disk, at, &bytes);
                    model[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
                }
                Step::Clear(at, len) => {
                    disk.clear(Clear::Punch, at, len).unwrap();
                    model[at as usize..(at + len).min(SIZE) as usize].fill(0);
                }
                Step::Freeze => {
                    disk.freeze(file).unwrap();
                    kept = Some((disk.fork(file().unwrap()).unwrap(), model.clone()));
                    prop_assert_eq!(&frozen(&disk), &model);
                }
                Step::Rewind => if let Some((then, bytes)) = &kept {
                    disk.rewind(then).unwrap();
                    model.clone_from(bytes);
                },
            }
            prop_assert_eq!(&read(&disk), &model);
        }
    }
}
