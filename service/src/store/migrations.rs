//! Steps that bring an older database to the present version.
//!
//! A step is never changed once it was released: a later change is a further step.

use redb::{Database, ReadableTable, WriteTransaction};

use super::{BUILDS, META, SANDBOXES, SNAPSHOTS, StoreError, TOKENS};

const VERSION: &str = "version";

/// A step from one version to the next.
pub(super) type Step = fn(&WriteTransaction) -> Result<(), StoreError>;

/// All steps; their number is the present version.
pub(super) const ALL: &[Step] = &[create_tables];

/// Version 1: the tables, so that a reader finds each of them.
fn create_tables(write: &WriteTransaction) -> Result<(), StoreError> {
    for table in [SANDBOXES, SNAPSHOTS, TOKENS, BUILDS] {
        write.open_table(table).map_err(StoreError::of)?;
    }
    Ok(())
}

/// Runs the steps that a database lacks, all in one transaction.
pub(super) fn run(database: &Database, steps: &[Step]) -> Result<(), StoreError> {
    let write = database.begin_write().map_err(StoreError::of)?;
    let known = steps.len() as u64;
    let found = {
        let meta = write.open_table(META).map_err(StoreError::of)?;
        let text = meta.get(VERSION).map_err(StoreError::of)?.map(|row| row.value().to_owned());
        let bad = || StoreError::Database("its version is no number".to_owned());
        text.map(|text| text.parse().map_err(|_| bad())).transpose()?.unwrap_or(0)
    };
    if found > known {
        return Err(StoreError::TooNew { found, known });
    }
    for step in &steps[found as usize..] {
        step(&write)?;
    }
    if found < known {
        let mut meta = write.open_table(META).map_err(StoreError::of)?;
        meta.insert(VERSION, &known.to_string()[..]).map_err(StoreError::of)?;
    }
    write.commit().map_err(StoreError::of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(write: &WriteTransaction) -> Result<(), StoreError> {
        let mut meta = write.open_table(META).map_err(StoreError::of)?;
        let count = meta.get("note").map_err(StoreError::of)?.map_or(0, |row| row.value().len());
        meta.insert("note", &"x".repeat(count + 1)[..]).map_err(StoreError::of)?;
        Ok(())
    }

    fn fail(_: &WriteTransaction) -> Result<(), StoreError> {
        Err(StoreError::Database("no".to_owned()))
    }

    fn notes(database: &Database) -> usize {
        let write = database.begin_write().unwrap();
        let meta = write.open_table(META).unwrap();
        meta.get("note").unwrap().map_or(0, |row| row.value().len())
    }

    #[test]
    fn step_runs_once_however_often_the_database_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::create(dir.path().join("db")).unwrap();
        run(&database, &[create_tables, note]).unwrap();
        run(&database, &[create_tables, note]).unwrap();
        assert_eq!(notes(&database), 1);
        run(&database, &[create_tables, note, note]).unwrap();
        assert_eq!(notes(&database), 2);
    }

    #[test]
    fn failed_step_leaves_the_database_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::create(dir.path().join("db")).unwrap();
        run(&database, &[create_tables]).unwrap();
        assert!(run(&database, &[create_tables, note, fail]).is_err());
        assert_eq!(notes(&database), 0);
        run(&database, &[create_tables, note]).unwrap();
        assert_eq!(notes(&database), 1);
    }

    #[test]
    fn database_of_a_later_server_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::create(dir.path().join("db")).unwrap();
        run(&database, &[create_tables, note]).unwrap();
        let error = run(&database, &[create_tables]).unwrap_err();
        assert!(matches!(error, StoreError::TooNew { found: 2, known: 1 }), "{error}");
    }
}
