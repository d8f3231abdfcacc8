//! Order statistics of samples, and confidence intervals of their ratios.
//!
//! Times have long tails, so there is no mean here. There are percentiles, and a bootstrap interval
//! for the ratio of two medians.

/// How often samples are redrawn for an interval.
const DRAWS: usize = 2000;

/// The order statistics of the samples of one cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    pub count: usize,
    pub min: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Summary {
    /// Returns `None` if there is no sample.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let at = |part| percentile(&sorted, part);
        Some(Self { count: sorted.len(), min, p50: at(0.5), p90: at(0.9), p99: at(0.99), max })
    }
}

/// Interpolates between the two nearest ranks. `sorted` is sorted and not empty.
fn percentile(sorted: &[f64], part: f64) -> f64 {
    let place = part * (sorted.len() - 1) as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (place - low as f64)
}

/// The ratio of two medians, and the range in which 95 of 100 ratios of redrawn samples lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

impl Ratio {
    pub fn of(ours: &[f64], theirs: &[f64], random: &mut Random) -> Option<Self> {
        let value = median(ours.to_vec())? / median(theirs.to_vec())?;
        let mut redraw = |samples: &[f64]| {
            median(samples.iter().map(|_| samples[random.below(samples.len())]).collect())
        };
        let mut ratios = Vec::with_capacity(DRAWS);
        for _ in 0..DRAWS {
            ratios.push(redraw(ours)? / redraw(theirs)?);
        }
        ratios.sort_by(f64::total_cmp);
        let at = |part| percentile(&ratios, part);
        Some(Self { value, low: at(0.025), high: at(0.975) })
    }
}

fn median(mut samples: Vec<f64>) -> Option<f64> {
    samples.sort_by(f64::total_cmp);
    (!samples.is_empty()).then(|| percentile(&samples, 0.5))
}

/// A pseudorandom generator that is good enough to shuffle and redraw samples.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        // Marsaglia's xorshift with 64 bits of state.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_of_known_samples_has_their_percentiles() {
        let samples: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        let summary = Summary::of(&samples).unwrap();
        let expected =
            Summary { count: 101, min: 0.0, p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 };
        assert_eq!(summary, expected);
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, 2.0]).unwrap().p50, 1.5);
    }

    #[test]
    fn ratio_of_two_cells_lies_in_its_interval_and_narrows_with_samples() {
        let mut random = Random::new(7);
        let cell = |count: u32, base: f64| (0..count).map(|i| base + f64::from(i % 10)).collect();
        let (few, many): (Vec<f64>, Vec<f64>) = (cell(5, 10.0), cell(500, 10.0));
        let peer: Vec<f64> = cell(500, 100.0);
        let wide = Ratio::of(&few, &peer, &mut random).unwrap();
        let narrow = Ratio::of(&many, &peer, &mut random).unwrap();
        assert!(narrow.low <= narrow.value && narrow.value <= narrow.high, "{narrow:?}");
        assert!(narrow.high - narrow.low < wide.high - wide.low, "{narrow:?} {wide:?}");
    }

    #[test]
    fn shuffle_keeps_every_item() {
        let mut items: Vec<u32> = (0..50).collect();
        Random::new(3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
