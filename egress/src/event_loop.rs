//! The event loop: waits for the link, the host's sockets and control clients, and calls whom it
//! concerns.

use std::fs::File;
use std::io;
use std::time::Instant;

use crate::control_server::ControlServer;
use crate::gateway::Gateway;
use crate::inherited::Inherited;
use crate::link::Link;
use crate::policy::Policy;
use crate::resolver::Resolver;
use crate::secrets::Secrets;
use crate::sys::Poller;
use crate::token::Token;

/// The open parts of a gateway.
pub struct Parts {
    pub poller: Poller,
    pub link: Link,
    pub inherited: Inherited,
    pub policy: Policy,
    pub secrets: Secrets,
    pub resolver: Resolver,
    pub control: Option<ControlServer>,
    pub log: Option<File>,
}

/// Carries the guest's traffic until the other end of the link is closed.
pub fn run(parts: Parts) -> io::Result<()> {
    let Parts { poller, link, inherited, policy, secrets, resolver, mut control, log } = parts;
    let mut gateway = Gateway::new(poller, (link, inherited), (policy, secrets), resolver, log)?;
    if let Some(control) = &control {
        control.watch(gateway.poller())?;
    }
    let mut alive = true;
    while alive {
        let clients = control.as_ref().and_then(ControlServer::deadline);
        let timeout = gateway.timeout(clients, Instant::now());
        let mut link_ready = false;
        for ready in gateway.poller().wait(Some(timeout))? {
            let now = Instant::now();
            match ready.token {
                Token::Link => link_ready |= ready.readable,
                Token::Question(number) => gateway.advance_question(number, now),
                Token::Connection(number) => {
                    gateway.note_connection(number, ready.readable, ready.writable);
                }
                Token::Association(number) => gateway.note_association(number),
                Token::Control | Token::Client(_) => {
                    if let Some(control) = &mut control {
                        control.serve(ready.token, &mut gateway, now);
                    }
                }
            }
        }
        alive = gateway.turn(link_ready, Instant::now())?;
        if let Some(control) = &mut control {
            control.expire(Instant::now());
        }
    }
    Ok(())
}
