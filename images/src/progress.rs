//! Progress events of long work.
//!
//! A trait and not output, so that the library itself never prints.

/// A progress event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A step began; it lasts until the next `Step` or `Done`.
    Step(&'a str),
    /// The step has made progress.
    Detail(&'a str),
    /// The current step succeeded.
    Done,
}

/// Receives progress events. Implemented for every closure over an [`Event`].
pub trait Progress {
    fn event(&mut self, event: Event<'_>);

    /// Whether the work should stop; called several times a second. If so, the work fails and
    /// removes what it has half built.
    fn interrupted(&mut self) -> bool {
        false
    }

    fn step(&mut self, text: &str) {
        self.event(Event::Step(text));
    }

    fn detail(&mut self, text: &str) {
        self.event(Event::Detail(text));
    }

    fn done(&mut self) {
        self.event(Event::Done);
    }
}

impl<F: FnMut(Event<'_>)> Progress for F {
    fn event(&mut self, event: Event<'_>) {
        self(event);
    }
}

/// Ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&mut self, _event: Event<'_>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closure_given_events_sees_them_in_order() {
        let mut seen = Vec::new();
        let mut take = |event: Event<'_>| seen.push(format!("{event:?}"));
        let progress: &mut dyn Progress = &mut take;
        progress.step("a");
        progress.detail("b");
        progress.done();
        assert_eq!(seen, ["Step(\"a\")", "Detail(\"b\")", "Done"]);
    }
}
