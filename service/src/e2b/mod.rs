//! E2B's API, so that its published clients make and use the same sandboxes.
//!
//! The clients speak to two servers: one that makes sandboxes, and one in each sandbox. Both are
//! this one. A request to a sandbox names it in a header, in its host name or by a signature.
//!
//! | module | content |
//! | --- | --- |
//! | `door` | which requests are E2B's, who may send them, and their paths |
//! | `token`, `error` | the credentials of a sandbox; errors as these clients read them |
//! | `sandboxes`, `network`, `snapshots`, `templates` | the server that makes sandboxes |
//! | `connect` | calls as Connect frames them |
//! | `process`, `inputs` | commands and terminals |
//! | `filesystem`, `watchers`, `files`, `accounts` | files of a guest, their owners, their changes |
//! | `code` | the code interpreter |

mod accounts;
mod code;
mod connect;
mod door;
mod error;
mod files;
mod filesystem;
mod inputs;
mod network;
mod process;
mod sandboxes;
mod snapshots;
mod templates;
mod token;
mod watchers;

pub use door::beside;
