//! The samples of a run. They are taken in random order, written raw to `samples.jsonl`, and
//! summarised in one table.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pvmm::trace::Step;
use serde::Serialize;
use serde_json::{Value, json};

use crate::stats::{Random, Ratio, Summary};

pub type Failure = Box<dyn std::error::Error + Send + Sync>;
pub type Outcome<T> = Result<T, Failure>;

/// The unit of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Unit {
    #[serde(rename = "ms")]
    Millis,
    #[serde(rename = "MiB")]
    Mib,
    #[serde(rename = "MB/s")]
    Rate,
    #[serde(rename = "1/s")]
    PerSecond,
    #[serde(rename = "")]
    Count,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Unit::Millis => "ms",
            Unit::Mib => "MiB",
            Unit::Rate => "MB/s",
            Unit::PerSecond => "1/s",
            Unit::Count => "",
        }
    }
}

/// The samples of one contender at one moment.
pub struct Cell {
    pub moment: &'static str,
    pub contender: String,
    pub unit: Unit,
    pub samples: Vec<f64>,
}

/// The name of a contender, and a measurement that returns one sample for each call.
pub type Act<'a> = (String, Box<dyn FnMut() -> Outcome<f64> + 'a>);

/// How many samples a run takes, and how much work one sample is.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Counts {
    /// Rounds that run first and whose samples are dropped.
    pub warm_ups: usize,
    /// Samples of a moment that takes about 100 ms on an emulated processor (`quick`), and of a
    /// moment that takes seconds (`slow`).
    pub quick: usize,
    pub slow: usize,
    /// Children of one live fork, and idle forks whose memory is measured.
    pub children: usize,
    /// How long a sustained rate is measured.
    pub sustained: Duration,
    /// How much data passes through a stream or a disk, in MiB.
    pub stream_mib: usize,
}

impl Counts {
    pub const FULL: Self = Self {
        warm_ups: 20,
        quick: 200,
        slow: 20,
        children: 10,
        sustained: Duration::from_secs(30),
        stream_mib: 32,
    };
    pub const QUICK: Self = Self {
        warm_ups: 1,
        quick: 10,
        slow: 3,
        children: 10,
        sustained: Duration::from_secs(5),
        stream_mib: 16,
    };
}

/// The steps of a trace in order, each with its duration in every sample, in milliseconds.
type Steps = Vec<(String, Vec<f64>)>;

pub struct Board {
    pub counts: Counts,
    pub cells: Vec<Cell>,
    /// The steps of each traced moment, by the title of the trace.
    traces: Vec<(String, Steps)>,
    random: Random,
    raw: File,
    dir: PathBuf,
    begun: Instant,
}

impl Board {
    pub fn new(dir: &Path, counts: Counts, facts: &Value) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let raw = File::create(dir.join("samples.jsonl"))?;
        let seed = u64::from(std::process::id()) << 32 | 0x9e37_79b9;
        let mut board = Self {
            counts,
            cells: Vec::new(),
            traces: Vec::new(),
            random: Random::new(seed),
            raw,
            dir: dir.to_owned(),
            begun: Instant::now(),
        };
        board.line(&json!({ "facts": facts, "counts": counts }))?;
        Ok(board)
    }

    fn line(&mut self, value: &Value) -> io::Result<()> {
        writeln!(self.raw, "{value}")
    }

    /// Prints `what` to standard error, with the seconds since the run began.
    pub fn say(&self, what: &str) {
        eprintln!("bench: {:5.0} s  {what}", self.begun.elapsed().as_secs_f64());
    }

    /// Takes `rounds` samples of every contender, in a new random order in each round, after
    /// `warm_ups` rounds whose samples are dropped. The first measurement that fails ends the
    /// moment.
    pub fn interleave(
        &mut self,
        moment: &'static str,
        unit: Unit,
        warm_ups: usize,
        rounds: usize,
        mut acts: Vec<Act<'_>>,
    ) -> Outcome<()> {
        self.say(&format!("{moment}: {} contenders, {rounds} rounds", acts.len()));
        for round in 0..warm_ups + rounds {
            self.random.shuffle(&mut acts);
            for (contender, act) in &mut acts {
                let value = act().map_err(|e| format!("{moment}, {contender}: {e}"))?;
                if round >= warm_ups {
                    self.add(moment, contender, unit, value)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the numbers below `count` in random order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<_> = (0..count).collect();
        self.random.shuffle(&mut order);
        order
    }

    pub fn add(
        &mut self,
        moment: &'static str,
        contender: &str,
        unit: Unit,
        value: f64,
    ) -> io::Result<()> {
        let same = |cell: &Cell| cell.moment == moment && cell.contender == contender;
        match self.cells.iter_mut().find(|cell| same(cell)) {
            Some(cell) => cell.samples.push(value),
            None => {
                let (contender, samples) = (contender.to_owned(), vec![value]);
                self.cells.push(Cell { moment, contender, unit, samples });
            }
        }
        self.line(
            &json!({ "moment": moment, "contender": contender, "unit": unit, "value": value }),
        )
    }

    /// Adds the steps of one sample, in milliseconds, to the trace `title`.
    pub fn trace(&mut self, title: &str, steps: &[(String, f64)]) -> io::Result<()> {
        if !self.traces.iter().any(|(known, _)| known == title) {
            self.traces.push((title.to_owned(), Vec::new()));
        }
        if let Some((_, known)) = self.traces.iter_mut().find(|(known, _)| known == title) {
            for (name, millis) in steps {
                match known.iter_mut().find(|(step, _)| step == name) {
                    Some((_, samples)) => samples.push(*millis),
                    None => known.push((name.clone(), vec![*millis])),
                }
            }
        }
        let steps: BTreeMap<_, _> = steps.iter().cloned().collect();
        self.line(&json!({ "trace": title, "ms": steps }))
    }

    /// Returns the table, the ratios and the traces as text, and writes the text to `report.txt`.
    pub fn report(&mut self) -> Outcome<String> {
        let mut text = String::new();
        let mut put = |line: String| {
            text += line.trim_end();
            text.push('\n');
        };
        put(format!(
            "{:30} {:26} {:>5} {:>4} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "moment", "contender", "unit", "n", "min", "p50", "p90", "p99", "max"
        ));
        for cell in &self.cells {
            let Some(s) = Summary::of(&cell.samples) else { continue };
            put(format!(
                "{:30} {:26} {:>5} {:>4} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2}",
                cell.moment,
                cell.contender,
                cell.unit.name(),
                s.count,
                s.min,
                s.p50,
                s.p90,
                s.p99,
                s.max
            ));
        }
        put(String::new());
        put("pvmm ÷ peer, of medians, with the range of 95 in 100 redrawn samples".to_owned());
        for ours in self.cells.iter().filter(|cell| is_ours(cell)) {
            let peers =
                self.cells.iter().filter(|cell| cell.moment == ours.moment && !is_ours(cell));
            for peer in peers {
                let ratio = Ratio::of(&ours.samples, &peer.samples, &mut self.random);
                let Some(Ratio { value, low, high }) = ratio else { continue };
                let pair = format!("{} ÷ {}", ours.contender, peer.contender);
                put(format!("{:30} {pair:40} {value:8.3}  [{low:.3}, {high:.3}]", ours.moment));
            }
        }
        for (title, steps) in &self.traces {
            put(String::new());
            put(format!("where the time goes: {title} (best and p50 of each step, ms)"));
            for (name, samples) in steps {
                let Some(s) = Summary::of(samples) else { continue };
                put(format!("  {name:30} {:9.3} {:9.3}", s.min, s.p50));
            }
        }
        fs::write(self.dir.join("report.txt"), &text)?;
        Ok(text)
    }
}

/// Returns whether the contender is pvmm, not one that it is compared with.
pub fn is_ours(cell: &Cell) -> bool {
    cell.contender.starts_with("pvmm")
}

/// Converts a duration to milliseconds.
pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Runs `act`. Returns its value and its duration in milliseconds.
pub fn timed<T>(act: impl FnOnce() -> Outcome<T>) -> Outcome<(T, f64)> {
    let begun = Instant::now();
    let value = act()?;
    Ok((value, millis(begun.elapsed())))
}

/// Returns the name and the duration in milliseconds of each step. The first step starts at
/// `begun`.
pub fn durations(begun: Instant, steps: &[Step]) -> Vec<(String, f64)> {
    let mut from = begun;
    let each = |step: &Step| {
        let took = millis(step.done - from);
        from = step.done;
        (step.name.to_owned(), took)
    };
    steps.iter().map(each).collect()
}
