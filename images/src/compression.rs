//! Reads a stream that may be compressed; its first bytes say how.
//!
//! In one file, because archives come from files, from clients and from guests, and none of them
//! says reliably what it is.

use std::io::{self, BufRead, BufReader, Cursor, Read};

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Compressions that are recognised in order to be refused by name.
const UNKNOWN: [(&[u8], &str); 2] = [(b"\xfd7zXZ", "xz"), (b"BZh", "bzip2")];
const HEAD: u64 = 6;
const BUFFER: usize = 64 << 10;

/// Returns the decompressed stream: gzip and zstd by their magic numbers, anything else as it is.
pub fn open<'a>(mut stream: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut head = Vec::new();
    stream.by_ref().take(HEAD).read_to_end(&mut head)?;
    if let Some((_, name)) = UNKNOWN.iter().find(|(magic, _)| head.starts_with(magic)) {
        let text = format!("it is compressed with {name}: only gzip, zstd and plain are known");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let (gzip, zstd) = (head.starts_with(&GZIP), head.starts_with(&ZSTD));
    let stream = BufReader::with_capacity(BUFFER, Cursor::new(head).chain(stream));
    Ok(match (gzip, zstd) {
        (true, _) => Box::new(MultiGzDecoder::new(stream)),
        (_, true) => Box::new(Zstd { state: Some(State::Between(stream)) }),
        _ => Box::new(stream),
    })
}

/// All frames of a zstd stream, one after another.
struct Zstd<R: BufRead> {
    state: Option<State<R>>,
}

enum State<R: BufRead> {
    Between(R),
    Within(Box<StreamingDecoder<R, ruzstd::decoding::FrameDecoder>>),
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.state.take() {
                None => return Ok(0),
                Some(State::Between(mut stream)) => {
                    if stream.fill_buf()?.is_empty() {
                        return Ok(0);
                    }
                    let decoder = StreamingDecoder::new(stream).map_err(io::Error::other)?;
                    self.state = Some(State::Within(Box::new(decoder)));
                }
                Some(State::Within(mut decoder)) => match decoder.read(buffer)? {
                    0 if !buffer.is_empty() => {
                        self.state = Some(State::Between(decoder.into_inner()));
                    }
                    count => {
                        self.state = Some(State::Within(decoder));
                        return Ok(count);
                    }
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> io::Result<String> {
        io::read_to_string(open(bytes)?)
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = flate2::read::GzEncoder::new(text.as_bytes(), Default::default());
        encoder.read_to_end(&mut bytes).unwrap();
        bytes
    }

    fn zstd(text: &str) -> Vec<u8> {
        let level = ruzstd::encoding::CompressionLevel::Uncompressed;
        ruzstd::encoding::compress_to_vec(text.as_bytes(), level)
    }

    #[test]
    fn stream_of_each_kind_gives_its_text() {
        assert_eq!(read(b"plain").unwrap(), "plain");
        assert_eq!(read(b"").unwrap(), "");
        assert_eq!(read(&[gzip("one "), gzip("two")].concat()).unwrap(), "one two");
        assert_eq!(read(&[zstd("one "), zstd("two")].concat()).unwrap(), "one two");
    }

    #[test]
    fn stream_that_is_cut_short_or_unknown_is_refused() {
        let whole = gzip("some text");
        assert!(read(&whole[..whole.len() - 4]).is_err());
        let whole = zstd("some text");
        assert!(read(&whole[..whole.len() - 6]).is_err());
        let error = read(&[0xfd, b'7', b'z', b'X', b'Z', 0, 1]).unwrap_err();
        assert!(error.to_string().contains("xz"), "{error}");
    }
}
