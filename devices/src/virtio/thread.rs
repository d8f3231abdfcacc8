//! The thread that runs all virtio devices, and how the other threads call it.
//!
//! Waits only point towards this thread: it waits for nobody but the kernel, so a call to it always ends.
//! Each call still has a deadline, and a thread that is gone is an error, never a hang. While a machine is
//! being put together there is no thread yet, and while it is paused the thread has handed the devices over:
//! then calls run where they are made. A dozen of them would otherwise be a dozen changes of thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{io, thread};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device_loop::{Command, DeviceError, DeviceId, DeviceLoop, Reply, SavedDevice};
use super::registry::{DeviceState, DeviceUpdate};
use super::{Activation, Updated, VirtioDevice};

// Longer than any single request that a worker serves; only a broken host disk takes more.
pub const CALL_DEADLINE: Duration = Duration::from_secs(30);
// Callers wait for their answer, so this is a bound on threads that call at once.
const MAILBOX_SLOTS: usize = 64;

type Answer = Result<Reply, DeviceError>;

/// Carries a command to a device loop and its reply back.
pub trait Calls: Send + Sync {
    fn call(&self, command: Command) -> Answer;
}

/// A cheap way to call the devices of one loop; clones reach the same loop.
#[derive(Clone)]
pub struct DeviceHandle {
    calls: Arc<dyn Calls>,
}

impl DeviceHandle {
    pub fn new(calls: Arc<dyn Calls>) -> Self {
        Self { calls }
    }

    /// Hands a device over to the loop.
    pub fn add(&self, device: Box<dyn VirtioDevice>) -> Result<DeviceId, DeviceError> {
        match self.calls.call(Command::Add(device))? {
            Reply::Added(id) => Ok(id),
            _ => Err(DeviceError::Unknown),
        }
    }

    pub fn activate(
        &self,
        id: DeviceId,
        epoch: u64,
        activation: Activation,
    ) -> Result<(), DeviceError> {
        let activation = Box::new(activation);
        self.calls.call(Command::Activate { id, epoch, activation }).map(drop)
    }

    /// When this returns, the device writes no guest memory and raises no interrupt until it is activated again.
    pub fn reset(&self, id: DeviceId, epoch: u64) -> Result<(), DeviceError> {
        self.calls.call(Command::Reset { id, epoch }).map(drop)
    }

    /// When this returns, no device touches guest memory until `resume_all`. The vCPUs must be paused first.
    pub fn quiesce_all(&self) -> Result<(), DeviceError> {
        self.calls.call(Command::Quiesce).map(drop)
    }

    pub fn resume_all(&self) -> Result<(), DeviceError> {
        self.calls.call(Command::Resume).map(drop)
    }

    /// Takes an idle device back to a saved state.
    pub fn rewind(&self, id: DeviceId, state: DeviceState) -> Result<(), DeviceError> {
        self.calls.call(Command::Rewind { id, state: Box::new(state) }).map(drop)
    }

    pub fn save(&self, id: DeviceId) -> Result<SavedDevice, DeviceError> {
        match self.calls.call(Command::Save(id))? {
            Reply::Saved(saved) => Ok(*saved),
            _ => Err(DeviceError::Unknown),
        }
    }

    /// Changes a setting of a device; what the guest must hear of it comes back.
    pub fn update(&self, id: DeviceId, update: DeviceUpdate) -> Result<Updated, DeviceError> {
        match self.calls.call(Command::Update { id, update })? {
            Reply::Updated(updated) => Ok(updated),
            _ => Err(DeviceError::Unknown),
        }
    }
}

struct Letter {
    wish: Wish,
    answer: SyncSender<Answer>,
}

enum Wish {
    // Boxed, for every slot of the mailbox takes the room of a letter.
    Carry(Box<Command>),
    /// Quiet the devices and put them, and the letters to them, where callers find them, unless the flag says that
    /// nobody wants them any more. The flag is set under the lock of that place.
    HandOver {
        given_up: Arc<AtomicBool>,
    },
}

struct Mailbox {
    /// The devices and the letters to them, while the thread does not have them. No letter is sent without this
    /// lock, so that none is sent to a thread that has handed the devices over.
    inner: Mutex<Option<Inner>>,
    letters: SyncSender<Letter>,
    wake: Arc<EventFd>,
}

struct Inner {
    devices: DeviceLoop,
    inbox: Receiver<Letter>,
}

impl Mailbox {
    fn inner(&self) -> MutexGuard<'_, Option<Inner>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Calls for Mailbox {
    fn call(&self, command: Command) -> Answer {
        let mut here = self.inner();
        match here.as_mut() {
            Some(inner) => inner.devices.handle(command),
            None => self.send(here, Wish::Carry(Box::new(command)), CALL_DEADLINE),
        }
    }
}

impl Mailbox {
    /// Sends a letter to the thread, which has the devices, and waits for the answer.
    fn send(
        &self,
        no_devices_here: MutexGuard<'_, Option<Inner>>,
        wish: Wish,
        patience: Duration,
    ) -> Answer {
        let (answer, reply) = mpsc::sync_channel(1);
        self.letters.try_send(Letter { wish, answer }).map_err(|error| match error {
            TrySendError::Full(_) => DeviceError::Busy,
            TrySendError::Disconnected(_) => DeviceError::Gone,
        })?;
        drop(no_devices_here);
        // Only a counter at its maximum refuses, and then the thread is awake.
        let _ = self.wake.write(1);
        reply.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => DeviceError::Timeout { seconds: patience.as_secs() },
            RecvTimeoutError::Disconnected => DeviceError::Gone,
        })?
    }

    /// Takes the quiet devices from the thread. If it does not give them in time it keeps them, and they go on.
    fn take_over(
        &self,
        no_devices_here: MutexGuard<'_, Option<Inner>>,
        patience: Duration,
    ) -> Result<(), DeviceError> {
        let given_up = Arc::new(AtomicBool::new(false));
        let wish = Wish::HandOver { given_up: given_up.clone() };
        match self.send(no_devices_here, wish, patience) {
            Err(error @ DeviceError::Timeout { .. }) => {
                let place = self.inner();
                if place.is_some() {
                    // They came at the last moment.
                    return Ok(());
                }
                given_up.store(true, Ordering::Relaxed);
                Err(error)
            }
            answer => answer.map(drop),
        }
    }
}

/// Owns the thread `pvmm-devices`; dropping it stops the devices and joins the thread.
pub struct DeviceThread {
    handle: DeviceHandle,
    mailbox: Arc<Mailbox>,
    running: Option<Running>,
}

struct Running {
    join: JoinHandle<()>,
    /// Where the thread waits for the devices after it has handed them over.
    back: SyncSender<Inner>,
}

impl Running {
    fn start(mailbox: Arc<Mailbox>) -> io::Result<Self> {
        let (back, again) = mpsc::sync_channel::<Inner>(1);
        let live = move || {
            while let Ok(inner) = again.recv() {
                if serve(inner, &mailbox).is_none() {
                    return;
                }
            }
        };
        let thread =
            thread::Builder::new().name("pvmm-devices".into()).stack_size(crate::STACK_BYTES);
        let join = thread.spawn(live)?;
        Ok(Self { join, back })
    }
}

impl DeviceThread {
    /// No devices, and no thread before [`Self::start`]: calls run on the caller's.
    pub fn new() -> io::Result<Self> {
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let devices = DeviceLoop::new().map_err(io::Error::other)?;
        let (letters, inbox) = mpsc::sync_channel(MAILBOX_SLOTS);
        let inner = Mutex::new(Some(Inner { devices, inbox }));
        let mailbox = Arc::new(Mailbox { inner, letters, wake });
        Ok(Self { handle: DeviceHandle::new(mailbox.clone()), mailbox, running: None })
    }

    /// Lets the thread have the devices, and starts it if there is none. Once is enough.
    pub fn start(&mut self) -> io::Result<()> {
        let mut here = self.mailbox.inner();
        let Some(inner) = here.as_mut() else { return Ok(()) };
        let running = match self.running.take() {
            Some(running) => running,
            None => {
                let running = Running::start(self.mailbox.clone())?;
                inner.devices.watch(self.mailbox.wake.clone());
                running
            }
        };
        let gone = |_| io::Error::other("the device thread has ended");
        let lent = here.take().map_or(Ok(()), |inner| running.back.send(inner).map_err(gone));
        self.running = Some(running);
        lent
    }

    /// Quiets every device, as [`DeviceHandle::quiesce_all`] does, and takes them from the thread until
    /// [`Self::start`]. After an error they go on as if nobody had asked.
    pub fn rest(&self, patience: Duration) -> Result<(), DeviceError> {
        let here = self.mailbox.inner();
        if here.is_none() {
            return self.mailbox.take_over(here, patience);
        }
        drop(here);
        self.handle.quiesce_all()
    }

    pub fn handle(&self) -> &DeviceHandle {
        &self.handle
    }

    /// Stops every device and ends the thread. Calls through handles that are left answer `Gone`.
    pub fn stop(mut self) -> Result<(), DeviceError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), DeviceError> {
        let answer = self.handle.calls.call(Command::Stop).map(drop);
        // Whoever still has a handle shall learn that there is nobody.
        drop(self.mailbox.inner().take());
        let Some(Running { join, back }) = self.running.take() else { return answer };
        drop(back);
        match answer {
            // Not joined: a thread that does not answer would not end either.
            Err(error @ (DeviceError::Timeout { .. } | DeviceError::Busy)) => Err(error),
            answer => join.join().map_err(|_| DeviceError::Gone).and(answer),
        }
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        // After `stop` there is nothing left to end.
        let anything = self.running.is_some() || self.mailbox.inner().is_some();
        if let Some(Err(error)) = anything.then(|| self.end()) {
            log::error!("device thread did not stop: {error}");
        }
    }
}

/// Runs the devices until they are handed over; None if they were stopped for good.
fn serve(mut inner: Inner, mailbox: &Mailbox) -> Option<()> {
    loop {
        if let Err(error) = inner.devices.poll(-1) {
            log::error!("device thread ends: {error}");
            return None;
        }
        while let Ok(Letter { wish, answer }) = inner.inbox.try_recv() {
            let command = match wish {
                Wish::Carry(command) => command,
                Wish::HandOver { given_up } => {
                    match hand_over(inner, mailbox, &given_up, &answer) {
                        None => return Some(()),
                        Some(kept) => {
                            inner = kept;
                            continue;
                        }
                    }
                }
            };
            let last = matches!(*command, Command::Stop);
            // A caller that gave up waiting needs no answer.
            let _ = answer.send(inner.devices.handle(*command));
            if last {
                return None;
            }
        }
    }
}

/// Quiets the devices and gives them to whoever asked. If that one has given up, the devices go on and come back.
fn hand_over(
    mut inner: Inner,
    mailbox: &Mailbox,
    given_up: &AtomicBool,
    asked: &SyncSender<Answer>,
) -> Option<Inner> {
    let go_on = |mut inner: Inner| {
        // Resuming cannot fail.
        let _ = inner.devices.handle(Command::Resume);
        Some(inner)
    };
    // Before the lock is taken: what is under way may take a while.
    let quiet = inner.devices.handle(Command::Quiesce);
    if quiet.is_err() {
        let _ = asked.send(quiet);
        return go_on(inner);
    }
    let mut place = mailbox.inner();
    if given_up.load(Ordering::Relaxed) {
        drop(place);
        return go_on(inner);
    }
    // What was sent until now; nothing is from now on.
    while let Ok(Letter { wish, answer }) = inner.inbox.try_recv() {
        let _ = answer.send(match wish {
            Wish::Carry(command) => inner.devices.handle(*command),
            Wish::HandOver { .. } => Ok(Reply::Done),
        });
    }
    *place = Some(inner);
    drop(place);
    let _ = asked.send(quiet);
    None
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::registry::DeviceKind;
    use super::super::rng::Rng;
    use super::super::testing::{InlineLoop, memory};
    use super::super::{Interrupt, Worker};
    use super::*;
    use crate::lines;

    fn activation() -> Activation {
        let (memory, interrupt) = (memory(), Interrupt::new(lines::testing::line().0));
        Activation { memory, features: 0, queues: Vec::new(), interrupt }
    }

    /// A device whose activation is a bug.
    struct Buggy;

    impl VirtioDevice for Buggy {
        fn kind(&self) -> DeviceKind {
            DeviceKind::Rng
        }
        fn features(&self) -> u64 {
            0
        }
        fn queue_sizes(&self) -> &'static [u16] {
            &[]
        }
        fn config(&self) -> Vec<u8> {
            Vec::new()
        }
        fn activate(self: Box<Self>, _activation: Activation) -> Box<dyn Worker> {
            panic!("a bug, on purpose")
        }
        fn save(&self) -> DeviceState {
            Rng::default().save()
        }
        fn rewind(&mut self, _state: &DeviceState) {}
    }

    /// A device whose activation takes until somebody says so.
    struct Slow {
        begun: SyncSender<()>,
        go_on: Receiver<()>,
    }

    impl VirtioDevice for Slow {
        fn kind(&self) -> DeviceKind {
            DeviceKind::Rng
        }
        fn features(&self) -> u64 {
            0
        }
        fn queue_sizes(&self) -> &'static [u16] {
            &[]
        }
        fn config(&self) -> Vec<u8> {
            Vec::new()
        }
        fn activate(self: Box<Self>, activation: Activation) -> Box<dyn Worker> {
            self.begun.send(()).unwrap();
            self.go_on.recv().unwrap();
            Box::new(Rng::default()).activate(activation)
        }
        fn save(&self) -> DeviceState {
            Rng::default().save()
        }
        fn rewind(&mut self, _state: &DeviceState) {}
    }

    fn started() -> DeviceThread {
        let mut thread = DeviceThread::new().unwrap();
        thread.start().unwrap();
        thread
    }

    #[test]
    fn device_that_was_activated_before_the_thread_started_goes_on_there() {
        let mut thread = DeviceThread::new().unwrap();
        let handle = thread.handle().clone();
        handle.quiesce_all().unwrap();
        let id = handle.add(Box::new(Rng::default())).unwrap();
        handle.activate(id, 0, activation()).unwrap();
        thread.start().unwrap();
        assert!(matches!(handle.activate(id, 0, activation()), Err(DeviceError::AlreadyActive)));
        assert_eq!(handle.save(id).unwrap().in_flight, 0);
        handle.resume_all().unwrap();
        assert!(matches!(handle.save(id), Err(DeviceError::NotQuiet)));
        thread.stop().unwrap();
        assert!(matches!(handle.quiesce_all(), Err(DeviceError::Gone)));
    }

    #[test]
    fn devices_that_rest_are_called_where_one_is_and_go_on_afterwards() {
        let mut thread = started();
        let handle = thread.handle().clone();
        let id = handle.add(Box::new(Rng::default())).unwrap();
        handle.activate(id, 0, activation()).unwrap();
        for _ in 0..3 {
            thread.rest(CALL_DEADLINE).unwrap();
            thread.rest(CALL_DEADLINE).unwrap();
            assert!(thread.mailbox.inner().is_some());
            assert_eq!(handle.save(id).unwrap().in_flight, 0);
            handle.resume_all().unwrap();
            thread.start().unwrap();
            assert!(thread.mailbox.inner().is_none());
            assert!(matches!(handle.save(id), Err(DeviceError::NotQuiet)));
        }
        thread.rest(CALL_DEADLINE).unwrap();
        thread.stop().unwrap();
        assert!(matches!(handle.save(id), Err(DeviceError::Gone)));
    }

    #[test]
    fn devices_that_do_not_rest_in_time_go_on_and_can_be_asked_again() {
        let thread = started();
        let handle = thread.handle().clone();
        let ((begun, has_begun), (release, go_on)) = (mpsc::sync_channel(1), mpsc::sync_channel(1));
        let id = handle.add(Box::new(Slow { begun, go_on })).unwrap();
        std::thread::scope(|scope| {
            let activated = scope.spawn(|| handle.activate(id, 0, activation()));
            has_begun.recv().unwrap();
            let rests = thread.rest(Duration::from_millis(20));
            assert!(matches!(rests, Err(DeviceError::Timeout { .. })), "{rests:?}");
            release.send(()).unwrap();
            activated.join().unwrap().unwrap();
        });
        assert!(matches!(handle.save(id), Err(DeviceError::NotQuiet)));
        assert!(thread.mailbox.inner().is_none());
        thread.rest(CALL_DEADLINE).unwrap();
        assert_eq!(handle.save(id).unwrap().in_flight, 0);
        thread.stop().unwrap();
    }

    #[test]
    fn call_from_another_thread_is_answered_whoever_has_the_devices() {
        let mut thread = started();
        let handle = thread.handle().clone();
        let others = || (0..2_000).for_each(|_| handle.resume_all().unwrap());
        std::thread::scope(|scope| {
            let others = scope.spawn(others);
            while !others.is_finished() {
                thread.rest(CALL_DEADLINE).unwrap();
                thread.start().unwrap();
            }
        });
        thread.stop().unwrap();
    }

    #[test]
    fn call_after_the_end_of_a_thread_that_never_started_answers_gone() {
        let thread = DeviceThread::new().unwrap();
        let handle = thread.handle().clone();
        let id = handle.add(Box::new(Rng::default())).unwrap();
        handle.activate(id, 0, activation()).unwrap();
        thread.stop().unwrap();
        assert!(matches!(handle.reset(id, 1), Err(DeviceError::Gone)));
    }

    #[test]
    fn call_to_a_thread_that_died_answers_gone_at_once() {
        let mut thread = started();
        let handle = thread.handle().clone();
        let (id, start) = (handle.add(Box::new(Buggy)).unwrap(), Instant::now());
        assert!(matches!(handle.activate(id, 0, activation()), Err(DeviceError::Gone)));
        assert!(matches!(handle.quiesce_all(), Err(DeviceError::Gone)));
        assert!(matches!(thread.rest(CALL_DEADLINE), Err(DeviceError::Gone)));
        thread.start().unwrap();
        assert!(matches!(thread.stop(), Err(DeviceError::Gone)));
        assert!(start.elapsed() < CALL_DEADLINE / 2);
    }

    #[test]
    fn activation_that_a_reset_overtook_is_refused() {
        let handle = InlineLoop::new().handle();
        let id = handle.add(Box::new(Rng::default())).unwrap();
        handle.reset(id, 1).unwrap();
        assert!(matches!(handle.activate(id, 0, activation()), Err(DeviceError::Superseded)));
        handle.activate(id, 1, activation()).unwrap();
        assert!(matches!(handle.activate(id, 1, activation()), Err(DeviceError::AlreadyActive)));
    }

    #[test]
    fn call_about_a_device_of_another_thread_is_refused() {
        let (one, other) = (InlineLoop::new().handle(), InlineLoop::new().handle());
        let id = one.add(Box::new(Rng::default())).unwrap();
        assert!(matches!(other.reset(id, 0), Err(DeviceError::Unknown)));
        assert!(matches!(other.save(id), Err(DeviceError::Unknown)));
    }

    #[test]
    fn calls_from_many_threads_are_all_answered() {
        let thread = started();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..200).for_each(|_| thread.handle().resume_all().unwrap()));
            }
        });
        thread.stop().unwrap();
    }
}
