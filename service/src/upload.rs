//! Takes the form of a build and puts its files into a folder.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::error::ApiError;
use crate::extract::shown;
use crate::form::{self, Encoding, FormEvent, Multipart};

/// The most bytes of one form.
const MAX_BYTES: u64 = 8 << 30;
/// The most bytes of the fields that are no files.
const MAX_FIELDS: usize = 2 << 20;
const MAX_FILES: usize = 20_000;
const MAX_PATH: usize = 1024;

/// A form whose files are in a folder.
#[derive(Debug, Default)]
pub struct Upload {
    /// The fields that are no files.
    pub fields: HashMap<String, String>,
    /// The number of files.
    pub files: usize,
    /// The bytes of all files.
    pub bytes: u64,
}

impl Upload {
    /// Returns a field that is not empty.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}

/// Reads a form to its end and writes its files below `folder`, each at its field's name.
pub fn receive(
    encoding: &Encoding,
    folder: &Path,
    mut chunks: mpsc::Receiver<Result<Bytes, ApiError>>,
) -> Result<Upload, ApiError> {
    let mut writer = Writer { folder, upload: Upload::default(), part: None, field_bytes: 0 };
    match encoding {
        Encoding::Urlencoded => {
            let mut text = Vec::new();
            while let Some(chunk) = chunks.blocking_recv() {
                text.extend_from_slice(&chunk?);
                writer.count_field(text.len())?;
            }
            writer.upload.fields = form::urlencoded(&text)?.into_iter().collect();
        }
        Encoding::Multipart(boundary) => {
            let mut form = Multipart::new(boundary);
            while let Some(chunk) = chunks.blocking_recv() {
                form.push(&chunk?)?;
                while let Some(event) = form.next_event() {
                    writer.take(event)?;
                }
            }
            if !form.is_over() {
                return Err(ApiError::bad_request("the form has no end"));
            }
        }
    }
    Ok(writer.upload)
}

enum Part {
    Field(String, Vec<u8>),
    File(File),
}

struct Writer<'a> {
    folder: &'a Path,
    upload: Upload,
    part: Option<Part>,
    field_bytes: usize,
}

impl Writer<'_> {
    fn count_field(&self, bytes: usize) -> Result<(), ApiError> {
        if bytes > MAX_FIELDS {
            return Err(ApiError::too_large("the fields of the form are longer than 2 MiB"));
        }
        Ok(())
    }

    fn take(&mut self, event: FormEvent) -> Result<(), ApiError> {
        match event {
            FormEvent::Part { name, file: Some(_) } => {
                self.upload.files += 1;
                if self.upload.files > MAX_FILES {
                    let message = format!("the form has more than {MAX_FILES} files");
                    return Err(ApiError::too_large(message));
                }
                self.part = Some(Part::File(self.create(&name)?));
            }
            FormEvent::Part { name, file: None } => {
                self.field_bytes += name.len();
                self.part = Some(Part::Field(name, Vec::new()));
            }
            FormEvent::Data(data) => match &mut self.part {
                Some(Part::File(file)) => {
                    self.upload.bytes += data.len() as u64;
                    if self.upload.bytes > MAX_BYTES {
                        return Err(ApiError::too_large("the files are longer than 8 GiB"));
                    }
                    file.write_all(&data)?;
                }
                Some(Part::Field(_, value)) => {
                    self.field_bytes += data.len();
                    value.extend_from_slice(&data);
                    self.count_field(self.field_bytes)?;
                }
                None => (),
            },
            FormEvent::End => {
                if let Some(Part::Field(name, value)) = self.part.take() {
                    let wrong = |_| ApiError::bad_request(format!("{} is no text", shown(&name)));
                    let value = String::from_utf8(value).map_err(wrong)?;
                    self.upload.fields.insert(name, value);
                }
            }
        }
        Ok(())
    }

    fn create(&self, name: &str) -> Result<File, ApiError> {
        let wrong = || {
            let message = format!("the file name '{}' leads out of the context", shown(name));
            ApiError::bad_request(message)
        };
        let mut path = PathBuf::new();
        for component in Path::new(name).components() {
            match component {
                Component::Normal(name) => path.push(name),
                Component::CurDir => (),
                _ => return Err(wrong()),
            }
        }
        if path.as_os_str().is_empty() || name.len() > MAX_PATH || name.contains('\0') {
            return Err(wrong());
        }
        let path = self.folder.join(path);
        // A name that is both a file and a folder, or too long, is the client's fault.
        let made =
            path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| File::create(&path));
        made.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOTDIR | libc::EEXIST | libc::EISDIR | libc::ENAMETOOLONG) => {
                ApiError::bad_request(format!("the file '{}' cannot be made", shown(name)))
            }
            _ => error.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upload(body: &str) -> (tempfile::TempDir, Result<Upload, ApiError>) {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("context");
        fs::create_dir(&folder).unwrap();
        let (sender, receiver) = mpsc::channel(4);
        sender.try_send(Ok(Bytes::copy_from_slice(body.as_bytes()))).unwrap();
        drop(sender);
        let upload = receive(&Encoding::Multipart("b".to_owned()), &folder, receiver);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        (dir, upload)
    }

    fn part(name: &str, file: bool, text: &str) -> String {
        let file = if file { "; filename=x" } else { "" };
        format!("--b\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n{text}\r\n")
    }

    #[test]
    fn files_and_fields_are_told_apart_by_the_file_name() {
        let parts =
            part("name", false, "app") + &part("name", true, "file") + &part("a/b", true, "");
        let (dir, upload) = upload(&(parts + "--b--"));
        let upload = upload.unwrap();
        assert_eq!((upload.field("name"), upload.files, upload.bytes), (Some("app"), 2, 4));
        let read = |name: &str| fs::read_to_string(dir.path().join("context").join(name)).unwrap();
        assert_eq!((read("name"), read("a/b")), ("file".to_owned(), String::new()));
    }

    #[test]
    fn file_that_leads_out_of_the_context_is_refused() {
        for name in ["../x", "/etc/x", "a/../../x", ".", "a\0b"] {
            let (_dir, upload) = upload(&(part(name, true, "x") + "--b--"));
            assert_eq!(upload.unwrap_err().status, 400, "{name:?}");
        }
        let both = part("a", true, "x") + &part("a/b", true, "x") + "--b--";
        assert_eq!(upload(&both).1.unwrap_err().status, 400);
        assert_eq!(upload(&part("a", true, "x")).1.unwrap_err().status, 400);
    }
}
