//! Output of pvmm itself: tables and JSON on standard output, remarks on standard error.
//!
//! Data and remarks go to different streams, so that every command works in a pipeline; colour is
//! for terminals only.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;

pub use pvmm_sandbox::failure::one_line;

/// Whether standard error may be coloured.
pub fn stderr_has_colour() -> bool {
    io::stderr().is_terminal() && colour_wanted()
}

/// Whether standard output may be coloured.
pub fn stdout_has_colour() -> bool {
    io::stdout().is_terminal() && colour_wanted()
}

fn colour_wanted() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Prints a value as indented JSON.
pub fn json<T: Serialize>(value: &T) -> io::Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(io::Error::other)?;
    line(&text)
}

/// Prints one line of data.
pub fn line(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}")?;
    stdout.flush()
}

/// Prints bytes unchanged.
pub fn raw(data: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(data)?;
    stdout.flush()
}

/// Prints a remark to standard error; a failed write is ignored.
pub fn remark(quiet: bool, text: &str) {
    if !quiet {
        let _ = writeln!(io::stderr(), "{}", one_line(text));
    }
}

/// A table with a heading, whose columns are as wide as their content.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(heading: &[&str]) -> Self {
        Self { rows: vec![heading.iter().map(|cell| (*cell).to_owned()).collect()] }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells.iter().map(|cell| one_line(cell)).collect());
    }

    /// Formats the table: columns two spaces apart, no trailing spaces.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
        };
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in &self.rows {
            let padded: Vec<String> =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            text += padded.join("  ").trim_end();
            text.push('\n');
        }
        text
    }

    pub fn print(&self) -> io::Result<()> {
        raw(self.render().as_bytes())
    }
}

/// Formats a size for people: `512 MiB`, `1.5 GiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 || value >= 100.0 || unit == 0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Formats an age for people: `12 s`, `5 min`, `3 h`, `2 d`.
pub fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_of_hostile_text_has_no_control_characters() {
        assert_eq!(one_line("a\nb\x1b[31m\u{9b}c\n"), "a\\nb\\u{1b}[31m\\u{9b}c");
    }

    #[test]
    fn table_with_uneven_cells_lines_up() {
        let mut table = Table::new(&["ID", "NAME"]);
        table.row(vec!["0123".to_owned(), "web\n".to_owned()]);
        assert_eq!(table.render(), "ID    NAME\n0123  web\n");
    }

    #[test]
    fn bytes_and_age_are_short() {
        assert_eq!(bytes(512 << 20), "512 MiB");
        assert_eq!(bytes(1536 << 20), "1.5 GiB");
        assert_eq!(bytes(7), "7 B");
        assert_eq!(age(90), "90 s");
        assert_eq!(age(7300), "2 h");
    }
}
