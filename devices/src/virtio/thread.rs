//! The thread that runs all virtio devices, and how the other threads call it.
//!
//! Waits only point towards this thread: it waits for nothing but the kernel, so a call to it
//! always ends. Each call still has a deadline, and a call to a thread that has ended is an error,
//! never a hang. While a machine is being built there is no thread yet, and while it is paused the
//! thread has handed the devices over. Calls then run on the caller's thread, which saves a thread
//! switch for each of about a dozen calls.

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
use crate::ThreadEntry;

// Longer than any single request that a worker serves; only a broken host disk takes more.
pub const CALL_DEADLINE: Duration = Duration::from_secs(30);
// Callers wait for their answer, so this bounds the number of threads that call at once.
const CALL_SLOTS: usize = 64;

type CallResult = Result<Reply, DeviceError>;

/// Carries a command to a device loop and returns its reply.
pub trait DeviceCalls: Send + Sync {
    fn call(&self, command: Command) -> CallResult;
}

/// A cheap handle to the devices of one loop. Clones refer to one loop.
#[derive(Clone)]
pub struct DeviceHandle {
    calls: Arc<dyn DeviceCalls>,
}

impl DeviceHandle {
    pub fn new(calls: Arc<dyn DeviceCalls>) -> Self {
        Self { calls }
    }

    /// Transfers ownership of a device to the loop.
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

    /// Resets a device. When this returns, the device writes no guest memory and raises no
    /// interrupt until it is activated again.
    pub fn reset(&self, id: DeviceId, epoch: u64) -> Result<(), DeviceError> {
        self.calls.call(Command::Reset { id, epoch }).map(drop)
    }

    /// Quiesces every device. When this returns, no device touches guest memory until `resume_all`.
    /// The vCPUs must be paused first.
    pub fn quiesce_all(&self) -> Result<(), DeviceError> {
        self.calls.call(Command::Quiesce).map(drop)
    }

    pub fn resume_all(&self) -> Result<(), DeviceError> {
        self.calls.call(Command::Resume).map(drop)
    }

    /// Restores a saved state of an idle device.
    pub fn rewind(&self, id: DeviceId, state: DeviceState) -> Result<(), DeviceError> {
        self.calls.call(Command::Rewind { id, state: Box::new(state) }).map(drop)
    }

    pub fn save(&self, id: DeviceId) -> Result<SavedDevice, DeviceError> {
        match self.calls.call(Command::Save(id))? {
            Reply::Saved(saved) => Ok(*saved),
            _ => Err(DeviceError::Unknown),
        }
    }

    /// Changes a setting of a device, and returns what changed for the guest.
    pub fn update(&self, id: DeviceId, update: DeviceUpdate) -> Result<Updated, DeviceError> {
        match self.calls.call(Command::Update { id, update })? {
            Reply::Updated(updated) => Ok(updated),
            _ => Err(DeviceError::Unknown),
        }
    }
}

struct Call {
    kind: CallKind,
    answer: SyncSender<CallResult>,
}

enum CallKind {
    // Boxed, because every slot of the call queue has the size of the largest variant.
    Carry(Box<Command>),
    /// Quiesces the devices and puts them, with their pending calls, into `CallQueue::inner`,
    /// unless `given_up` is set. The flag is set under the lock of `inner`.
    HandOver {
        given_up: Arc<AtomicBool>,
    },
}

struct CallQueue {
    /// The devices and their pending calls, while the thread does not have them. A call is only
    /// sent under this lock, so that none goes to a thread that has handed the devices over.
    inner: Mutex<Option<Inner>>,
    calls: SyncSender<Call>,
    wake: Arc<EventFd>,
}

struct Inner {
    devices: DeviceLoop,
    inbox: Receiver<Call>,
}

impl CallQueue {
    fn inner(&self) -> MutexGuard<'_, Option<Inner>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceCalls for CallQueue {
    fn call(&self, command: Command) -> CallResult {
        let mut here = self.inner();
        match here.as_mut() {
            Some(inner) => inner.devices.handle(command),
            None => self.send(here, CallKind::Carry(Box::new(command)), CALL_DEADLINE),
        }
    }
}

impl CallQueue {
    /// Sends a call to the thread, which must have the devices, and waits for the answer.
    fn send(
        &self,
        no_devices_here: MutexGuard<'_, Option<Inner>>,
        kind: CallKind,
        patience: Duration,
    ) -> CallResult {
        let (answer, reply) = mpsc::sync_channel(1);
        self.calls.try_send(Call { kind, answer }).map_err(|error| match error {
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

    /// Takes the quiesced devices from the thread. If the thread does not hand them over in time it
    /// keeps them, and they continue.
    fn take_over(
        &self,
        no_devices_here: MutexGuard<'_, Option<Inner>>,
        patience: Duration,
    ) -> Result<(), DeviceError> {
        let given_up = Arc::new(AtomicBool::new(false));
        let kind = CallKind::HandOver { given_up: given_up.clone() };
        match self.send(no_devices_here, kind, patience) {
            Err(error @ DeviceError::Timeout { .. }) => {
                let place = self.inner();
                if place.is_some() {
                    // The thread handed them over at the last moment.
                    return Ok(());
                }
                given_up.store(true, Ordering::Relaxed);
                Err(error)
            }
            answer => answer.map(drop),
        }
    }
}

/// Owns the thread `pvmm-devices`. Dropping it stops the devices and joins the thread.
pub struct DeviceThread {
    handle: DeviceHandle,
    call_queue: Arc<CallQueue>,
    entry: Option<ThreadEntry>,
    running: Option<Running>,
}

struct Running {
    join: JoinHandle<()>,
    /// Returns the devices to the thread after it has handed them over.
    back: SyncSender<Inner>,
}

impl Running {
    fn start(call_queue: Arc<CallQueue>, entry: Option<ThreadEntry>) -> io::Result<Self> {
        let (back, again) = mpsc::sync_channel::<Inner>(1);
        let live = move || {
            if let Some(Err(error)) = entry.map(|enter| enter()) {
                log::error!("device thread ends: {error}");
                return;
            }
            while let Ok(inner) = again.recv() {
                if serve(inner, &call_queue).is_none() {
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
    /// Creates an empty device loop. There is no thread before [`Self::start`]: calls run on the
    /// caller's thread.
    pub fn new() -> io::Result<Self> {
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let devices = DeviceLoop::new().map_err(io::Error::other)?;
        let (calls, inbox) = mpsc::sync_channel(CALL_SLOTS);
        let inner = Mutex::new(Some(Inner { devices, inbox }));
        let call_queue = Arc::new(CallQueue { inner, calls, wake });
        let handle = DeviceHandle::new(call_queue.clone());
        Ok(Self { handle, call_queue, entry: None, running: None })
    }

    /// Sets the first step of the thread. It must not have been started.
    pub fn enter_with(&mut self, entry: Option<ThreadEntry>) {
        self.entry = entry;
    }

    /// Gives the devices to the thread, and starts it if there is none. Does nothing if the thread
    /// already has them.
    pub fn start(&mut self) -> io::Result<()> {
        let mut here = self.call_queue.inner();
        let Some(inner) = here.as_mut() else { return Ok(()) };
        let running = match self.running.take() {
            Some(running) => running,
            None => {
                let running = Running::start(self.call_queue.clone(), self.entry.clone())?;
                inner.devices.watch(self.call_queue.wake.clone());
                running
            }
        };
        let gone = |_| io::Error::other("the device thread has ended");
        let lent = here.take().map_or(Ok(()), |inner| running.back.send(inner).map_err(gone));
        self.running = Some(running);
        lent
    }

    /// Quiesces every device, as [`DeviceHandle::quiesce_all`] does, and takes them from the thread
    /// until [`Self::start`]. After an error the devices continue as before.
    pub fn rest(&self, patience: Duration) -> Result<(), DeviceError> {
        let here = self.call_queue.inner();
        if here.is_none() {
            return self.call_queue.take_over(here, patience);
        }
        drop(here);
        self.handle.quiesce_all()
    }

    pub fn handle(&self) -> &DeviceHandle {
        &self.handle
    }

    /// Stops every device and ends the thread. Calls through remaining handles return `Gone`.
    pub fn stop(mut self) -> Result<(), DeviceError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), DeviceError> {
        let answer = self.handle.calls.call(Command::Stop).map(drop);
        // Calls through remaining handles must return `Gone`.
        drop(self.call_queue.inner().take());
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
        let anything = self.running.is_some() || self.call_queue.inner().is_some();
        if let Some(Err(error)) = anything.then(|| self.end()) {
            log::error!("device thread did not stop: {error}");
        }
    }
}

/// Runs the devices until they are handed over. Returns None if they were stopped for good.
fn serve(mut inner: Inner, call_queue: &CallQueue) -> Option<()> {
    loop {
        if let Err(error) = inner.devices.poll(-1) {
            log::error!("device thread ends: {error}");
            return None;
        }
        while let Ok(Call { kind, answer }) = inner.inbox.try_recv() {
            let command = match kind {
                CallKind::Carry(command) => command,
                CallKind::HandOver { given_up } => {
                    match hand_over(inner, call_queue, &given_up, &answer) {
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

/// Quiesces the devices and hands them over to the caller. If the caller has given up, the devices
/// resume and are returned.
fn hand_over(
    mut inner: Inner,
    call_queue: &CallQueue,
    given_up: &AtomicBool,
    asked: &SyncSender<CallResult>,
) -> Option<Inner> {
    let go_on = |mut inner: Inner| {
        // Resuming cannot fail.
        let _ = inner.devices.handle(Command::Resume);
        Some(inner)
    };
    // Quiesce before taking the lock: requests in flight may take a while.
    let quiet = inner.devices.handle(Command::Quiesce);
    if quiet.is_err() {
        let _ = asked.send(quiet);
        return go_on(inner);
    }
    let mut place = call_queue.inner();
    if given_up.load(Ordering::Relaxed) {
        drop(place);
        return go_on(inner);
    }
    // Answer the calls sent so far; no call can be sent while the lock is held.
    while let Ok(Call { kind, answer }) = inner.inbox.try_recv() {
        let _ = answer.send(match kind {
            CallKind::Carry(command) => inner.devices.handle(*command),
            CallKind::HandOver { .. } => Ok(Reply::Done),
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
    use super::super::{Interrupt, Rings, Worker};
    use super::*;
    use crate::lines;

    fn activation() -> Activation {
        let (memory, interrupt) = (memory(), Interrupt::new(lines::testing::line().0));
        Activation { memory, features: 0, queues: Vec::new(), interrupt }
    }

    /// A device whose activation panics.
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
        fn activate(self: Box<Self>, _rings: &mut Rings, _features: u64) -> Box<dyn Worker> {
            panic!("a bug, on purpose")
        }
        fn save(&self) -> DeviceState {
            Rng::default().save()
        }
        fn rewind(&mut self, _state: &DeviceState) {}
    }

    /// A device whose activation blocks until `go_on` receives a message.
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
        fn activate(self: Box<Self>, rings: &mut Rings, features: u64) -> Box<dyn Worker> {
            self.begun.send(()).unwrap();
            self.go_on.recv().unwrap();
            Box::new(Rng::default()).activate(rings, features)
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
            assert!(thread.call_queue.inner().is_some());
            assert_eq!(handle.save(id).unwrap().in_flight, 0);
            handle.resume_all().unwrap();
            thread.start().unwrap();
            assert!(thread.call_queue.inner().is_none());
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
        assert!(thread.call_queue.inner().is_none());
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
