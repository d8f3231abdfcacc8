//! The protocol's requests: what the server is, the list of tools, calls.
//!
//! A call that fails is an answer with `isError`, which the model reads; errors of the protocol are
//! `rmcp`'s.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation,
    ListToolsResult, PaginatedRequestParams, ProtocolVersion, ServerCapabilities, ServerConfig,
    Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::{ErrorData, ServerHandler};
use tokio::sync::OwnedSemaphorePermit;

use crate::error::ApiError;
use crate::extract::Owner;

use super::arguments::MAX_TIME_S;
use super::calls::{Answer, Call};
use super::conversation::{Conversation, Defaults};
use super::tools::{INSTRUCTIONS, tools};

/// The longest time of a call, with everything around a command of the longest time.
const MAX_CALL: Duration = Duration::from_secs(MAX_TIME_S + 300);

/// One conversation as `rmcp` sees it. The conversation ends when this is dropped.
pub struct Handler {
    conversation: Conversation,
    owner: Option<String>,
    versions: &'static [ProtocolVersion],
    _slot: Option<OwnedSemaphorePermit>,
}

impl Handler {
    /// Serves a conversation of the user who runs the program.
    pub fn of_user(conversation: Conversation) -> Self {
        let versions = ProtocolVersion::KNOWN_VERSIONS;
        Self { conversation, owner: Some("local".to_owned()), versions, _slot: None }
    }

    /// Serves a conversation over HTTP, whose requests carry tokens. Only versions of the protocol
    /// with sessions are spoken: without a session, requests of one conversation are not known to
    /// belong together.
    pub fn of_tokens(conversation: Conversation, slot: OwnedSemaphorePermit) -> Self {
        let versions = ProtocolVersion::known_up_to(&ProtocolVersion::V_2025_11_25);
        Self { conversation, owner: None, versions, _slot: Some(slot) }
    }

    /// Returns the prefix of the token that a request carries.
    fn owner(&self, context: &RequestContext<RoleServer>) -> Result<String, ApiError> {
        if let Some(owner) = &self.owner {
            return Ok(owner.clone());
        }
        let parts = context.extensions.get::<axum::http::request::Parts>();
        let owner = parts.and_then(|parts| parts.extensions.get::<Owner>());
        let owner = owner.map(|Owner(owner)| owner.clone());
        owner.ok_or_else(|| ApiError::unauthorized("send a token: Authorization: Bearer TOKEN"))
    }

    async fn answer(
        &self,
        request: CallToolRequestParams,
        context: &RequestContext<RoleServer>,
    ) -> Result<Answer, ApiError> {
        let owner = self.owner(context)?;
        let parts = context.extensions.get::<axum::http::request::Parts>();
        let defaults = parts.and_then(|parts| parts.extensions.get::<Defaults>().cloned());
        let conversation = match defaults {
            Some(defaults) => self.conversation.with(defaults),
            None => self.conversation.clone(),
        };
        let call = Call { conversation: &conversation, owner: &owner, stop: &context.ct };
        let call = call.run(&request.name, request.arguments);
        match tokio::time::timeout(MAX_CALL, call).await {
            Ok(answer) => answer,
            Err(_) => Err(ApiError::overdue("the call took too long, and was given up")),
        }
    }
}

impl ServerHandler for Handler {
    fn get_info(&self) -> ServerConfig {
        let server = Implementation::new("pvmm", env!("CARGO_PKG_VERSION"));
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(server)
            .with_instructions(INSTRUCTIONS)
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Cow::Borrowed(self.versions)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools().into_iter().find(|tool| tool.name == name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let result = match self.answer(request, &context).await {
            Ok(Answer { content, failed: false }) => CallToolResult::success(content),
            Ok(Answer { content, failed: true }) => CallToolResult::error(content),
            Err(error) => CallToolResult::error(vec![ContentBlock::text(one_line(&error))]),
        };
        Ok(result.into())
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        let app = Arc::clone(self.conversation.app());
        let conversation = self.conversation.clone();
        // Without a runtime the process is ending, and has ended the conversation itself.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            app.last_acts.spawn_on(async move { conversation.end().await }, &runtime);
        }
    }
}

/// Writes an error as one line, with when to try again.
fn one_line(error: &ApiError) -> String {
    let mut line = error.message.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some(seconds) = error.retry_after {
        line.push_str(&format!(" (in about {seconds} s)"));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_one_line_with_when_to_try_again() {
        let error = ApiError::unavailable("template 'x'\nis being baked: try again", 5);
        assert_eq!(one_line(&error), "template 'x' is being baked: try again (in about 5 s)");
    }
}
