//! containerd's task API: each call is looked at, handed to the pod, and its answer written.

use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ProcessInfo, ResizePtyRequest, ResumeRequest,
    ShutdownRequest, StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest,
    StatsResponse, Status, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::cgroups_v2::metrics::Metrics;
use containerd_shim_protos::events::task as event;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message, MessageFull};
use containerd_shim_protos::ttrpc::{Result, TtrpcContext};
use containerd_shim_protos::{Task, topics};
use pvmm::exec::WindowSize;

use crate::bundle::Bundle;
use crate::error::ShimError;
use crate::pod::Pod;
use crate::process::{Exit, lock};
use crate::stdio::Paths;

pub struct TaskService {
    pod: Arc<Pod>,
    /// Held while a process is started: its end is told after its start.
    starting: Arc<Mutex<()>>,
    /// Says that the pod is not needed any more.
    ended: Sender<()>,
}

impl TaskService {
    pub fn new(pod: Arc<Pod>, ended: Sender<()>) -> Self {
        Self { pod, starting: Arc::default(), ended }
    }

    /// Returns what is done when a process ends: containerd is told.
    fn exit_event(&self, id: &str, exec_id: &str) -> impl FnOnce(Exit) + Send + 'static {
        let (events, pid) = (self.pod.events.clone(), self.pod.pid());
        let starting = self.starting.clone();
        let (container, process) = (id.to_owned(), name_of(id, exec_id));
        move |exit| {
            drop(lock(&starting));
            if exit.oom {
                let mut event = event::TaskOOM::new();
                event.set_container_id(container.clone());
                events.publish(topics::TASK_OOM_EVENT_TOPIC, &event);
            }
            let mut event = event::TaskExit::new();
            event.set_container_id(container);
            event.set_id(process);
            event.set_pid(pid);
            event.set_exit_status(exit.status);
            event.set_exited_at(exit.at.into());
            events.publish(topics::TASK_EXIT_EVENT_TOPIC, &event);
        }
    }
}

/// Returns the name of a process in events: that of its container for the first one.
fn name_of(id: &str, exec_id: &str) -> String {
    if exec_id.is_empty() { id.to_owned() } else { exec_id.to_owned() }
}

impl Task for TaskService {
    fn create(&self, _: &TtrpcContext, asked: CreateTaskRequest) -> Result<CreateTaskResponse> {
        if !asked.checkpoint.is_empty() {
            return Err(ShimError::Unimplemented("a task cannot begin from a checkpoint").into());
        }
        let paths = Paths {
            stdin: asked.stdin.clone(),
            stdout: asked.stdout.clone(),
            stderr: asked.stderr.clone(),
            terminal: asked.terminal,
        };
        let bundle = Bundle::at(&asked.bundle)?;
        self.pod.create(&asked.id, bundle, &asked.rootfs, paths)?;
        let mut io = event::TaskIO::new();
        io.set_stdin(asked.stdin);
        io.set_stdout(asked.stdout);
        io.set_stderr(asked.stderr);
        io.set_terminal(asked.terminal);
        let mut event = event::TaskCreate::new();
        event.set_container_id(asked.id);
        event.set_bundle(asked.bundle);
        event.set_rootfs(asked.rootfs);
        event.set_io(io);
        event.set_pid(self.pod.pid());
        self.pod.events.publish(topics::TASK_CREATE_EVENT_TOPIC, &event);
        let mut answer = CreateTaskResponse::new();
        answer.set_pid(self.pod.pid());
        Ok(answer)
    }

    fn start(&self, _: &TtrpcContext, asked: StartRequest) -> Result<StartResponse> {
        let (container, pid) = (self.pod.container(&asked.id)?, self.pod.pid());
        let ended = self.exit_event(&asked.id, &asked.exec_id);
        let _starting = lock(&self.starting);
        if asked.exec_id.is_empty() {
            let mut event = event::TaskStart::new();
            event.set_container_id(asked.id.clone());
            event.set_pid(pid);
            container.start(ended)?;
            self.pod.events.publish(topics::TASK_START_EVENT_TOPIC, &event);
        } else {
            let mut event = event::TaskExecStarted::new();
            event.set_container_id(asked.id.clone());
            event.set_exec_id(asked.exec_id.clone());
            event.set_pid(pid);
            container.start_added(&asked.exec_id, ended)?;
            self.pod.events.publish(topics::TASK_EXEC_STARTED_EVENT_TOPIC, &event);
        }
        let mut answer = StartResponse::new();
        answer.set_pid(pid);
        Ok(answer)
    }

    fn exec(&self, _: &TtrpcContext, asked: ExecProcessRequest) -> Result<Empty> {
        let container = self.pod.container(&asked.id)?;
        let spec = serde_json::from_slice(&asked.spec.value)
            .map_err(|error| ShimError::Invalid(format!("process: {error}")))?;
        let paths = Paths {
            stdin: asked.stdin,
            stdout: asked.stdout,
            stderr: asked.stderr,
            terminal: asked.terminal,
        };
        container.add(&asked.exec_id, spec, paths)?;
        let mut event = event::TaskExecAdded::new();
        event.set_container_id(asked.id);
        event.set_exec_id(asked.exec_id);
        self.pod.events.publish(topics::TASK_EXEC_ADDED_EVENT_TOPIC, &event);
        Ok(Empty::new())
    }

    fn state(&self, _: &TtrpcContext, asked: StateRequest) -> Result<StateResponse> {
        let container = self.pod.container(&asked.id)?;
        let process = container.process(&asked.exec_id)?;
        let mut answer = StateResponse::new();
        let status = match process.exit() {
            Some(exit) => {
                answer.set_exit_status(exit.status);
                answer.set_exited_at(exit.at.into());
                Status::STOPPED
            }
            None if !process.is_running() => Status::CREATED,
            None if container.is_paused() => Status::PAUSED,
            None => Status::RUNNING,
        };
        answer.set_status(status);
        answer.set_id(asked.id);
        answer.set_exec_id(asked.exec_id);
        answer.set_bundle(container.bundle.path().to_string_lossy().into_owned());
        answer.set_pid(self.pod.pid());
        answer.set_stdin(process.paths.stdin.clone());
        answer.set_stdout(process.paths.stdout.clone());
        answer.set_stderr(process.paths.stderr.clone());
        answer.set_terminal(process.paths.terminal);
        Ok(answer)
    }

    fn wait(&self, _: &TtrpcContext, asked: WaitRequest) -> Result<WaitResponse> {
        let exit = self.pod.container(&asked.id)?.process(&asked.exec_id)?.wait();
        let mut answer = WaitResponse::new();
        answer.set_exit_status(exit.status);
        answer.set_exited_at(exit.at.into());
        Ok(answer)
    }

    fn kill(&self, _: &TtrpcContext, asked: KillRequest) -> Result<Empty> {
        let container = self.pod.container(&asked.id)?;
        if let Some(exit) = container.kill(&asked.exec_id, asked.signal, asked.all)? {
            self.exit_event(&asked.id, &asked.exec_id)(exit);
        }
        Ok(Empty::new())
    }

    fn delete(&self, _: &TtrpcContext, asked: DeleteRequest) -> Result<DeleteResponse> {
        let (container, pid) = (self.pod.container(&asked.id)?, self.pod.pid());
        let exit = if asked.exec_id.is_empty() {
            let exit = container.remove()?;
            self.pod.forget(&asked.id);
            let mut event = event::TaskDelete::new();
            event.set_container_id(asked.id.clone());
            event.set_pid(pid);
            event.set_exit_status(exit.status);
            event.set_exited_at(exit.at.into());
            self.pod.events.publish(topics::TASK_DELETE_EVENT_TOPIC, &event);
            exit
        } else {
            container.forget(&asked.exec_id)?
        };
        let mut answer = DeleteResponse::new();
        answer.set_pid(pid);
        answer.set_exit_status(exit.status);
        answer.set_exited_at(exit.at.into());
        Ok(answer)
    }

    fn pids(&self, _: &TtrpcContext, asked: PidsRequest) -> Result<PidsResponse> {
        self.pod.container(&asked.id)?;
        let mut info = ProcessInfo::new();
        info.set_pid(self.pod.pid());
        let mut answer = PidsResponse::new();
        answer.set_processes(vec![info]);
        Ok(answer)
    }

    fn pause(&self, _: &TtrpcContext, asked: PauseRequest) -> Result<Empty> {
        self.pod.container(&asked.id)?.pause()?;
        let mut event = event::TaskPaused::new();
        event.set_container_id(asked.id);
        self.pod.events.publish(topics::TASK_PAUSED_EVENT_TOPIC, &event);
        Ok(Empty::new())
    }

    fn resume(&self, _: &TtrpcContext, asked: ResumeRequest) -> Result<Empty> {
        self.pod.container(&asked.id)?.resume()?;
        let mut event = event::TaskResumed::new();
        event.set_container_id(asked.id);
        self.pod.events.publish(topics::TASK_RESUMED_EVENT_TOPIC, &event);
        Ok(Empty::new())
    }

    fn checkpoint(&self, _: &TtrpcContext, asked: CheckpointTaskRequest) -> Result<Empty> {
        self.pod.container(&asked.id)?;
        self.pod.checkpoint(Path::new(&asked.path))?;
        let mut event = event::TaskCheckpointed::new();
        event.set_container_id(asked.id);
        event.set_checkpoint(asked.path);
        self.pod.events.publish(topics::TASK_CHECKPOINTED_EVENT_TOPIC, &event);
        Ok(Empty::new())
    }

    fn resize_pty(&self, _: &TtrpcContext, asked: ResizePtyRequest) -> Result<Empty> {
        let process = self.pod.container(&asked.id)?.process(&asked.exec_id)?;
        let side = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
        let size = WindowSize { rows: side(asked.height), columns: side(asked.width) };
        process.resize(size)?;
        Ok(Empty::new())
    }

    fn close_io(&self, _: &TtrpcContext, asked: CloseIORequest) -> Result<Empty> {
        let process = self.pod.container(&asked.id)?.process(&asked.exec_id)?;
        if asked.stdin {
            process.close_input();
        }
        Ok(Empty::new())
    }

    fn stats(&self, _: &TtrpcContext, asked: StatsRequest) -> Result<StatsResponse> {
        let metrics = self.pod.container(&asked.id)?.stats();
        let value = metrics.write_to_bytes();
        let value = value.map_err(|error| ShimError::Invalid(error.to_string()))?;
        let type_url = Metrics::descriptor().full_name().to_owned();
        let mut answer = StatsResponse::new();
        answer.set_stats(Any { type_url, value, ..Any::default() });
        Ok(answer)
    }

    fn update(&self, _: &TtrpcContext, _: UpdateTaskRequest) -> Result<Empty> {
        let why = "the resources of a container cannot be changed while it runs";
        Err(ShimError::Unimplemented(why).into())
    }

    fn connect(&self, _: &TtrpcContext, _: ConnectRequest) -> Result<ConnectResponse> {
        let mut answer = ConnectResponse::new();
        answer.set_shim_pid(std::process::id());
        answer.set_task_pid(self.pod.pid());
        answer.set_version(env!("CARGO_PKG_VERSION").to_owned());
        Ok(answer)
    }

    fn shutdown(&self, _: &TtrpcContext, asked: ShutdownRequest) -> Result<Empty> {
        if asked.now || self.pod.is_empty() {
            // The daemon may be on its way out already.
            let _ = self.ended.send(());
        }
        Ok(Empty::new())
    }
}
