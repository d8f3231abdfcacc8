//! The calls of the tools: each takes its arguments apart, finds the sandbox, calls what the REST
//! API calls, and writes the answer.

use std::io::Read;
use std::sync::Arc;
use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pvmm::agent::{
    Agent, CodeOutput, CodeRequest, DirEntry, FileKind, FileWriteOptions, SessionOptions,
};
use pvmm::exec::{ExecStatus, Output};
use pvmm_sandbox::checkpoint_tree;
use pvmm_sandbox::file_diff::DiffOptions;
use rmcp::model::{ContentBlock, JsonObject};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::audit::Act;
use crate::blocking::Work;
use crate::error::ApiError;
use crate::extract::shown;
use crate::life::{InUse, enter};
use crate::resources::{checkpoints, code, exec, sandboxes};

use super::answer::{self, fitted, image, image_type};
use super::arguments::{self, Encoding, HOME, guest_path, parse};
use super::conversation::Conversation;

/// The most entries of a directory that are shown.
const MAX_ENTRIES: usize = 1000;
/// The most bytes of a directory's listing.
const MAX_LISTING: u64 = 16 << 20;

/// The answer of a tool.
pub struct Answer {
    /// Text and images.
    pub content: Vec<ContentBlock>,
    /// Whether the call failed in a way that its content describes.
    pub failed: bool,
}

impl Answer {
    fn text(text: impl Into<String>) -> Self {
        Self { content: vec![ContentBlock::text(text)], failed: false }
    }
}

/// One call of a tool.
pub struct Call<'a> {
    /// The conversation that the call is part of.
    pub conversation: &'a Conversation,
    /// The prefix of the token.
    pub owner: &'a str,
    /// Cancelled when the client no longer wants the call: commands and code end then.
    pub stop: &'a CancellationToken,
}

impl Call<'_> {
    /// Runs the tool of this name.
    pub async fn run(&self, tool: &str, given: Option<JsonObject>) -> Result<Answer, ApiError> {
        match tool {
            "sandbox_create" => self.create(parse(given)?).await,
            "sandbox_run_code" => self.run_code(parse(given)?).await,
            "sandbox_exec" => self.exec(parse(given)?).await,
            "sandbox_read_file" => self.read_file(parse(given)?).await,
            "sandbox_write_file" => self.write_file(parse(given)?).await,
            "sandbox_list_files" => self.list_files(parse(given)?).await,
            "sandbox_fork" => self.fork(parse(given)?).await,
            "sandbox_checkpoint" => self.checkpoint(parse(given)?).await,
            "sandbox_log" => self.log(parse(given)?).await,
            "sandbox_checkout" => self.checkout(parse(given)?).await,
            "sandbox_diff" => self.diff(parse(given)?).await,
            "sandbox_rollback" => self.rollback(parse(given)?).await,
            "sandbox_list" => self.list(parse(given)?).await,
            "sandbox_terminate" => self.terminate(parse(given)?).await,
            other => {
                let message = format!("there is no tool '{}'", shown(other));
                Err(ApiError::not_found(message))
            }
        }
    }

    /// Returns the id of the sandbox that the call is about, and words about it for the answer.
    async fn sandbox(&self, named: Option<String>) -> Result<(String, Vec<String>), ApiError> {
        let named = named.map(arguments::sandbox_id).transpose()?;
        let used = self.conversation.sandbox(self.owner, named).await?;
        Ok((used.id, used.note.map(str::to_owned).into_iter().collect()))
    }

    /// Runs a call to the agent of a sandbox in a thread of its own.
    async fn in_guest<T: Send + 'static>(
        &self,
        id: &str,
        call: impl FnOnce(&Agent) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let app = self.conversation.app();
        let in_use: InUse = enter(app, id).await?;
        let work = move || {
            let agent = in_use.agent()?;
            call(&agent).map_err(|error| in_use.explain(error))
        };
        app.blocking.run(Work::Long, work).await
    }

    async fn create(&self, wish: arguments::Create) -> Result<Answer, ApiError> {
        let wish = sandboxes::Create {
            template: wish.template,
            cpu: wish.cpus,
            memory_mb: wish.memory_mb,
            ttl_seconds: wish.ttl_seconds,
            ..sandboxes::Create::default()
        };
        let row = self.conversation.create(self.owner, wish).await?;
        Ok(Answer::text(format!(
            "sandbox {} (template {}, {} CPUs, {} MiB) is ready, and is used by calls that name no \
             other",
            row.id, row.template, row.cpus, row.memory_mib
        )))
    }

    async fn run_code(&self, wish: arguments::RunCode) -> Result<Answer, ApiError> {
        let timeout = arguments::timeout(wish.timeout_seconds)?;
        arguments::check_code("code", &wish.code)?;
        let language = code::language(wish.language.as_deref().unwrap_or("python"))?;
        let (id, mut words) = self.sandbox(wish.sandbox).await?;
        let _turn = self.conversation.turn(&id, timeout).await?;
        let open = move |agent: &Agent| {
            let name = format!("mcp-{}", code::word(language));
            let mut options = SessionOptions::named(language, &name);
            options.cwd = Some(HOME.into());
            options.env = vec![(b"HOME".to_vec(), HOME.into())];
            Ok(agent.open_session(&options)?.session)
        };
        let session = self.in_guest(&id, open).await?;
        let request = CodeRequest::new(wish.code).timeout(timeout);
        let app = self.conversation.app();
        let output =
            code::run_in_session(app, self.owner, &id, session, request, self.stop).await?;
        let render = move |agent: &Agent| {
            let failed = output.report.timed_out;
            let (images, text) = code_answer(agent, &output);
            words.push(text);
            if failed {
                words.push(format!(
                    "[the code was interrupted after {} s: raise timeout_seconds, or do less in \
                     one call; its variables are kept]",
                    timeout.as_secs()
                ));
            }
            let mut content = vec![ContentBlock::text(words.join("\n"))];
            content.extend(images);
            Ok(Answer { content, failed })
        };
        self.in_guest(&id, render).await
    }

    async fn exec(&self, wish: arguments::Exec) -> Result<Answer, ApiError> {
        let timeout = arguments::timeout(wish.timeout_seconds)?;
        arguments::check_code("command", &wish.command)?;
        let cwd = wish.cwd.as_deref().map(guest_path).transpose()?;
        let (id, mut words) = self.sandbox(wish.sandbox).await?;
        let body = exec::Exec {
            cmd: wish.command,
            timeout_seconds: Some(timeout.as_secs_f64()),
            cwd,
            ..exec::Exec::default()
        };
        let app = self.conversation.app();
        let output = exec::run_line(app, self.owner, &id, body, self.stop).await?;
        let render = move |agent: &Agent| {
            let failed = output.status.timed_out;
            words.push(exec_answer(agent, &output));
            if failed {
                words.push(format!(
                    "[the command was ended after {} s: raise timeout_seconds, or start it in the \
                     background]",
                    timeout.as_secs()
                ));
            }
            Ok(Answer { failed, ..Answer::text(words.join("\n")) })
        };
        self.in_guest(&id, render).await
    }

    async fn read_file(&self, wish: arguments::ReadFile) -> Result<Answer, ApiError> {
        let path = guest_path(&wish.path)?;
        let limit = arguments::read_limit(wish.limit)?;
        let (id, words) = self.sandbox(wish.sandbox).await?;
        let (begun, what) = (Instant::now(), path.clone());
        let (offset, encoding) = (wish.offset, wish.encoding);
        let read = move |agent: &Agent| read(agent, &path, offset, limit, encoding);
        let outcome = self.in_guest(&id, read).await;
        let act = Act::new("read_file", self.owner, &id).what(&what).since(begun);
        self.conversation.app().audit.write(&act.outcome(&outcome));
        let mut answer = outcome?;
        answer.content.extend(words.into_iter().map(ContentBlock::text));
        Ok(answer)
    }

    async fn write_file(&self, wish: arguments::WriteFile) -> Result<Answer, ApiError> {
        let path = guest_path(&wish.path)?;
        let bytes = match wish.encoding {
            Encoding::Text => wish.content.into_bytes(),
            Encoding::Base64 => STANDARD
                .decode(wish.content.trim())
                .map_err(|error| ApiError::bad_request(format!("content: no base64: {error}")))?,
        };
        if bytes.len() > arguments::MAX_CONTENT {
            let message = "content: longer than 8 MiB; write parts and join them with sandbox_exec";
            return Err(ApiError::too_large(message));
        }
        let (id, mut words) = self.sandbox(wish.sandbox).await?;
        let (begun, count, to) = (Instant::now(), bytes.len(), path.clone());
        let write = move |agent: &Agent| {
            let options = FileWriteOptions { parents: true, ..FileWriteOptions::default() };
            Ok(agent.write_file(&to, &bytes, &options)?)
        };
        let outcome = self.in_guest(&id, write).await;
        let act = Act::new("write_file", self.owner, &id).what(&path).bytes(count as u64);
        self.conversation.app().audit.write(&act.since(begun).outcome(&outcome));
        outcome?;
        words.push(format!("wrote {count} bytes to {path}"));
        Ok(Answer::text(words.join("\n")))
    }

    async fn list_files(&self, wish: arguments::ListFiles) -> Result<Answer, ApiError> {
        let path = guest_path(wish.path.as_deref().unwrap_or(HOME))?;
        let (id, mut words) = self.sandbox(wish.sandbox).await?;
        let list = move |agent: &Agent| Ok((agent.list_within(&path, MAX_LISTING)?, path));
        let (entries, path) = self.in_guest(&id, list).await?;
        words.push(format!("{path}: {} entries", entries.len()));
        words.extend(entries.iter().take(MAX_ENTRIES).map(line_of));
        if entries.len() > MAX_ENTRIES {
            let rest = entries.len() - MAX_ENTRIES;
            words.push(format!("[... {rest} more: use sandbox_exec with find or ls ...]"));
        }
        Ok(Answer::text(words.join("\n")))
    }

    async fn fork(&self, wish: arguments::Fork) -> Result<Answer, ApiError> {
        let count = arguments::fork_count(wish.count)?;
        let (id, mut words) = self.sandbox(wish.sandbox).await?;
        let begun = Instant::now();
        let outcome = self.conversation.fork(self.owner, &id, count).await;
        let act = Act::new("fork", self.owner, &id).what(&format!("{count} forks")).since(begun);
        self.conversation.app().audit.write(&act.outcome(&outcome));
        words.push(format!("forks of {id}, one id in each line:"));
        words.extend(outcome?.into_iter().map(|row| row.id));
        Ok(Answer::text(words.join("\n")))
    }

    async fn checkpoint(&self, wish: arguments::Checkpoint) -> Result<Answer, ApiError> {
        let (id, mut words) = self.sandbox(wish.sandbox).await?;
        let app = self.conversation.app();
        let taken = checkpoints::take_checkpoint(app, self.owner, &id, wish.name).await?;
        words.push(format!(
            "checkpoint '{}' of sandbox {id} is taken: sandbox_rollback goes back to it, \
             sandbox_checkout to any",
            taken.name
        ));
        Ok(Answer::text(words.join("\n")))
    }

    async fn rollback(&self, wish: arguments::OneSandbox) -> Result<Answer, ApiError> {
        let (id, _) = self.sandbox(wish.sandbox).await?;
        checkpoints::check_out(self.conversation.app(), self.owner, &id, None).await?;
        Ok(Answer::text(format!("sandbox {id} is back at its checkpoint")))
    }

    async fn checkout(&self, wish: arguments::Checkout) -> Result<Answer, ApiError> {
        let (id, _) = self.sandbox(wish.sandbox).await?;
        let text = format!("sandbox {id} is at checkpoint '{}'", shown(&wish.name));
        let app = self.conversation.app();
        checkpoints::check_out(app, self.owner, &id, Some(wish.name)).await?;
        Ok(Answer::text(text))
    }

    async fn log(&self, wish: arguments::OneSandbox) -> Result<Answer, ApiError> {
        let (id, mut words) = self.sandbox(wish.sandbox).await?;
        let all = checkpoints::list_checkpoints(self.conversation.app(), &id).await?;
        if all.is_empty() {
            words.push(format!("sandbox {id} has no checkpoint"));
        } else {
            let drawn = checkpoint_tree::draw(&all, |it| crate::clock::rfc3339(it.created_ms));
            words.push(drawn.trim_end().to_owned());
        }
        Ok(Answer::text(words.join("\n")))
    }

    async fn diff(&self, wish: arguments::Diff) -> Result<Answer, ApiError> {
        let root = guest_path(wish.path.as_deref().unwrap_or("/"))?;
        let (id, mut words) = self.sandbox(wish.sandbox).await?;
        let options = DiffOptions {
            root: root.into(),
            patch: wish.patch,
            ..DiffOptions::between(&wish.from, wish.to.as_deref())
        };
        let app = self.conversation.app();
        let diff = checkpoints::diff_files(app, self.owner, &id, options).await?;
        let fit = move |agent: &Agent| Ok(fitted(agent, diff.text(str::to_owned).as_bytes(), 0));
        words.push(self.in_guest(&id, fit).await?);
        Ok(Answer::text(words.join("\n")))
    }

    async fn list(&self, _: arguments::Nothing) -> Result<Answer, ApiError> {
        let own = self.conversation.own().await;
        let shape = |entry: &Arc<crate::app::Entry>| {
            let row = entry.row();
            json!({
                "id": row.id,
                "own": Some(&row.id) == own.as_ref(),
                "status": row.state.word(),
                "template": row.template,
                "cpus": row.cpus,
                "memory_mb": row.memory_mib,
                "fork_of": row.parent,
                "has_checkpoint": row.has_checkpoint,
                "expires_at": row.expires_ms.map(crate::clock::rfc3339),
            })
        };
        let list: Vec<_> = self.conversation.app().list().iter().map(shape).collect();
        Ok(Answer::text(json!(list).to_string()))
    }

    async fn terminate(&self, wish: arguments::OneSandbox) -> Result<Answer, ApiError> {
        let named = wish.sandbox.map(arguments::sandbox_id).transpose()?;
        let Some(id) = self.conversation.leave(named).await else {
            return Err(ApiError::conflict("the conversation has no sandbox to end"));
        };
        sandboxes::end(self.conversation.app(), self.owner, &id).await?;
        Ok(Answer::text(format!("sandbox {id} has ended")))
    }
}

/// Writes the outcome of a command. Waits.
fn exec_answer(agent: &Agent, output: &Output) -> String {
    let status = &output.status;
    let how = match status.status {
        ExecStatus::Signaled { signal, .. } => format!(" (ended by signal {signal})"),
        _ => String::new(),
    };
    let mut text = format!("exit code: {}{how}", status.shell_code());
    if status.oom {
        text.push_str("\n[the sandbox ran out of memory]");
    }
    for (name, captured) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        if captured.total > 0 {
            text.push_str(&format!("\n{name}:\n"));
            text.push_str(&fitted(agent, &captured.bytes, captured.dropped));
        }
    }
    text
}

/// Writes the outcome of code: images, and the rest as text. Waits.
fn code_answer(agent: &Agent, output: &CodeOutput) -> (Vec<ContentBlock>, String) {
    let (images, values) = answer::shown(output.displays.iter().chain(&output.result));
    let report = &output.report;
    let failure = code::failure(output).unwrap_or_default();
    let mut parts = Vec::new();
    for (name, bytes, lost) in [
        ("stdout", &output.stdout[..], report.stdout.dropped),
        ("stderr", &output.stderr[..], report.stderr.dropped),
        ("result", values.as_bytes(), 0),
        ("error", failure.as_bytes(), 0),
    ] {
        if !bytes.is_empty() {
            parts.push(format!("{name}:\n{}", fitted(agent, bytes, lost)));
        }
    }
    if parts.is_empty() {
        parts.push("the code ran and printed nothing".to_owned());
    }
    (images, parts.join("\n"))
}

/// Writes one entry of a directory.
fn line_of(entry: &DirEntry) -> String {
    let name = String::from_utf8_lossy(&entry.name);
    let name = name.escape_debug();
    match entry.metadata.kind {
        FileKind::Directory => format!("dir  - {name}/"),
        FileKind::Symlink => format!("link - {name}"),
        FileKind::File => format!("file {} {name}", entry.metadata.size),
        _ => format!("other - {name}"),
    }
}

/// Reads a part of a file, or a whole image. Waits.
fn read(
    agent: &Agent,
    path: &str,
    offset: u64,
    limit: u64,
    encoding: Option<Encoding>,
) -> Result<Answer, ApiError> {
    let size = agent.stat(path, true)?.size;
    let bytes = range(agent, path, offset, limit)?;
    if offset == 0
        && encoding.is_none()
        && let Some(mime) = image_type(&bytes)
    {
        if size > answer::MAX_IMAGES as u64 {
            let message = format!("{path}: the image has {size} bytes; make it smaller than 4 MiB");
            return Err(ApiError::too_large(message));
        }
        let whole = range(agent, path, 0, answer::MAX_IMAGES as u64)?;
        return Ok(Answer { content: vec![image(&whole, mime)], failed: false });
    }
    let (text, taken) = match encoding.unwrap_or_default() {
        Encoding::Base64 => (STANDARD.encode(&bytes), bytes.len()),
        Encoding::Text => {
            let (text, taken) = whole_characters(&bytes).ok_or_else(|| {
                let message = format!(
                    "{path}: is no UTF-8 text ({size} bytes); read it with \
                     encoding=base64"
                );
                ApiError::bad_request(message)
            })?;
            (text.to_owned(), taken)
        }
    };
    let end = offset.saturating_add(taken as u64);
    let mut answer = Answer::text(text);
    // Files of the kernel have no size.
    if end < size || (size == 0 && bytes.len() as u64 == limit) {
        let note = format!("[bytes {offset} to {end} of {size}; go on with offset={end}]");
        answer.content.push(ContentBlock::text(note));
    }
    Ok(answer)
}

fn range(agent: &Agent, path: &str, offset: u64, limit: u64) -> Result<Vec<u8>, ApiError> {
    let end = offset.saturating_add(limit);
    let mut bytes = Vec::new();
    // The guest may send more than was asked for.
    agent.open_read(path, Some(offset..end))?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the text without a character that the end of a part has cut, and the number of its
/// bytes; `None` for bytes that are no text.
fn whole_characters(bytes: &[u8]) -> Option<(&str, usize)> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some((text, bytes.len())),
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
            let whole = &bytes[..error.valid_up_to()];
            std::str::from_utf8(whole).ok().map(|text| (text, whole.len()))
        }
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_a_text_ends_with_a_whole_character() {
        assert_eq!(whole_characters(b"abc"), Some(("abc", 3)));
        assert_eq!(whole_characters(b"ab\xe2\x82"), Some(("ab", 2)));
        assert_eq!(whole_characters(b""), Some(("", 0)));
    }

    #[test]
    fn bytes_that_are_no_text_are_told_apart() {
        assert_eq!(whole_characters(b"ab\xff\xfe"), None);
        assert_eq!(whole_characters(b"\xe2\x82"), None);
    }
}
