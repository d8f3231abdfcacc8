//! The sandboxes of one conversation: made at the first call that needs one, ended with it.
//!
//! A sandbox also has a time to live, which each call renews. It ends by that time whatever
//! happens to the server, because its monitor keeps the time.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::{Mutex, OwnedMutexGuard, RwLock};

use crate::app::{App, Entry};
use crate::blocking::to_the_end;
use crate::clock;
use crate::error::ApiError;
use crate::life;
use crate::resources::lifecycle;
use crate::resources::sandboxes::{self, Create};
use crate::store::SandboxRow;

/// How long a call waits for a template that is being baked; clients wait a minute.
const BAKE_PATIENCE: Duration = Duration::from_secs(50);
/// The rest between two attempts.
const REST: Duration = Duration::from_secs(1);
/// How long the end of a conversation waits for sandboxes that are being made.
const END_PATIENCE: Duration = Duration::from_secs(60);
/// The metadata that marks sandboxes of conversations in listings of the service.
const MARK: (&str, &str) = ("made_by", "mcp");

/// The properties of sandboxes whose call does not name them.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// The template.
    pub template: String,
    /// The number of vCPUs; the template's by default.
    pub cpus: Option<u32>,
    /// The guest memory in MiB; the template's by default.
    pub memory_mib: Option<u64>,
    /// How long a sandbox lives without a call.
    pub ttl: Duration,
}

/// One conversation of an agent.
#[derive(Clone)]
pub struct Conversation {
    app: Arc<App>,
    defaults: Arc<Defaults>,
    /// The sandbox of calls that name none. Locked while it is being made, so that two calls at
    /// once make one.
    own: Arc<Mutex<Option<String>>>,
    /// The turns of code in the interpreters of sandboxes, which run one code at a time.
    turns: Arc<std::sync::Mutex<HashMap<String, Arc<Mutex<()>>>>>,
    /// The sandboxes that the conversation has made.
    made: Arc<std::sync::Mutex<Vec<String>>>,
    /// Whether the conversation has ended. Read-locked while a sandbox is being made, so that the
    /// end does not miss it.
    ended: Arc<RwLock<bool>>,
}

/// The right to run code in a sandbox, until it is dropped.
pub type Turn = OwnedMutexGuard<()>;

/// A sandbox that a call uses.
pub struct Used {
    /// The id.
    pub id: String,
    /// Words for the model, if the sandbox is not the one that it may believe in.
    pub note: Option<&'static str>,
}

impl Conversation {
    /// Begins a conversation without sandboxes.
    pub fn new(app: Arc<App>, defaults: Defaults) -> Self {
        let (own, made, ended) = (Arc::default(), Arc::default(), Arc::default());
        let (defaults, turns) = (Arc::new(defaults), Arc::default());
        Self { app, defaults, own, turns, made, ended }
    }

    /// Returns the same conversation, whose sandboxes are made with other defaults from now on.
    pub fn with(&self, defaults: Defaults) -> Self {
        Self { defaults: Arc::new(defaults), ..self.clone() }
    }

    /// Returns the state of the server.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Returns the sandbox that a call names, or else the conversation's own, which is made if
    /// there is none. Its time to live begins anew.
    pub async fn sandbox(&self, owner: &str, named: Option<String>) -> Result<Used, ApiError> {
        let used = match named {
            Some(id) => Used { id, note: None },
            None => self.own_or_new(owner).await?,
        };
        self.renew(&used.id).await?;
        Ok(used)
    }

    async fn own_or_new(&self, owner: &str) -> Result<Used, ApiError> {
        let mut own = self.own.lock().await;
        if let Some(id) = own.as_ref().filter(|id| self.app.find(id).is_ok()) {
            return Ok(Used { id: id.clone(), note: None });
        }
        let row = self.make(owner, Create::default()).await?;
        let former = own.replace(row.id.clone());
        let note = "[note: the former sandbox has ended; this is a new one without its state]";
        Ok(Used { id: row.id, note: former.map(|_| note) })
    }

    /// Returns the conversation's own sandbox, if it has one.
    pub async fn own(&self) -> Option<String> {
        self.own.lock().await.clone()
    }

    /// Returns the sandbox that is to be ended: the named one, or else the conversation's own. The
    /// conversation no longer has it as its own.
    pub async fn leave(&self, named: Option<String>) -> Option<String> {
        let mut own = self.own.lock().await;
        let id = named.or_else(|| own.clone())?;
        own.take_if(|own| *own == id);
        self.turns.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        Some(id)
    }

    /// Waits until no other call of the conversation runs code in this sandbox. An agent may make
    /// several calls at once.
    pub async fn turn(&self, id: &str, patience: Duration) -> Result<Turn, ApiError> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(turns.entry(id.to_owned()).or_default())
        };
        let turn = tokio::time::timeout(patience, turn.lock_owned()).await;
        turn.map_err(|_| {
            ApiError::conflict("other code still runs in the sandbox: wait for it, or use a fork")
        })
    }

    /// Makes a sandbox that becomes the conversation's own.
    pub async fn create(&self, owner: &str, wish: Create) -> Result<SandboxRow, ApiError> {
        let mut own = self.own.lock().await;
        let row = self.make(owner, wish).await?;
        *own = Some(row.id.clone());
        Ok(row)
    }

    /// Makes a sandbox of the defaults, apart from what is wished for. Waits for a template that is
    /// being baked.
    async fn make(&self, owner: &str, wish: Create) -> Result<SandboxRow, ApiError> {
        let deadline = Instant::now() + BAKE_PATIENCE;
        loop {
            let body = self.body(&wish);
            let (app, who) = (Arc::clone(&self.app), owner.to_owned());
            let call = async move {
                let row = sandboxes::start(&app, body.request(who)?).await?;
                Ok(vec![row])
            };
            let outcome = self.making(call).await;
            let baking = |error: &ApiError| {
                error.code == "unavailable" && self.app.bakes.is_busy() && Instant::now() < deadline
            };
            match outcome {
                Err(error) if baking(&error) => tokio::time::sleep(REST).await,
                outcome => {
                    let row = outcome?.pop();
                    return row.ok_or_else(|| ApiError::internal("no sandbox was made"));
                }
            }
        }
    }

    fn body(&self, wish: &Create) -> Create {
        // The defaults' sizes are for their template.
        let same = wish.template.is_none();
        let defaults = &self.defaults;
        Create {
            template: Some(wish.template.clone().unwrap_or_else(|| defaults.template.clone())),
            cpu: wish.cpu.or(defaults.cpus.filter(|_| same)),
            memory_mb: wish.memory_mb.or(defaults.memory_mib.filter(|_| same)),
            ttl_seconds: Some(wish.ttl_seconds.unwrap_or(defaults.ttl.as_secs())),
            metadata: Some([(MARK.0.to_owned(), MARK.1.to_owned())].into()),
            ..Create::default()
        }
    }

    /// Forks a sandbox; the forks belong to the conversation.
    pub async fn fork(
        &self,
        owner: &str,
        id: &str,
        count: usize,
    ) -> Result<Vec<SandboxRow>, ApiError> {
        let (app, owner, id) = (Arc::clone(&self.app), owner.to_owned(), id.to_owned());
        let metadata = [(MARK.0.to_owned(), MARK.1.to_owned())].into();
        self.making(async move { life::fork(&app, &id, &owner, count, metadata, None).await }).await
    }

    /// Runs a call that makes sandboxes to its end, and notes the sandboxes as the conversation's.
    async fn making(
        &self,
        call: impl Future<Output = Result<Vec<SandboxRow>, ApiError>> + Send + 'static,
    ) -> Result<Vec<SandboxRow>, ApiError> {
        let ended = Arc::clone(&self.ended).read_owned().await;
        let conversation = self.clone();
        to_the_end(async move {
            if *ended {
                return Err(ApiError::conflict("the conversation has ended"));
            }
            let rows = call.await?;
            conversation.made().extend(rows.iter().map(|row| row.id.clone()));
            Ok(rows)
        })
        .await
    }

    fn made(&self) -> MutexGuard<'_, Vec<String>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a sandbox of the conversation live on, if half of its time has passed.
    async fn renew(&self, id: &str) -> Result<(), ApiError> {
        let row = self.find(id)?.row();
        let (Some(ttl_s), Some(expires_ms)) = (row.ttl_s, row.expires_ms) else { return Ok(()) };
        let left_ms = expires_ms.saturating_sub(clock::now_ms());
        if left_ms >= ttl_s * 500 || !self.made().iter().any(|other| other == id) {
            return Ok(());
        }
        let (app, id) = (Arc::clone(&self.app), id.to_owned());
        let set = async move { lifecycle::set(&app, &id, Some(ttl_s), None).await };
        to_the_end(set).await.map(drop)
    }

    /// Returns a sandbox, or an error that says where to find others.
    fn find(&self, id: &str) -> Result<Arc<Entry>, ApiError> {
        self.app.find(id).map_err(|mut error| {
            error.message.push_str("; sandbox_list shows those that there are");
            error
        })
    }

    /// Ends the conversation and every sandbox that it has made, also one that is being made now.
    pub async fn end(&self) {
        match tokio::time::timeout(END_PATIENCE, self.ended.write()).await {
            Ok(mut ended) => *ended = true,
            Err(_) => log::error!("a sandbox is still being made at the end of a conversation"),
        }
        let made = std::mem::take(&mut *self.made());
        let ends = made.iter().filter_map(|id| self.app.find(id).ok()).map(|entry| async move {
            if let Err(error) = life::end(&self.app, &entry).await {
                log::error!("sandbox {}: {}", entry.row().id, error.message);
            }
        });
        join_all(ends).await;
    }
}
