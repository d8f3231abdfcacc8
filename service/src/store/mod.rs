//! The database of the server: small rows about sandboxes, snapshots and tokens.
//!
//! Everything large is in the file system, which is the truth: a row whose folder or VM is gone is
//! removed or corrected at the start. Each write is a transaction that is on disk when it returns.

mod migrations;
mod rows;

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ApiError, chain};

pub use rows::{BuildRow, SandboxRow, SnapshotRow, State, TokenRow, VolumeUse};

/// A table of JSON rows by their key.
type Table = TableDefinition<'static, &'static str, &'static [u8]>;

/// Facts about the database itself.
const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
const SANDBOXES: Table = TableDefinition::new("sandboxes");
const SNAPSHOTS: Table = TableDefinition::new("snapshots");
const TOKENS: Table = TableDefinition::new("tokens");
const BUILDS: Table = TableDefinition::new("builds");

/// The reason why the database failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database cannot be opened, read or written.
    #[error("the database failed: {0}")]
    Database(String),
    /// Another process has the database open.
    #[error("another server uses this data directory: end it, or give another --data-dir")]
    InUse,
    /// A row is not what this server writes.
    #[error("a row of the table '{table}' cannot be read")]
    Row {
        /// The table of the row.
        table: String,
        /// The error of the decoder.
        #[source]
        source: serde_json::Error,
    },
    /// A later version of the server has written the database.
    #[error("the database has version {found}, and this server knows versions up to {known}")]
    TooNew {
        /// The version of the database.
        found: u64,
        /// The latest version that this server knows.
        known: u64,
    },
}

impl StoreError {
    fn of(error: impl Into<redb::Error>) -> Self {
        match error.into() {
            redb::Error::DatabaseAlreadyOpen => Self::InUse,
            error => Self::Database(chain(&error)),
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::internal(chain(&error))
    }
}

/// The open database.
pub struct Store {
    database: Database,
}

impl Store {
    /// Opens the database at `path`, creates it if it is missing, and brings it to the present
    /// version.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        // Created here, so that only the user can read it.
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
        drop(file.map_err(|error| StoreError::Database(format!("{}: {error}", path.display())))?);
        let store = Self { database: Database::create(path).map_err(StoreError::of)? };
        migrations::run(&store.database, migrations::ALL)?;
        Ok(store)
    }

    /// Returns a fact about the database, which is set to `make()` at the first call.
    pub fn fact(&self, name: &str, make: impl FnOnce() -> String) -> Result<String, StoreError> {
        let write = self.database.begin_write().map_err(StoreError::of)?;
        let value = {
            let mut table = write.open_table(META).map_err(StoreError::of)?;
            let found = table.get(name).map_err(StoreError::of)?.map(|row| row.value().to_owned());
            match found {
                Some(value) => value,
                None => {
                    let value = make();
                    table.insert(name, &value[..]).map_err(StoreError::of)?;
                    value
                }
            }
        };
        write.commit().map_err(StoreError::of)?;
        Ok(value)
    }

    fn put<T: Serialize>(&self, table: Table, rows: &[(&str, &T)]) -> Result<(), StoreError> {
        let write = self.database.begin_write().map_err(StoreError::of)?;
        {
            let mut open = write.open_table(table).map_err(StoreError::of)?;
            for (key, row) in rows {
                let bytes = serde_json::to_vec(row).map_err(|source| StoreError::Row {
                    table: redb::TableHandle::name(&table).to_owned(),
                    source,
                })?;
                open.insert(*key, &bytes[..]).map_err(StoreError::of)?;
            }
        }
        write.commit().map_err(StoreError::of)
    }

    fn remove(&self, table: Table, key: &str) -> Result<bool, StoreError> {
        let write = self.database.begin_write().map_err(StoreError::of)?;
        let found = {
            let mut open = write.open_table(table).map_err(StoreError::of)?;
            open.remove(key).map_err(StoreError::of)?.is_some()
        };
        write.commit().map_err(StoreError::of)?;
        Ok(found)
    }

    fn get<T: DeserializeOwned>(&self, table: Table, key: &str) -> Result<Option<T>, StoreError> {
        let read = self.database.begin_read().map_err(StoreError::of)?;
        let open = read.open_table(table).map_err(StoreError::of)?;
        let row = open.get(key).map_err(StoreError::of)?;
        row.map(|row| decode(table, row.value())).transpose()
    }

    fn all<T: DeserializeOwned>(&self, table: Table) -> Result<Vec<T>, StoreError> {
        let read = self.database.begin_read().map_err(StoreError::of)?;
        let open = read.open_table(table).map_err(StoreError::of)?;
        let mut rows = Vec::new();
        for row in open.iter().map_err(StoreError::of)? {
            let (_, bytes) = row.map_err(StoreError::of)?;
            rows.push(decode(table, bytes.value())?);
        }
        Ok(rows)
    }

    /// Writes sandboxes, all or none.
    pub fn put_sandboxes(&self, rows: &[&SandboxRow]) -> Result<(), StoreError> {
        let rows: Vec<_> = rows.iter().map(|row| (&row.id[..], *row)).collect();
        self.put(SANDBOXES, &rows)
    }

    /// Removes a sandbox.
    pub fn remove_sandbox(&self, id: &str) -> Result<bool, StoreError> {
        self.remove(SANDBOXES, id)
    }

    /// Returns all sandboxes.
    pub fn sandboxes(&self) -> Result<Vec<SandboxRow>, StoreError> {
        self.all(SANDBOXES)
    }

    /// Writes a snapshot.
    pub fn put_snapshot(&self, row: &SnapshotRow) -> Result<(), StoreError> {
        self.put(SNAPSHOTS, &[(&row.id[..], row)])
    }

    /// Returns a snapshot.
    pub fn snapshot(&self, id: &str) -> Result<Option<SnapshotRow>, StoreError> {
        self.get(SNAPSHOTS, id)
    }

    /// Removes a snapshot.
    pub fn remove_snapshot(&self, id: &str) -> Result<bool, StoreError> {
        self.remove(SNAPSHOTS, id)
    }

    /// Returns all snapshots.
    pub fn snapshots(&self) -> Result<Vec<SnapshotRow>, StoreError> {
        self.all(SNAPSHOTS)
    }

    /// Writes a token.
    pub fn put_token(&self, row: &TokenRow) -> Result<(), StoreError> {
        self.put(TOKENS, &[(&row.prefix[..], row)])
    }

    /// Removes a token.
    pub fn remove_token(&self, prefix: &str) -> Result<bool, StoreError> {
        self.remove(TOKENS, prefix)
    }

    /// Returns all tokens.
    pub fn tokens(&self) -> Result<Vec<TokenRow>, StoreError> {
        self.all(TOKENS)
    }

    /// Writes a build of a template.
    pub fn put_build(&self, row: &BuildRow) -> Result<(), StoreError> {
        self.put(BUILDS, &[(&row.id[..], row)])
    }

    /// Removes a build of a template.
    pub fn remove_build(&self, id: &str) -> Result<bool, StoreError> {
        self.remove(BUILDS, id)
    }

    /// Returns all builds of templates.
    pub fn builds(&self) -> Result<Vec<BuildRow>, StoreError> {
        self.all(BUILDS)
    }

    /// Returns a build of a template.
    pub fn build(&self, id: &str) -> Result<Option<BuildRow>, StoreError> {
        self.get(BUILDS, id)
    }
}

fn decode<T: DeserializeOwned>(table: Table, bytes: &[u8]) -> Result<T, StoreError> {
    let table = redb::TableHandle::name(&table);
    serde_json::from_slice(bytes)
        .map_err(|source| StoreError::Row { table: table.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn rows_survive_a_reopen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service.redb");
        let store = Store::open(&path).unwrap();
        let row = SandboxRow { id: "a".to_owned(), cpus: 2, ..SandboxRow::default() };
        store.put_sandboxes(&[&row]).unwrap();
        let instance = store.fact("instance", || "1".to_owned()).unwrap();
        drop(store);
        let store = Store::open(&path).unwrap();
        assert_eq!(store.sandboxes().unwrap(), vec![row]);
        assert_eq!(store.fact("instance", || "2".to_owned()).unwrap(), instance);
        assert!(store.remove_sandbox("a").unwrap());
        assert!(!store.remove_sandbox("a").unwrap());
        assert_eq!(store.snapshots().unwrap(), vec![]);
    }

    #[test]
    fn open_while_another_server_has_it_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service.redb");
        let _store = Store::open(&path).unwrap();
        assert!(matches!(Store::open(&path), Err(StoreError::InUse)));
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
