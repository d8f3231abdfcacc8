//! What a long piece of work tells the person who waits for it.
//! It is here, and not in the launcher, so that the library itself never prints.

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A new step began; it lasts until the next `Step` or `Done`.
    Step(&'a str),
    /// The step got on a little.
    Detail(&'a str),
    /// The current step ended well.
    Done,
}

/// Takes events as they happen. Every closure over an [`Event`] is one.
pub trait Progress {
    fn event(&mut self, event: Event<'_>);

    /// Whether the person has stopped waiting; asked several times a second. Work then ends with an
    /// error and removes what it had half built.
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

/// For callers that have nobody to tell.
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
