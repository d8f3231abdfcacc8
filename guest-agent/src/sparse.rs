//! Segments: a file's data and holes, one after another, so that a sparse file stays sparse.
//!
//! Each end checks every length that it receives from the other before it uses it.

/// The length of a segment's head: its kind and its length field.
pub const SEGMENT_HEAD: usize = 9;
/// The longest file that the kernel supports.
pub const MAX_FILE: u64 = i64::MAX as u64;

/// A range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// This many bytes follow.
    Data(u64),
    /// This many bytes are a hole: zeros that take no space.
    Hole(u64),
}

impl Segment {
    pub fn len(self) -> u64 {
        match self {
            Self::Data(len) | Self::Hole(len) => len,
        }
    }

    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    pub fn head(self) -> [u8; SEGMENT_HEAD] {
        let mut head = [0; SEGMENT_HEAD];
        head[0] = u8::from(matches!(self, Self::Hole(_)));
        head[1..].copy_from_slice(&self.len().to_le_bytes());
        head
    }

    fn parse(head: [u8; SEGMENT_HEAD]) -> Option<Self> {
        let [kind, a, b, c, d, e, f, g, h] = head;
        let len = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        match kind {
            _ if len == 0 || len > MAX_FILE => None,
            0 => Some(Self::Data(len)),
            1 => Some(Self::Hole(len)),
            _ => None,
        }
    }
}

/// The next decoded data or hole.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    Data(&'a [u8]),
    Hole(u64),
}

/// The segments are malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed segments")]
pub struct SegmentError;

/// Decodes segments from chunks of any size.
#[derive(Debug, Default)]
pub struct SegmentDecoder {
    head: Vec<u8>,
    data_left: u64,
    total: u64,
}

impl SegmentDecoder {
    /// Decodes the next piece of `bytes` and advances `bytes` behind it; returns `None` when all
    /// are used.
    pub fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<Piece<'a>>, SegmentError> {
        while !bytes.is_empty() {
            if self.data_left > 0 {
                let count = self.data_left.min(bytes.len() as u64) as usize;
                let (data, rest) = bytes.split_at(count);
                self.data_left -= count as u64;
                *bytes = rest;
                return Ok(Some(Piece::Data(data)));
            }
            let count = (SEGMENT_HEAD - self.head.len()).min(bytes.len());
            let (head, rest) = bytes.split_at(count);
            self.head.extend_from_slice(head);
            *bytes = rest;
            let Some(head) = self.head.first_chunk::<SEGMENT_HEAD>() else { return Ok(None) };
            let segment = Segment::parse(*head).ok_or(SegmentError)?;
            self.head.clear();
            self.total = self.total.checked_add(segment.len()).ok_or(SegmentError)?;
            if self.total > MAX_FILE {
                return Err(SegmentError);
            }
            match segment {
                Segment::Data(len) => self.data_left = len,
                Segment::Hole(len) => return Ok(Some(Piece::Hole(len))),
            }
        }
        Ok(None)
    }

    /// Returns the length of the file; fails if a segment is incomplete.
    pub fn finish(&self) -> Result<u64, SegmentError> {
        if self.data_left > 0 || !self.head.is_empty() { Err(SegmentError) } else { Ok(self.total) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8], step: usize) -> Result<(Vec<u8>, u64), SegmentError> {
        let (mut decoder, mut file) = (SegmentDecoder::default(), Vec::new());
        for mut chunk in bytes.chunks(step) {
            while let Some(piece) = decoder.next(&mut chunk)? {
                match piece {
                    Piece::Data(data) => file.extend_from_slice(data),
                    Piece::Hole(len) => file.resize(file.len() + len as usize, 0),
                }
            }
        }
        decoder.finish().map(|total| (file, total))
    }

    #[test]
    fn segments_cut_anywhere_give_the_same_file() {
        let bytes = [
            &Segment::Hole(3).head()[..],
            &Segment::Data(2).head(),
            b"ab",
            &Segment::Data(1).head(),
            b"c",
            &Segment::Hole(1).head(),
        ]
        .concat();
        for step in 1..bytes.len() {
            assert_eq!(decode(&bytes, step).unwrap(), (b"\0\0\0abc\0".to_vec(), 7), "{step}");
        }
        for end in 1..bytes.len() {
            let whole = [9, 20, 30, bytes.len()].contains(&end);
            assert_eq!(decode(&bytes[..end], 4).is_ok(), whole, "{end}");
        }
    }

    #[test]
    fn segment_that_is_empty_endless_or_unknown_is_refused() {
        for head in [[0; 9], [1, 0, 0, 0, 0, 0, 0, 0, 0x80], [2, 1, 0, 0, 0, 0, 0, 0, 0]] {
            assert!(decode(&head, 9).is_err(), "{head:?}");
        }
        let twice = [Segment::Hole(MAX_FILE).head(), Segment::Hole(1).head()].concat();
        let (mut decoder, mut bytes) = (SegmentDecoder::default(), &twice[..]);
        assert_eq!(decoder.next(&mut bytes), Ok(Some(Piece::Hole(MAX_FILE))));
        assert!(decoder.next(&mut bytes).is_err());
    }
}
