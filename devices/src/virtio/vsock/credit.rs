//! The arithmetic of credit: how much may be sent to the guest, and how much the guest may send.
//!
//! The code is pure and small, so that it can be checked exhaustively. All counters are
//! free-running and wrap at 2^32, as on the wire; only differences have a meaning.

/// The credit that the guest grants the host on one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SendCredit {
    sent: u32,
    peer_alloc: u32,
    peer_forwarded: u32,
    impossible: bool,
}

impl SendCredit {
    /// Starts the counters as if `start` bytes had been sent and forwarded.
    #[cfg(test)]
    pub fn starting_at(start: u32) -> Self {
        Self { sent: start, peer_forwarded: start, ..Self::default() }
    }

    /// Applies the credit fields of a packet from the guest.
    ///
    /// A driver may queue packets in another order than it filled them in, so a count that went
    /// back is outdated and ignored. A count of bytes that were never sent is invalid: nothing is
    /// sent until the guest sends a valid one.
    pub fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) {
        let advance = fwd_cnt.wrapping_sub(self.peer_forwarded);
        if advance <= self.outstanding() {
            self.peer_forwarded = fwd_cnt;
            self.peer_alloc = buf_alloc;
            self.impossible = false;
        } else if advance <= u32::MAX / 2 {
            self.impossible = true;
        }
    }

    /// Returns how many bytes may be sent now.
    pub fn available(&self) -> u32 {
        if self.impossible {
            return 0;
        }
        // The guest may shrink its buffer below the bytes in flight: that is zero credit, not an
        // error.
        self.peer_alloc.saturating_sub(self.outstanding())
    }

    /// Returns whether the guest's last credit fields were invalid.
    pub fn is_impossible(&self) -> bool {
        self.impossible
    }

    /// Counts bytes as sent. `len` must not exceed `available`.
    pub fn consume(&mut self, len: u32) {
        debug_assert!(len <= self.available());
        self.sent = self.sent.wrapping_add(len);
    }

    fn outstanding(&self) -> u32 {
        self.sent.wrapping_sub(self.peer_forwarded)
    }
}

/// The credit that the host grants the guest on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReceiveWindow {
    size: u32,
    received: u32,
    forwarded: u32,
    reported: u32,
}

/// The error of a guest that sent more than its credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun;

impl ReceiveWindow {
    pub fn new(size: u32) -> Self {
        Self { size, received: 0, forwarded: 0, reported: 0 }
    }

    /// Starts the counters as if `start` bytes had been received and forwarded.
    #[cfg(test)]
    pub fn starting_at(self, start: u32) -> Self {
        Self { received: start, forwarded: start, reported: start, ..self }
    }

    pub fn size(&self) -> u32 {
        self.size
    }

    /// Counts bytes from the guest, or fails if they exceed its credit.
    pub fn receive(&mut self, len: u32) -> Result<(), Overrun> {
        if len > self.size - self.held() {
            return Err(Overrun);
        }
        self.received = self.received.wrapping_add(len);
        Ok(())
    }

    /// Counts bytes as forwarded to the host. `len` must not exceed `held`.
    pub fn forward(&mut self, len: u32) {
        debug_assert!(len <= self.held());
        self.forwarded = self.forwarded.wrapping_add(len);
    }

    /// Returns the number of bytes received and not yet forwarded.
    pub fn held(&self) -> u32 {
        self.received.wrapping_sub(self.forwarded)
    }

    /// Returns whether the guest should get a credit update in a packet of its own.
    ///
    /// Half a window is rare enough to be cheap and early enough: while less than that is
    /// unreported, either the guest still has credit or bytes are held whose forwarding will make
    /// it half.
    pub fn wants_report(&self) -> bool {
        // Rounded up: half of a window of one byte would be zero, and updates would never end.
        self.forwarded.wrapping_sub(self.reported) >= self.size.div_ceil(2)
    }

    /// Returns the credit fields for a packet to the guest, and marks them as reported.
    pub fn report(&mut self) -> (u32, u32) {
        self.reported = self.forwarded;
        (self.size, self.forwarded)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// A peer that follows the protocol, from the driver's side.
    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    struct Driver {
        sent: u32,
        alloc: u32,
        forwarded: u32,
    }

    impl Driver {
        fn credit(&self) -> u32 {
            self.alloc.saturating_sub(self.sent.wrapping_sub(self.forwarded))
        }
    }

    #[test]
    fn e8_credit_for_bytes_never_sent_gives_none_until_a_possible_value_comes() {
        let mut credit = SendCredit::default();
        credit.update(100, 0);
        credit.consume(40);
        credit.update(u32::MAX, 41);
        assert_eq!((credit.available(), credit.is_impossible()), (0, true));
        credit.update(100, 40);
        assert_eq!((credit.available(), credit.is_impossible()), (100, false));
    }

    #[test]
    fn e8_credit_with_a_shrunken_buffer_gives_none_without_underflow() {
        let mut credit = SendCredit::default();
        credit.update(100, 0);
        credit.consume(60);
        credit.update(50, 0);
        assert_eq!(credit.available(), 0);
        credit.update(50, 60);
        assert_eq!(credit.available(), 50);
    }

    #[test]
    fn e8_credit_that_went_back_is_ignored() {
        let mut credit = SendCredit::default();
        credit.update(100, 0);
        credit.consume(60);
        credit.update(100, 50);
        credit.update(100, 20);
        assert_eq!(credit.available(), 90);
        assert!(!credit.is_impossible());
    }

    #[test]
    fn e10_window_refuses_the_first_byte_beyond_it() {
        let mut window = ReceiveWindow::new(10);
        assert_eq!(window.receive(10), Ok(()));
        assert_eq!(window.receive(1), Err(Overrun));
        window.forward(1);
        assert_eq!(window.receive(2), Err(Overrun));
        assert_eq!(window.receive(1), Ok(()));
    }

    #[test]
    fn window_across_the_wrap_of_its_counters_works_on() {
        let near = u32::MAX - 3;
        let mut window = ReceiveWindow { size: 8, received: near, forwarded: near, reported: near };
        assert_eq!(window.receive(8), Ok(()));
        window.forward(8);
        assert!(window.wants_report());
        assert_eq!(window.report(), (8, 4));
    }

    /// Visits every state that window, driver and the packets between them can reach.
    fn explore(size: u32, start: u32) {
        // Reports to the driver arrive in order; two in flight show every race there is.
        type State = (Driver, [u32; 4], Vec<u32>);
        let window = |f: &[u32; 4]| ReceiveWindow {
            size: f[0],
            received: f[1],
            forwarded: f[2],
            reported: f[3],
        };
        let fields = |w: ReceiveWindow| [w.size, w.received, w.forwarded, w.reported];
        let driver = Driver { sent: start, alloc: size, forwarded: start };
        let mut todo: Vec<State> = vec![(driver, [size, start, start, start], Vec::new())];
        let mut seen: HashSet<State> = HashSet::new();
        while let Some(state) = todo.pop() {
            // Counters are compared relative to the start, so that the walk is finite.
            if state.0.sent.wrapping_sub(start) > 4 * size || !seen.insert(state.clone()) {
                continue;
            }
            let (driver, raw, reports) = &state;
            let held = window(raw).held();
            assert!(held <= size);
            let mut next = Vec::new();
            for len in 1..=driver.credit() {
                let mut after = window(raw);
                assert_eq!(after.receive(len), Ok(()), "a driver within its credit is refused");
                let sent = driver.sent.wrapping_add(len);
                next.push((Driver { sent, ..*driver }, fields(after), reports.clone()));
            }
            for len in 1..=held {
                let mut after = window(raw);
                after.forward(len);
                let mut reports = reports.clone();
                if after.wants_report() {
                    reports.push(after.report().1);
                }
                next.push((*driver, fields(after), reports));
            }
            if let Some(forwarded) = reports.first() {
                let driver = Driver { forwarded: *forwarded, ..*driver };
                next.push((driver, *raw, reports[1..].to_vec()));
            }
            assert!(!next.is_empty(), "nobody can move: {raw:?}");
            todo.extend(next);
        }
    }

    #[test]
    fn window_of_every_small_size_never_overruns_and_never_deadlocks() {
        for size in 1..=6 {
            explore(size, 0);
            explore(size, u32::MAX - size);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn credit_under_any_reports_never_sends_beyond_the_last_possible_one(
            steps in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), 0u8..4), 1..64),
        ) {
            let mut credit = SendCredit::default();
            // The reference counts in 64 bits and so needs no wrapping.
            let (mut sent, mut forwarded, mut alloc) = (0u64, 0u64, 0u64);
            for (buf_alloc, raw, want, honest) in steps {
                let fwd_cnt = if honest > 0 && sent > forwarded {
                    forwarded + u64::from(raw) % (sent - forwarded + 1)
                } else {
                    u64::from(raw)
                };
                credit.update(buf_alloc, fwd_cnt as u32);
                let advance = (fwd_cnt as u32).wrapping_sub(forwarded as u32);
                if u64::from(advance) <= sent - forwarded {
                    forwarded += u64::from(advance);
                    alloc = u64::from(buf_alloc);
                }
                let len = credit.available().min(want);
                credit.consume(len);
                sent += u64::from(len);
                prop_assert!(len == 0 || sent <= alloc + forwarded);
                prop_assert!(sent - forwarded <= u64::from(u32::MAX));
            }
        }
    }
}
