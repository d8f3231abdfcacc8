//! Answers of tools: text that is cut to a size that a model can read, and images.
//!
//! Text that is cut keeps its head and its tail. The whole is put into a file of the sandbox, and
//! the cut says how to read it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pvmm::agent::{Agent, FileWriteOptions, MimeBundle};
use rmcp::model::ContentBlock;

use crate::error::ApiError;
use crate::ids;

/// The most characters of one text.
pub const MAX_TEXT: usize = 30_000;
/// The most bytes of all images of one answer.
pub const MAX_IMAGES: usize = 4 << 20;
/// The directory of the sandbox in which whole outputs are kept.
const KEPT: &str = "/tmp/pvmm-output";

/// Text with a hole, or whole text.
#[derive(Debug, PartialEq, Eq)]
pub struct Cut<'a> {
    /// The first characters.
    pub head: &'a str,
    /// The number of characters that are left out after `head`; 0 for whole text.
    pub left_out: usize,
    /// The last characters; empty for whole text.
    pub tail: &'a str,
}

/// Cuts text to `limit` characters: two thirds from its start, one third from its end.
pub fn cut(text: &str, limit: usize) -> Cut<'_> {
    let count = text.chars().count();
    if count <= limit {
        return Cut { head: text, left_out: 0, tail: "" };
    }
    let (first, last) = (limit - limit / 3, limit / 3);
    let at = |number: usize| text.char_indices().nth(number).map_or(text.len(), |(at, _)| at);
    let (head, tail) = (&text[..at(first)], &text[at(count - last)..]);
    Cut { head, left_out: count - limit, tail }
}

/// Returns output of the guest as text that fits. The whole of a longer one is kept in a file of
/// the guest, which the text names. `lost` is the number of bytes that the host did not keep.
/// Waits.
pub fn fitted(agent: &Agent, bytes: &[u8], lost: u64) -> String {
    let text = String::from_utf8_lossy(bytes);
    let cut = cut(&text, MAX_TEXT);
    if cut.left_out == 0 && lost == 0 {
        return text.into_owned();
    }
    let kept = keep(agent, bytes).unwrap_or_else(|error| {
        format!("the whole could not be kept in the sandbox: {}", error.message)
    });
    let lost = match lost {
        0 => String::new(),
        lost => format!("; {lost} bytes in the middle were dropped"),
    };
    let Cut { head, left_out, tail } = cut;
    format!("{head}\n[... {left_out} characters left out here; {kept}{lost} ...]\n{tail}")
}

/// Keeps an output in a file of the guest and returns how to read it.
fn keep(agent: &Agent, bytes: &[u8]) -> Result<String, ApiError> {
    let id = ids::new_id()?;
    let path = format!("{KEPT}/{}.txt", &id[..8]);
    let options = FileWriteOptions { parents: true, ..FileWriteOptions::default() };
    agent.write_file(&path, bytes, &options)?;
    Ok(format!("read all {} bytes with sandbox_read_file path={path} offset=...", bytes.len()))
}

/// Returns the type of an image that models can see, by its first bytes.
pub fn image_type(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', ..] => Some("image/gif"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some("image/webp"),
        _ => None,
    }
}

/// Returns an image as content.
pub fn image(bytes: &[u8], mime: &str) -> ContentBlock {
    ContentBlock::image(STANDARD.encode(bytes), mime)
}

/// Returns the images of displayed values, and the rest as text. Images beyond the limit are named
/// in the text. An image that only says to be one is left to the text.
pub fn shown<'a>(bundles: impl Iterator<Item = &'a MimeBundle>) -> (Vec<ContentBlock>, String) {
    let (mut images, mut texts, mut total) = (Vec::new(), Vec::new(), 0);
    for bundle in bundles {
        let image = bundle.parts.iter().find_map(|(mime, data)| {
            mime.starts_with("image/").then(|| image_type(data).map(|mime| (mime, data)))?
        });
        match image {
            Some((mime, data)) if total + data.len() <= MAX_IMAGES => {
                total += data.len();
                images.push(self::image(data, mime));
                continue;
            }
            Some((mime, data)) => {
                texts.push(format!(
                    "[an image ({mime}, {} bytes) is left out: images of one answer have at most \
                     4 MiB; save it to a file and read that with sandbox_read_file]",
                    data.len()
                ));
                continue;
            }
            None => {}
        }
        let text = ["text/plain", "text/markdown", "text/html", "image/svg+xml"]
            .iter()
            .find_map(|mime| bundle.text(mime));
        texts.extend(text);
    }
    (images, texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_within_the_limit_is_whole() {
        assert_eq!(cut("héllo", 5), Cut { head: "héllo", left_out: 0, tail: "" });
        assert_eq!(cut("", 5).head, "");
    }

    #[test]
    fn longer_text_keeps_head_and_tail_in_whole_characters() {
        let cut = cut("äöü0123456789ßéè", 9);
        assert_eq!(cut, Cut { head: "äöü012", left_out: 7, tail: "ßéè" });
    }

    fn bundle(parts: &[(&str, &[u8])]) -> MimeBundle {
        let part = |(mime, data): &(&str, &[u8])| ((*mime).to_owned(), data.to_vec());
        MimeBundle { parts: parts.iter().map(part).collect() }
    }

    #[test]
    fn images_are_content_and_the_rest_is_text() {
        let chart = bundle(&[("text/plain", b"<Figure>"), ("image/png", b"\x89PNG....")]);
        let value = bundle(&[("text/plain", b"42"), ("text/html", b"<b>42</b>")]);
        let (images, text) = shown([&chart, &value].into_iter());
        assert_eq!((images.len(), &text[..]), (1, "42"));
    }

    #[test]
    fn image_beyond_the_limit_is_named() {
        let mut data = b"\x89PNG".to_vec();
        data.resize(MAX_IMAGES + 1, 0);
        let (images, text) = shown([&bundle(&[("image/png", &data)])].into_iter());
        assert!(images.is_empty() && text.contains("left out"), "{text}");
    }

    #[test]
    fn image_that_is_none_is_text() {
        let fake = bundle(&[("image/png", b"no"), ("text/plain", b"value")]);
        let (images, text) = shown([&fake].into_iter());
        assert_eq!((images.len(), &text[..]), (0, "value"));
    }
}
