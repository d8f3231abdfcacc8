//! The screen of `pvmm top`: draws a frame every second, and takes keys.

use std::io;
use std::time::{Duration, Instant};

use pvmm_sandbox::sys::signals::{FORWARDED, Signals};
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row as TableRow, Table, TableState};
use ratatui::{DefaultTerminal, Frame};

use super::{HEADING, Order, Readings, Row, totals};
use crate::exit::{self, Failure, Outcome};

/// The time between two frames.
const REFRESH: Duration = Duration::from_secs(1);
/// The interval between checks for a signal.
const LOOK: Duration = Duration::from_millis(100);
const KEYS: &str = " q quit   sort: c CPU  m private  s shared  a age  n name  f forks   ↑↓ scroll";

/// The state of the screen.
struct View {
    rows: Vec<Row>,
    order: Order,
    table: TableState,
}

impl Default for View {
    fn default() -> Self {
        Self { rows: Vec::new(), order: Order::Cpu, table: TableState::default() }
    }
}

/// Gives the terminal back however the command ends.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows the cursor again on a panic. The library's hook, which runs before, does the rest.
fn show_cursor_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let _ = execute!(io::stdout(), Show);
        report(panic);
    }));
}

/// Shows the screen until `q`, Ctrl-C or a signal.
pub fn run() -> Outcome {
    // Held first, because a signal must find the terminal restored.
    let signals = Signals::hold(&FORWARDED)?;
    let _restored = Restored;
    show_cursor_on_panic();
    let mut terminal = ratatui::try_init()?;
    let (mut readings, mut view) = (Readings::default(), View::default());
    loop {
        let next = Instant::now() + REFRESH;
        view.rows = readings.take()?;
        if !wait(&mut terminal, &mut view, &signals, next)? {
            return Ok(0);
        }
    }
}

/// Draws, and takes keys until `next`; returns false if the user wants to leave.
fn wait(
    terminal: &mut DefaultTerminal,
    view: &mut View,
    signals: &Signals,
    next: Instant,
) -> Result<bool, Failure> {
    draw(terminal, view)?;
    loop {
        if signals.is_pending() {
            return Err(Failure::silent(exit::by_signal(signals.next()?)));
        }
        let left = next.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(true);
        }
        if event::poll(left.min(LOOK))? {
            if let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
                && !view.take(key)
            {
                return Ok(false);
            }
            draw(terminal, view)?;
        }
    }
}

fn draw(terminal: &mut DefaultTerminal, view: &mut View) -> io::Result<()> {
    view.order.sort(&mut view.rows);
    terminal.draw(|frame| view.draw(frame)).map(drop)
}

impl View {
    /// Takes a key; returns false for one that ends the command.
    fn take(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Down | KeyCode::Char('j') => self.table.select_next(),
            KeyCode::Up | KeyCode::Char('k') => self.table.select_previous(),
            KeyCode::Char(key) => self.order = Order::of_key(key).unwrap_or(self.order),
            _ => {}
        }
        true
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let [above, list, below] =
            Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)])
                .areas(frame.area());
        let bold = Style::new().add_modifier(Modifier::BOLD);
        frame.render_widget(Line::styled(totals(&self.rows), bold), above);
        let heading = HEADING.iter().enumerate().map(|(column, name)| {
            let sorted = column == self.order.column();
            let style =
                if sorted { bold.fg(Color::Cyan) } else { Style::new().fg(Color::DarkGray) };
            Cell::from(*name).style(style)
        });
        let rows = self
            .rows
            .iter()
            .map(|row| TableRow::new(row.cells()).style(Style::new().fg(colour(row.state))));
        let widths = [12, 16, 10, 7, 6, 10, 10, 9, 5].map(Constraint::Length);
        let widths = widths.into_iter().chain([Constraint::Fill(1)]);
        let table = Table::new(rows, widths)
            .header(TableRow::new(heading))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, list, &mut self.table);
        frame.render_widget(Line::styled(KEYS, Style::new().fg(Color::DarkGray)), below);
    }
}

fn colour(state: &str) -> Color {
    match state {
        "running" => Color::Reset,
        "paused" | "starting" => Color::Yellow,
        "hibernated" => Color::Magenta,
        _ => Color::DarkGray,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn frame(view: &mut View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let cells = terminal.backend().buffer().content().chunks(width.into());
        let line = |line: &[ratatui::buffer::Cell]| line.iter().map(|it| it.symbol()).collect();
        cells.map(line).collect::<Vec<String>>().join("\n")
    }

    fn view() -> View {
        let row = Row {
            id: "0123456789ab".to_owned(),
            template: "a\n\x1b[2Jb".to_owned(),
            state: "running",
            memory_private: Some(3 << 20),
            ..Row::default()
        };
        View { rows: vec![row], ..View::default() }
    }

    #[test]
    fn frame_has_totals_rows_and_keys_and_no_control_characters() {
        let text = frame(&mut view(), 120, 6);
        for word in ["1 VMs, 1 alive; 3 MiB private", "0123456789ab", "a\\n\\u{1b}[2Jb", "q quit"] {
            assert!(text.contains(word), "{word}\n{text}");
        }
        for (width, height) in [(1, 1), (3, 40), (500, 2)] {
            frame(&mut view(), width, height);
        }
    }

    #[test]
    fn key_sorts_scrolls_or_leaves() {
        let mut view = view();
        let press = |code| KeyEvent::new(code, KeyModifiers::NONE);
        assert!(view.take(press(KeyCode::Char('m'))) && view.order == Order::Private);
        assert!(view.take(press(KeyCode::Char('x'))) && view.order == Order::Private);
        assert!(view.take(press(KeyCode::Down)) && view.table.selected() == Some(0));
        assert!(!view.take(press(KeyCode::Char('q'))));
        assert!(!view.take(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }
}
