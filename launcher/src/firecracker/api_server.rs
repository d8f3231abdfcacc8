//! The thread that owns the VM and the API socket: an event loop that waits for clients, signals,
//! guest exits and finished commands, and handles each.
//!
//! Requests are carried out one after another, in the order in which they become complete;
//! `rules.rs` says which request is allowed when, and what each does.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pvmm::{FilterError, Outcome};

use super::args::{Args, SeccompChoice, VERSION, code};
use super::before_boot::BeforeBoot;
use super::bodies;
use super::config_file;
use super::exec::Execs;
use super::http::{self, Answer, Refusal};
use super::http_server::{ClientId, HttpServer};
use super::keyboard::Keyboard;
use super::logger;
use super::metrics::Metrics;
use super::mmds::Mmds;
use super::routes;
use super::rules::Done;
use super::running::Running;
use super::seccomp_file;
use pvmm_sandbox::seccomp::Filters;
use pvmm_sandbox::sys::poll::{self, Want};
use pvmm_sandbox::sys::signals::{self, Signals};

/// How long the VM's threads, its console and the last answers may take to finish.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

/// Signals that mean a fault in this process, and the exit codes that report them to a supervisor.
const BROKEN: &[(i32, u8)] = &[
    (libc::SIGSYS, code::BAD_SYSCALL),
    (libc::SIGBUS, code::SIGBUS),
    (libc::SIGSEGV, code::SIGSEGV),
    (libc::SIGILL, code::SIGILL),
];
const HELD: [i32; 6] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGXCPU, libc::SIGXFSZ];

/// Why the process ends.
enum End {
    Guest(Outcome),
    Signal(i32),
    /// A snapshot or fork could not be loaded, and the process is in no state to try again.
    Unusable,
    Failed(String),
}

pub enum MachineStage {
    Before(Box<BeforeBoot>),
    Running(Box<Running>),
}

/// The API server: the VM, or its configuration, and everything that the event loop waits for.
pub struct ApiServer {
    pub(super) id: String,
    server: Option<HttpServer>,
    signals: Signals,
    pub(super) keyboard: Option<Keyboard>,
    pub(super) metrics: Metrics,
    pub(super) mmds: Mmds,
    pub(super) execs: Execs,
    pub(super) boot_timer: bool,
    pub(super) drive_root: Option<PathBuf>,
    pub(super) filters: Option<Filters>,
    /// Whether this thread's own filter is in force.
    confined: bool,
    pub(super) state: MachineStage,
}

/// Runs the API server until the VM or the process ends, and returns the exit code.
pub fn run(args: Args) -> u8 {
    logger::start(&args.id);
    let opened = ApiServer::open(args);
    let end = match opened {
        Ok(mut api_server) => {
            let end = api_server.serve();
            api_server.finish();
            end
        }
        Err((code, message)) => {
            log::error!("{message}");
            eprintln!("Error: {message}");
            return code;
        }
    };
    crate::sys::terminal::restore();
    let code = match end {
        End::Guest(outcome) => outcome_code(&outcome),
        End::Signal(signal) => signal_code(signal),
        End::Unusable => code::GENERIC,
        End::Failed(message) => {
            log::error!("{message}");
            eprintln!("Error: {message}");
            code::GENERIC
        }
    };
    log::info!("Firecracker exiting. exit_code={code}");
    code
}

fn outcome_code(outcome: &Outcome) -> u8 {
    match outcome {
        Outcome::Poweroff | Outcome::Reboot | Outcome::TripleFault => code::OK,
        other => {
            log::error!("The guest ended: {other:?}");
            code::GENERIC
        }
    }
}

/// Returns Firecracker's exit code for a signal that has one; otherwise the process dies of the
/// signal, as any program does.
fn signal_code(signal: i32) -> u8 {
    log::info!("Received signal {signal}.");
    match signal {
        libc::SIGHUP => code::SIGHUP,
        libc::SIGXCPU => code::SIGXCPU,
        libc::SIGXFSZ => code::SIGXFSZ,
        other => {
            signals::die_of(other);
            code::GENERIC
        }
    }
}

impl ApiServer {
    fn open(args: Args) -> Result<Self, (u8, String)> {
        let generic = |message: String| (code::GENERIC, message);
        let failed = |what: &'static str| {
            move |error: io::Error| (code::GENERIC, format!("{what}: {error}"))
        };
        logger::configure(&bodies::Logger {
            log_path: args.log_path.clone(),
            level: args.level,
            show_level: args.show_level.then_some(true),
            show_log_origin: args.show_log_origin.then_some(true),
            module: args.module.clone(),
        })
        .map_err(failed("log-path"))?;
        log::info!("Running Firecracker v{VERSION}");
        signals::end_with(BROKEN);
        let signals = Signals::hold(&HELD).map_err(failed("signals"))?;
        let filters = filters(&args.seccomp).map_err(generic)?;
        let mut metrics = Metrics::new(&args.id);
        if let Some(metrics_path) = args.metrics_path.clone() {
            let wish = bodies::Metrics { metrics_path, emit_id: false, properties: None };
            metrics.configure(wish).map_err(|refusal| generic(refusal.message))?;
        }
        let mut mmds = Mmds::new(args.mmds_max);
        let read = |path| config_file::read(path).map_err(generic);
        if let Some(path) = &args.metadata {
            config_file::metadata(&read(path)?, &mut mmds)
                .map_err(|refusal| generic(refusal.message))?;
            log::info!("Successfully added metadata to mmds from file");
        }
        let description = args.config_file.as_deref().map(read).transpose()?;
        let server = if args.no_api { None } else { Some(listen(&args)?) };
        metrics.note_start(args.start_time_us, args.start_time_cpu_us, args.parent_cpu_time_us);
        let mut api_server = Self {
            id: args.id,
            server,
            signals,
            keyboard: None,
            metrics,
            mmds,
            execs: Execs::new().map_err(failed("event"))?,
            state: MachineStage::Before(Box::default()),
            boot_timer: args.boot_timer,
            drive_root: args.drive_root.clone(),
            filters,
            confined: false,
        };
        if let Some(text) = description {
            let refused = |code| move |refusal: Refusal| (code, refusal.message);
            let before = config_file::apply(&text, &mut api_server.metrics)
                .map_err(refused(code::BAD_CONFIGURATION))?;
            if before.config.mmds_config.is_some() {
                api_server.mmds.make_present();
            }
            api_server.state = MachineStage::Before(Box::new(before));
            api_server.start().map_err(refused(code::GENERIC))?;
            log::info!("Successfully started microvm that was configured from one single json");
        }
        Ok(api_server)
    }

    /// Runs the event loop until there is a reason to end.
    fn serve(&mut self) -> End {
        if matches!(self.state, MachineStage::Running(_)) {
            self.flush_metrics_quietly();
        }
        loop {
            if let Err(error) = self.confine() {
                return End::Failed(format!("Seccomp error: {error}"));
            }
            match self.turn() {
                Ok(None) => {}
                Ok(Some(end)) => return end,
                Err(error) => return End::Failed(format!("cannot wait: {error}")),
            }
        }
    }

    /// Installs this thread's filter once the guest has run. The threads of the VM exist then, and
    /// do not inherit it.
    fn confine(&mut self) -> Result<(), FilterError> {
        let MachineStage::Running(running) = &self.state else { return Ok(()) };
        if let Some(filters) = self.filters.as_ref().filter(|_| !self.confined)
            && !running.is_paused()
        {
            filters.owner.install()?;
            self.confined = true;
        }
        Ok(())
    }

    fn turn(&mut self) -> io::Result<Option<End>> {
        let mut wants = vec![
            (self.signals.as_fd(), Want::Read),
            (poll::borrowed(&self.execs.event), Want::Read),
        ];
        let machine = match &self.state {
            MachineStage::Running(running) => Some(running),
            MachineStage::Before(_) => None,
        };
        let machine_at = wants.len();
        if let Some(running) = machine {
            wants.push((running.vm.outcome_fd(), Want::Read));
        }
        let keys_at = wants.len();
        if let (Some(running), Some(keyboard)) = (machine, &self.keyboard) {
            if keyboard.waits_for_room() {
                wants.push((running.vm.serial_room_fd(), Want::Read));
            } else if let Some(keys) = keyboard.as_fd() {
                wants.push((keys, Want::Read));
            }
        }
        let server_at = wants.len();
        wants.extend(self.server.iter().flat_map(HttpServer::wants));
        let due = self.server.as_ref().and_then(HttpServer::deadline);
        let learn_at = machine.and_then(|running| running.learner.as_ref()?.due());
        let until = [due, self.metrics.due(), learn_at].into_iter().flatten().min();
        let patience = until.map(|at| at.saturating_duration_since(Instant::now()));
        let ready = poll::wait(&wants, patience)?;
        let has = |at: usize| ready[at].read || ready[at].gone;

        if has(0) {
            return Ok(Some(End::Signal(self.signals.next()?)));
        }
        if machine_at < keys_at && has(machine_at) {
            return Ok(self.outcome().map(End::Guest));
        }
        if keys_at < server_at && has(keys_at) {
            self.pass_keys_on();
        }
        if has(1) {
            for (client, answer) in self.execs.take_ended() {
                self.answer(client, &answer);
            }
        }
        if self.metrics.due().is_some_and(|due| due <= Instant::now()) {
            self.flush_metrics_quietly();
        }
        if let MachineStage::Running(running) = &mut self.state {
            running.learn_if_due();
        }
        let ready = &ready[server_at..];
        let now = Instant::now();
        let mut requests =
            self.server.as_mut().map(|server| server.advance(ready, now)).unwrap_or_default();
        while !requests.is_empty() {
            for (client, request) in requests {
                if let Some(end) = self.take(client, request) {
                    return Ok(Some(end));
                }
            }
            let more = self.server.as_mut().map(|server| server.whole_requests(now));
            requests = more.unwrap_or_default();
        }
        Ok(None)
    }

    fn outcome(&self) -> Option<Outcome> {
        match &self.state {
            MachineStage::Running(running) => running.vm.wait(Some(STOP_PATIENCE)),
            MachineStage::Before(_) => None,
        }
    }

    fn pass_keys_on(&mut self) {
        if let (MachineStage::Running(running), Some(keyboard)) = (&self.state, &mut self.keyboard)
        {
            keyboard.pass_on(&running.vm);
        }
    }

    fn answer(&mut self, client: ClientId, answer: &Answer) {
        match (&answer.body, answer.status) {
            (Some(body), 400..) => log::error!("Status code: {}. {body}", answer.status),
            _ => {
                log::info!("The request was executed successfully. Status code: {}.", answer.status)
            }
        }
        if let Some(server) = &mut self.server {
            server.answer(client, answer);
        }
    }

    /// Carries out one request; returns an `End` if the process must end after it.
    fn take(&mut self, client: ClientId, request: http::HttpRequest) -> Option<End> {
        let http::HttpRequest { method, path, body, .. } = request;
        log::info!("{}", described(method, &path, body.as_deref()));
        let routed = routes::route(method, &path, body.as_deref());
        let had_none = matches!(self.state, MachineStage::Before(_));
        let deprecated = routed.as_ref().is_ok_and(|routed| routed.deprecated.is_some());
        if deprecated {
            self.metrics.count_deprecated();
        }
        let done = routed.and_then(|routed| {
            if let Some(what) = routed.deprecated {
                log::warn!("{} {path}: {what} is deprecated.", method.name());
            }
            self.perform(client, routed.request)
        });
        let (answer, fatal) = match done {
            Ok(Done::Answer(answer)) => (answer, false),
            Ok(Done::Fatal(answer)) => (answer, true),
            Ok(Done::Later) => return None,
            Err(refusal) => (refusal.into(), false),
        };
        self.metrics.count_request(method, &path, answer.status >= 400);
        self.answer(client, &Answer { deprecated, ..answer });
        if had_none && matches!(self.state, MachineStage::Running(_)) {
            self.flush_metrics_quietly();
        }
        fatal.then_some(End::Unusable)
    }

    fn flush_metrics_quietly(&mut self) {
        let machine = match &self.state {
            MachineStage::Running(running) => Some(&**running),
            MachineStage::Before(_) => None,
        };
        if let Err(error) = self.metrics.flush(machine) {
            log::error!("Failed to flush metrics: {error}");
        }
    }

    /// Flushes the metrics, the pending answers and the guest's console before the process ends.
    fn finish(mut self) {
        self.flush_metrics_quietly();
        if let Some(server) = &mut self.server {
            server.flush(STOP_PATIENCE);
        }
        self.keyboard = None;
        let MachineStage::Running(running) = self.state else { return };
        let (done, stopped) = mpsc::channel();
        let stopping = std::thread::Builder::new().name("stop".to_owned()).spawn(move || {
            drop(running);
            let _ = done.send(());
        });
        if stopping.is_ok() {
            let _ = stopped.recv_timeout(STOP_PATIENCE);
        }
    }
}

fn filters(choice: &SeccompChoice) -> Result<Option<Filters>, String> {
    let failed = |error: String| format!("Seccomp error: {error}");
    match choice {
        SeccompChoice::BuiltIn => {
            Filters::of_api_server().map(Some).map_err(|error| failed(error.to_string()))
        }
        SeccompChoice::File(path) => seccomp_file::read(path).map(Some).map_err(failed),
        SeccompChoice::Off => Ok(None),
    }
}

fn listen(args: &Args) -> Result<HttpServer, (u8, String)> {
    let path = &args.api_sock;
    let server = HttpServer::bind(path, args.body_max).map_err(|error| {
        let message = match error.kind() {
            io::ErrorKind::AddrInUse => format!(
                "Failed to open the API socket at: {}. Check that it is not already used.",
                path.display()
            ),
            _ => format!("Failed to bind and run the HTTP server at {}: {error}", path.display()),
        };
        (code::GENERIC, message)
    })?;
    log::info!("Listening on API socket ({path:?}).");
    Ok(server)
}

/// Formats a request for the log. Bodies of metadata requests, and of commands with their
/// environment and input, may hold secrets: they are left out, however many slashes the path begins
/// with.
fn described(method: http::Method, path: &str, body: Option<&[u8]>) -> String {
    let asked = format!("The API server received a {} request on {path:?}", method.name());
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    match body {
        Some(body) if !matches!(first, "mmds" | "pvmm") => {
            format!("{asked} with body {:?}.", String::from_utf8_lossy(body))
        }
        _ => format!("{asked}."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_that_may_hold_a_secret_is_not_in_the_log() {
        let put = |path: &str| described(http::Method::Put, path, Some(b"{\"env\":\"hush\"}"));
        for path in ["/mmds", "//mmds", "/mmds/config", "/pvmm/exec", "///pvmm/exec", "/pvmm//exec"]
        {
            assert!(!put(path).contains("hush"), "{path}");
            assert!(put(path).contains(path), "{path}");
        }
        assert!(put("/machine-config").contains("hush"));
    }
}
