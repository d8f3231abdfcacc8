//! Tracks terminal modes that a guest's program has set, to reset them if the program is
//! interrupted.
//!
//! A program that ends resets them itself. One whose VM is killed would leave the alternate screen,
//! a hidden cursor, bracketed paste and mouse reporting behind.

/// The most modes tracked, and the most in one sequence; more than programs use.
const MODES_MAX: usize = 32;
/// Modes that are on by default: line wrap, and the cursor.
const USUALLY_ON: [u16; 2] = [7, 25];
const ESCAPE: u8 = 0x1b;

/// The terminal's private modes that differ from their defaults.
#[derive(Debug, Default)]
pub struct Screen {
    changed: Vec<u16>,
    keypad: bool,
    coloured: bool,
    within: Within,
}

/// The parser's position within an escape sequence.
#[derive(Debug, Default)]
enum Within {
    #[default]
    Text,
    Escape,
    Sequence,
    /// `ESC [ ?`, and the numbers so far.
    Modes(Vec<u16>),
}

impl Screen {
    /// Parses output that goes to the terminal.
    pub fn note(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            bytes = rest;
            self.within = match (std::mem::take(&mut self.within), byte) {
                (_, ESCAPE) => Within::Escape,
                (Within::Text, _) => {
                    let text = bytes.iter().position(|byte| *byte == ESCAPE);
                    bytes = &bytes[text.unwrap_or(bytes.len())..];
                    Within::Text
                }
                (Within::Escape, b'[') => Within::Sequence,
                (Within::Escape, b'=' | b'>') => {
                    self.keypad = byte == b'=';
                    Within::Text
                }
                (Within::Sequence, b'?') => Within::Modes(vec![0]),
                (Within::Sequence, b'0'..=b'9' | b';') => Within::Sequence,
                (Within::Sequence, b'm') => {
                    self.coloured = true;
                    Within::Text
                }
                (Within::Modes(mut modes), b'0'..=b'9') => {
                    if let Some(last) = modes.last_mut() {
                        *last = last.saturating_mul(10).saturating_add((byte - b'0').into());
                    }
                    Within::Modes(modes)
                }
                (Within::Modes(mut modes), b';') if modes.len() < MODES_MAX => {
                    modes.push(0);
                    Within::Modes(modes)
                }
                (Within::Modes(modes), b'h' | b'l') => {
                    modes.into_iter().for_each(|mode| self.set(mode, byte == b'h'));
                    Within::Text
                }
                _ => Within::Text,
            };
        }
    }

    fn set(&mut self, mode: u16, on: bool) {
        self.changed.retain(|other| *other != mode);
        if on != USUALLY_ON.contains(&mode) && self.changed.len() < MODES_MAX {
            self.changed.push(mode);
        }
    }

    /// Returns the bytes that reset the terminal, last change first; empty if nothing has changed.
    pub fn calm(&mut self) -> Vec<u8> {
        let mut text = String::new();
        for mode in std::mem::take(&mut self.changed).into_iter().rev() {
            let usual = if USUALLY_ON.contains(&mode) { 'h' } else { 'l' };
            text += &format!("\x1b[?{mode}{usual}");
        }
        if std::mem::take(&mut self.keypad) {
            text += "\x1b>";
        }
        if std::mem::take(&mut self.coloured) {
            text += "\x1b[0m";
        }
        text.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calmed(parts: &[&str]) -> String {
        let mut screen = Screen::default();
        parts.iter().for_each(|part| screen.note(part.as_bytes()));
        let calm = String::from_utf8(screen.calm()).unwrap();
        assert_eq!(screen.calm(), b"");
        calm
    }

    #[test]
    fn modes_that_are_left_on_are_undone_last_one_first() {
        let editor = "\x1b[?1049h\x1b[22;0;0t\x1b[?1h\x1b=\x1b[?25l\x1b[1;7mtext";
        assert_eq!(calmed(&[editor]), "\x1b[?25h\x1b[?1l\x1b[?1049l\x1b>\x1b[0m");
        assert_eq!(calmed(&["\x1b[?1000;1006h"]), "\x1b[?1006l\x1b[?1000l");
    }

    #[test]
    fn program_that_cleans_up_and_plain_text_leave_nothing_to_do() {
        let shell = "\x1b[?2004h# ls\r\n\x1b[?2004l\r\x1b[?25l\x1b[?25h\x1b=\x1b>";
        assert_eq!(calmed(&[shell]), "");
        assert_eq!(calmed(&["plain [?1049h text\r\n", "\x1b]0;?1049h\x07", "\x1b[?x1049h"]), "");
    }

    #[test]
    fn sequence_in_any_pieces_is_one() {
        let text = "a\x1b[?1049hb\x1b[?2004hc\x1b[?2004ld";
        for at in 0..text.len() {
            assert_eq!(calmed(&[&text[..at], &text[at..]]), "\x1b[?1049l", "{at}");
        }
        let bytes: Vec<&str> = (0..text.len()).map(|at| &text[at..=at]).collect();
        assert_eq!(calmed(&bytes), "\x1b[?1049l");
    }

    #[test]
    fn endless_numbers_take_no_room() {
        let mut screen = Screen::default();
        screen.note(b"\x1b[?");
        (0..100_000).for_each(|_| screen.note(b"99999;"));
        screen.note(b"h");
        (0..1000).for_each(|mode| screen.note(format!("\x1b[?{mode}h").as_bytes()));
        assert!(screen.changed.len() <= MODES_MAX);
    }
}
