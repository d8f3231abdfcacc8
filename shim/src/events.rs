//! Tells containerd what happened, in order, over its events service.

use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::api::ForwardRequest;
use containerd_shim_protos::protobuf::MessageFull;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::ttrpc::context;
use containerd_shim_protos::{Client, EventsClient};

use crate::error::ShimError;

/// The variable by which containerd says where its events service is.
const ADDRESS: &str = "TTRPC_ADDRESS";
/// Events that wait while containerd is away.
const WAITING_MAX: usize = 1024;
/// How often an event is sent before it is given up, and the pause between two attempts: long
/// enough for a restart of containerd.
const ATTEMPTS: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);
const SEND_TIME: Duration = Duration::from_secs(5);

/// The longest time for what is left at the end.
const FLUSH_TIME: Duration = Duration::from_secs(10);

/// Hands events to the thread that sends them.
#[derive(Clone)]
pub struct Publisher {
    namespace: String,
    queue: SyncSender<Queued>,
}

enum Queued {
    Event(Box<Envelope>),
    /// All events before this were sent, or given up.
    Flush(SyncSender<()>),
}

impl Publisher {
    pub fn start(namespace: &str) -> Result<Self, ShimError> {
        let (queue, waiting) = mpsc::sync_channel(WAITING_MAX);
        let address = std::env::var(ADDRESS).unwrap_or_default();
        thread::Builder::new()
            .name("events".to_owned())
            .spawn(move || forward(&address, &waiting))
            .map_err(ShimError::io("thread"))?;
        Ok(Self { namespace: namespace.to_owned(), queue })
    }

    pub fn publish<M: MessageFull>(&self, topic: &str, event: &M) {
        let Ok(value) = event.write_to_bytes() else { return };
        let any = Any { type_url: M::descriptor().full_name().to_owned(), value, ..Any::default() };
        let mut envelope = Envelope::new();
        envelope.set_timestamp(SystemTime::now().into());
        envelope.set_namespace(self.namespace.clone());
        envelope.set_topic(topic.to_owned());
        envelope.set_event(any);
        if self.queue.try_send(Queued::Event(Box::new(envelope))).is_err() {
            log::warn!("containerd does not take events; {topic} is lost");
        }
    }

    /// Waits until everything was sent, a few seconds at most.
    pub fn flush(&self) {
        let (done, wait) = mpsc::sync_channel(1);
        if self.queue.try_send(Queued::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(FLUSH_TIME);
        }
    }
}

fn forward(address: &str, waiting: &Receiver<Queued>) {
    let mut client = None;
    for queued in waiting {
        let envelope = match queued {
            Queued::Event(envelope) => *envelope,
            Queued::Flush(done) => {
                let _ = done.send(());
                continue;
            }
        };
        let topic = envelope.topic.clone();
        let mut request = ForwardRequest::new();
        request.set_envelope(envelope);
        let sent = (0..ATTEMPTS).any(|attempt| {
            if attempt > 0 {
                thread::sleep(PAUSE);
            }
            send(address, &mut client, &request)
        });
        if !sent {
            log::warn!("containerd did not take the event {topic}");
        }
    }
}

fn send(address: &str, client: &mut Option<EventsClient>, request: &ForwardRequest) -> bool {
    if client.is_none() {
        *client = Client::connect(&format!("unix://{address}")).map(EventsClient::new).ok();
    }
    let Some(connected) = client else { return false };
    let time = context::with_timeout(SEND_TIME.as_nanos() as i64);
    let sent = connected.forward(time, request).is_ok();
    if !sent {
        *client = None;
    }
    sent
}
