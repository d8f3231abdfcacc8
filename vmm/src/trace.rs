//! Where the time of a recipe goes: named instants, kept only while somebody asks for them.
//!
//! A recipe says what it has just done; without a listener on its own thread that costs one look at
//! a thread-local. Only the thread that asked is listened to, so nothing is shared.

use std::cell::RefCell;
use std::time::Instant;

/// Something that was done, and when.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The name of the step.
    pub name: &'static str,
    /// When it was done.
    pub done: Instant,
}

thread_local! {
    static STEPS: RefCell<Option<Vec<Step>>> = const { RefCell::new(None) };
}

/// Does `act` and returns what this thread did meanwhile, in its order.
pub fn record<T>(act: impl FnOnce() -> T) -> (T, Vec<Step>) {
    let before = STEPS.replace(Some(Vec::with_capacity(64)));
    let value = act();
    (value, STEPS.replace(before).unwrap_or_default())
}

/// Says that `name` has just been done.
pub fn step(name: &'static str) {
    STEPS.with_borrow_mut(|steps| {
        if let Some(steps) = steps {
            steps.push(Step { name, done: Instant::now() });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_without_a_listener_is_not_kept() {
        step("before");
        let (value, steps) = record(|| {
            step("one");
            std::thread::spawn(|| step("elsewhere")).join().unwrap();
            step("two");
            7
        });
        let names: Vec<_> = steps.iter().map(|step| step.name).collect();
        assert_eq!((value, names), (7, vec!["one", "two"]));
        assert!(steps[0].done <= steps[1].done);
        assert!(record(|| ()).1.is_empty());
    }
}
