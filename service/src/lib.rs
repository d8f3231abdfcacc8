//! The HTTP server of pvmm: sandboxes for agents, over the REST API that published clients speak.
//!
//! Handlers are thin: each takes a request apart, calls the library of sandboxes or the agent in a
//! guest, and writes the answer. Monitors are processes of their own, so the server can end and
//! come back while they run on.
//!
//! | module | content |
//! | --- | --- |
//! | `server`, `listen` | sockets, TLS, shutdown |
//! | `stdio` | `pvmm mcp`: one conversation over standard input and output |
//! | `mcp` | tools for agents, over both |
//! | `routes`, `resources` | paths and their handlers, one file for each resource |
//! | `e2b` | the same sandboxes for E2B's clients |
//! | `life` | start, use, hibernate, wake, end; restart of the server |
//! | `builds`, `form`, `upload` | templates that clients send, and their builds |
//! | `store` | the database and its migrations |
//! | `tokens`, `limits`, `audit` | who may do how much, and what was done |

mod announce;
mod app;
mod audit;
mod bake;
mod blocking;
mod builds;
mod clock;
mod data_dir;
mod e2b;
mod error;
mod extract;
mod form;
mod ids;
mod life;
mod limits;
mod listen;
mod mcp;
mod options;
mod proxy;
mod resources;
mod routes;
mod server;
mod sse;
mod stdio;
mod store;
mod text;
mod tls;
mod tokens;
mod upload;

pub use options::{DEFAULT_LISTEN, Limits, Listen, McpOptions, ServeOptions, TlsFiles};
pub use server::serve;
pub use stdio::serve_stdio;
