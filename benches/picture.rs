//! The picture of a run: each sample of each time is a dot on one logarithmic axis, and medians are
//! marked.

use std::fmt::Write;

use crate::board::{Cell, Unit};
use crate::stats::Summary;

const LEFT: f64 = 430.0;
const WIDTH: f64 = 760.0;
const ROW: f64 = 22.0;
const TOP: f64 = 40.0;
const COLOURS: [(&str, &str); 3] =
    [("pvmm", "#1f6feb"), ("firecracker", "#d1242f"), ("qemu", "#6e7781")];

/// Returns an SVG of all cells in milliseconds, or `None` if there is no such cell.
pub fn draw(cells: &[Cell]) -> Option<String> {
    let times = cells.iter().filter(|cell| cell.unit == Unit::Millis && !cell.samples.is_empty());
    let times: Vec<_> = times.collect();
    let all = || times.iter().flat_map(|cell| cell.samples.iter().copied());
    let low = all().min_by(f64::total_cmp)?.max(1e-3).log10().floor();
    let high = all().max_by(f64::total_cmp)?.max(1e-2).log10().ceil().max(low + 1.0);
    let x = |millis: f64| LEFT + (millis.max(1e-3).log10() - low) / (high - low) * WIDTH;
    let bottom = TOP + ROW * times.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n",
        LEFT + WIDTH + 40.0,
        bottom + 20.0
    );
    for power in low as i32..=high as i32 {
        let millis = 10f64.powi(power);
        let at = x(millis);
        let label = if power < 3 { format!("{millis} ms") } else { format!("{} s", millis / 1e3) };
        let _ = writeln!(
            svg,
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"#d0d7de\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#57606a\">{label}</text>",
            TOP - 10.0
        );
    }
    for (row, cell) in times.iter().enumerate() {
        let y = TOP + ROW * (row as f64 + 0.5);
        let colour = COLOURS.iter().find(|(name, _)| cell.contender.starts_with(name));
        let colour = colour.map_or("#1a7f37", |(_, colour)| colour);
        let title = format!("{}: {}", cell.moment, cell.contender);
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 10.0,
            y + 4.0,
            escaped(&title)
        );
        for (index, sample) in cell.samples.iter().enumerate() {
            // The dots are spread vertically, so that equal samples do not cover each other.
            let spread = (index % 5) as f64 * 2.0 - 4.0;
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.5\" fill=\"{colour}\" \
                 fill-opacity=\"0.35\"/>",
                x(*sample),
                y + spread
            );
        }
        if let Some(summary) = Summary::of(&cell.samples) {
            let at = x(summary.p50);
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{:.1}\" \
                 stroke=\"black\" stroke-width=\"2\"/>",
                y - 8.0,
                y + 8.0
            );
        }
    }
    svg += "</svg>\n";
    Some(svg)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(contender: &str, samples: &[f64]) -> Cell {
        let (contender, samples) = (contender.to_owned(), samples.to_vec());
        Cell { moment: "a < b", contender, unit: Unit::Millis, samples }
    }

    #[test]
    fn draw_of_two_cells_has_every_sample_and_escapes_names() {
        let svg = draw(&[cell("pvmm", &[1.0, 2.0, 300.0]), cell("qemu", &[5.0])]).unwrap();
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(svg.contains("a &lt; b: pvmm") && svg.contains("#1f6feb"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn draw_of_nothing_that_is_a_time_is_none() {
        assert!(draw(&[]).is_none());
        assert!(draw(&[Cell { unit: Unit::Mib, ..cell("pvmm", &[1.0]) }]).is_none());
    }
}
