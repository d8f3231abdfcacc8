//! Sequences of disk requests, mostly well-formed, against an array of bytes.
//!
//! The disk must answer what the model answers and hold what the model holds; a request that is
//! refused must have changed nothing.

use std::fs::File;
use std::os::unix::fs::FileExt;

use pvmm_devices::virtio::block::{Block, BlockConfig};
use pvmm_devices::virtio::testing::Buffer::{self, Readable, Writable};
use pvmm_devices::virtio::testing::MockDriver;

use crate::input::Input;

const SECTORS: u64 = 32;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

pub fn requests(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut model: Vec<u8> = (0..SECTORS).flat_map(|sector| [sector as u8; 512]).collect();
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&model, 0).unwrap();
    let read_only = input.below(8) == 0;
    let config = BlockConfig::from_file(file.try_clone().unwrap()).read_only(read_only);
    let mut driver = MockDriver::ready(Block::new(config).unwrap());
    let mut steps = 0;
    while !input.is_empty() && steps < 60 {
        steps += 1;
        let request = Request::from(&mut input);
        let expected = request.apply(&mut model, read_only);
        let header = request.header();
        let mut buffers: Vec<Buffer> = header.chunks(request.split).map(Readable).collect();
        let payload_at = buffers.len();
        buffers.extend(request.out.chunks(request.split * 64).map(Readable));
        let answer_at = buffers.len();
        if request.room > 0 {
            buffers.push(Writable(request.room));
        }
        buffers.push(Writable(1));
        assert!(payload_at <= answer_at);
        let (used, contents) = driver.request(0, &buffers);
        let status = contents.last().unwrap()[0];
        let Some(used) = used else { panic!("not served: {request:?}") };
        match expected {
            Ok(bytes) => {
                assert_eq!(status, OK, "{request:?}");
                assert_eq!(used.len as usize, bytes.len() + 1, "{request:?}");
                if !bytes.is_empty() {
                    assert_eq!(contents[answer_at][..bytes.len()], bytes, "{request:?}");
                }
            }
            Err(refused) => {
                assert_eq!((status, used.len), (refused, 0), "{request:?}");
            }
        }
        assert!(!driver.needs_reset(), "{request:?}");
    }
    drop(driver);
    assert!(content(&file) == model, "the disk is not what the model is");
}

#[derive(Debug)]
struct Request {
    kind: u32,
    sector: u64,
    out: Vec<u8>,
    room: u32,
    // Bytes of each piece of the header.
    split: usize,
}

impl Request {
    fn from(input: &mut Input) -> Self {
        let kind = [0, 0, 1, 1, 4, 8, 11, 13][usize::from(input.below(8))];
        let kind = if input.u8() == 255 { input.u32() } else { kind };
        let sector = if input.u8() < 240 { u64::from(input.below(34)) } else { input.number() };
        let split = usize::from(input.below(16)) + 1;
        // Whole sectors but for one time in a few.
        let odd = if input.u8() > 240 { u32::from(input.u8()) } else { 0 };
        let len = u32::from(input.below(6)) * 512 + odd;
        let (mut out, mut room) = (Vec::new(), 0);
        match kind {
            1 => out = vec![input.u8(); len as usize],
            11 | 13 => {
                for _ in 0..input.below(4) {
                    let sector =
                        if input.u8() < 250 { input.below(34).into() } else { input.number() };
                    let count = if input.u8() < 250 { input.below(8).into() } else { input.u32() };
                    let flags = if input.u8() < 220 { 0 } else { u32::from(input.below(4)) };
                    out.extend(sector.to_le_bytes());
                    out.extend(u32::to_le_bytes(count));
                    out.extend(flags.to_le_bytes());
                }
                out.truncate(out.len().saturating_sub(usize::from(input.u8() == 255)));
            }
            8 => room = u32::from(input.below(32)),
            _ => room = len,
        }
        Self { kind, sector, out, room, split }
    }

    fn header(&self) -> Vec<u8> {
        let mut header = u64::from(self.kind).to_le_bytes().to_vec();
        header.extend(self.sector.to_le_bytes());
        header
    }

    /// Returns the answer that the disk should give: bytes, or a status.
    fn apply(&self, model: &mut [u8], read_only: bool) -> Result<Vec<u8>, u8> {
        let place = |len: u64| {
            let end = self.sector.checked_add(len / 512).filter(|end| *end <= SECTORS);
            let whole = len.is_multiple_of(512) && end.is_some();
            let start = self.sector.wrapping_mul(512) as usize;
            if whole { Ok(start..start + len as usize) } else { Err(IOERR) }
        };
        match self.kind {
            0 => Ok(model[place(self.room.into())?].to_vec()),
            1 | 11 | 13 if read_only => Err(IOERR),
            1 => {
                let place = place(self.out.len() as u64)?;
                model[place].copy_from_slice(&self.out);
                Ok(Vec::new())
            }
            4 => Ok(Vec::new()),
            // The id is empty, which is as many zeros as there is room for.
            8 => Ok(vec![0; self.room.min(20) as usize]),
            11 | 13 => self.clear(model),
            _ => Err(UNSUPP),
        }
    }

    fn clear(&self, model: &mut [u8]) -> Result<Vec<u8>, u8> {
        let count = self.out.len() / 16;
        if !self.out.len().is_multiple_of(16) || count == 0 || count > 16 {
            return Err(IOERR);
        }
        let most = if self.kind == 11 { 1 << 21 } else { 1 << 16 };
        let mut places = Vec::new();
        for raw in self.out.chunks(16) {
            let sector = u64::from_le_bytes(raw[..8].try_into().unwrap());
            let count = u32::from_le_bytes(raw[8..12].try_into().unwrap());
            let flags = u32::from_le_bytes(raw[12..].try_into().unwrap());
            if flags > u32::from(self.kind == 13) {
                return Err(UNSUPP);
            }
            let end = sector.checked_add(count.into()).filter(|end| *end <= SECTORS);
            let Some(end) = end.filter(|_| count <= most) else { return Err(IOERR) };
            places.push(sector as usize * 512..end as usize * 512);
        }
        for place in places {
            model[place].fill(0);
        }
        Ok(Vec::new())
    }
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}
