//! Tests of container images: what is kept, and what is refused by name.

use std::fs;
use std::io::Write;

use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use super::*;
use crate::progress::Silent;

/// An image as an OCI layout in a folder.
struct Layout {
    dir: tempfile::TempDir,
    layers: Vec<Value>,
    diff_ids: Vec<String>,
}

/// The name and the content of an entry: a folder ends with a slash, a link has an arrow.
type Entry<'a> = (&'a str, &'a str);

fn archive(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (name, content) in entries {
        let mut header = Header::new_ustar();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        header.set_size(0);
        if name.ends_with('/') {
            header.set_entry_type(EntryType::Directory);
            tar.append_data(&mut header, name, io::empty()).unwrap();
        } else if let Some((name, target)) = name.split_once("->") {
            header.set_entry_type(EntryType::Symlink);
            tar.append_link(&mut header, name, target).unwrap();
        } else {
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, name, content.as_bytes()).unwrap();
        }
    }
    tar.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), Default::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

impl Layout {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        Self { dir, layers: Vec::new(), diff_ids: Vec::new() }
    }

    fn blob(&self, bytes: &[u8]) -> Value {
        let digest = Digest::of(bytes);
        fs::write(self.dir.path().join(place(&digest)), bytes).unwrap();
        json!({ "digest": digest.to_string(), "size": bytes.len() })
    }

    fn layer(mut self, entries: &[Entry<'_>]) -> Self {
        let plain = archive(entries);
        self.layers.push(self.blob(&gzip(&plain)));
        self.diff_ids.push(Digest::of(&plain).to_string());
        self
    }

    fn config(&self) -> Value {
        json!({
            "os": "linux", "architecture": "amd64",
            "config": {
                "User": "app", "Env": ["A=1=2", "=x", "B"], "WorkingDir": "/srv",
                "Entrypoint": ["run"], "Cmd": null, "ExposedPorts": { "80/tcp": {} },
            },
            "rootfs": { "type": "layers", "diff_ids": self.diff_ids },
        })
    }

    fn finish(&self, config: &Value) -> Result<Image, OciError> {
        let config = self.blob(config.to_string().as_bytes());
        let manifest = json!({ "config": config, "layers": self.layers }).to_string();
        let mut here = self.blob(manifest.as_bytes());
        here["platform"] = json!({ "os": "linux", "architecture": "amd64" });
        let mut other = here.clone();
        other["platform"]["architecture"] = "arm64".into();
        self.index(&[other, here])
    }

    fn index(&self, manifests: &[Value]) -> Result<Image, OciError> {
        let index = json!({ "schemaVersion": 2, "manifests": manifests }).to_string();
        fs::write(self.dir.path().join("index.json"), index).unwrap();
        Image::open(self.dir.path(), None)
    }

    fn image(&self) -> Image {
        self.finish(&self.config()).unwrap()
    }
}

/// Unpacks layers over each other.
fn unpack_layers(layers: &[&[Entry<'_>]]) -> Result<Vec<String>, ImportError> {
    let layout = layers.iter().fold(Layout::new(), |layout, entries| layout.layer(entries));
    unpack(&layout.image())
}

/// Unpacks an image, and returns the tree as the paths of its files.
fn unpack(image: &Image) -> Result<Vec<String>, ImportError> {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("tree");
    let mut silent = Silent;
    image.unpack(&mut Import::begin(&root, &mut silent)?)?;
    let mut found = Vec::new();
    let mut todo = vec![root.clone()];
    while let Some(at) = todo.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.is_symlink() {
                todo.push(path.clone());
            }
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
            let text = fs::read_to_string(&path).ok().filter(|_| !path.is_symlink());
            found.push(text.map_or(name.clone(), |text| format!("{name}={text}")));
        }
    }
    found.sort();
    Ok(found)
}

#[test]
fn image_is_unpacked_with_its_settings() {
    let layout = Layout::new().layer(&[("etc/", ""), ("etc/name", "x")]);
    let image = layout.image();
    assert_eq!(unpack(&image).unwrap(), ["etc", "etc/name=x"]);
    let settings = image.settings();
    assert_eq!(settings.env, [("A".to_owned(), "1=2".to_owned())]);
    assert_eq!(
        (settings.user.as_deref(), settings.workdir.as_deref()),
        (Some("app"), Some("/srv"))
    );
    assert_eq!((settings.entrypoint, settings.cmd), (Some(vec!["run".into()]), None));
    assert_eq!(settings.ports, ["80/tcp"]);
}

#[test]
fn whiteout_hides_what_is_below_and_not_what_its_layer_has() {
    let below = [("a/one", "1"), ("a/two", "2"), ("b/", ""), ("b/deep/x", "3"), ("c", "4")];
    let above =
        [("a/.wh.one", ""), ("b/new", "5"), ("b/.wh..wh..opq", ""), (".wh.c", ""), ("c", "6")];
    assert_eq!(unpack_layers(&[&below, &above]).unwrap(), ["a", "a/two=2", "b", "b/new=5", "c=6"]);
}

#[test]
fn entry_of_another_kind_replaces_what_is_below_it() {
    let below = [("dir/x", "1"), ("link->dir", ""), ("file", "2")];
    let above = [("dir", "3"), ("link/", ""), ("link/y", "4"), ("file/", "")];
    assert_eq!(unpack_layers(&[&below, &above]).unwrap(), ["dir=3", "file", "link", "link/y=4"]);
}

#[test]
fn layer_cannot_leave_the_root_through_a_link() {
    let outside = tempfile::tempdir().unwrap();
    let link = format!("out->{}", outside.path().display());
    let hidden = outside.path().join("kept");
    fs::write(&hidden, "kept").unwrap();
    let above = [("out/x", "1"), ("out/.wh.kept", ""), ("out/.wh..wh..opq", "")];
    unpack_layers(&[&[(&link, "")], &above]).unwrap();
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
    for wrong in [".wh.", ".wh..", ".wh..."] {
        let error = unpack_layers(&[&[(wrong, "")]]).unwrap_err();
        assert!(error.to_string().contains("hides nothing"), "{error}");
    }
}

#[test]
fn part_with_other_bytes_is_refused() {
    let layout = Layout::new().layer(&[("x", "1")]);
    let digest: Digest = layout.layers[0]["digest"].as_str().unwrap().parse().unwrap();
    let path = layout.dir.path().join(place(&digest));
    let image = layout.image();
    // Another archive, the same with other bytes after it, and none.
    for bytes in [gzip(&archive(&[("x", "2")])), [fs::read(&path).unwrap(), gzip(b"")].concat()] {
        fs::write(&path, bytes).unwrap();
        let error = unpack(&image).unwrap_err();
        assert!(format!("{error:?}").contains("other bytes"), "{error:?}");
    }
    fs::write(layout.dir.path().join(place(image.id())), "{}").unwrap();
    let refused = Image::open(layout.dir.path(), None).err().unwrap();
    assert!(refused.to_string().contains("other bytes"), "{refused}");
}

#[test]
fn layer_whose_plain_bytes_are_others_than_the_configuration_says_is_refused() {
    let mut layout = Layout::new().layer(&[("x", "1")]);
    layout.diff_ids[0] = Digest::of(b"other").to_string();
    let error = unpack(&layout.image()).unwrap_err();
    assert!(format!("{error:?}").contains("other bytes"), "{error:?}");
}

#[test]
fn image_for_another_machine_or_with_missing_parts_is_refused_by_name() {
    let layout = Layout::new().layer(&[("x", "1")]);
    let refused = |config: Value| layout.finish(&config).err().unwrap().to_string();
    let mut config = layout.config();
    config["architecture"] = "arm64".into();
    assert!(refused(config).contains("linux/arm64"));
    let mut config = layout.config();
    config["rootfs"]["diff_ids"] = json!([]);
    assert!(refused(config).contains("1 layers, its configuration 0"));
    assert!(layout.index(&[]).err().unwrap().to_string().contains("none with a name"));
    let wrong = [json!({ "digest": "sha256:../../../etc/passwd" })];
    assert!(matches!(layout.index(&wrong), Err(OciError::Form { .. })));
    let empty = tempfile::tempdir().unwrap();
    assert!(Image::open(empty.path(), None).err().unwrap().to_string().contains("no image"));
}

#[test]
fn archive_of_docker_is_read_in_place_and_by_its_tags() {
    let layout = Layout::new().layer(&[("x", "1")]);
    let config = layout.config().to_string();
    let one =
        |tag: &str| json!({ "Config": "c.json", "RepoTags": [tag], "Layers": ["l/layer.tar"] });
    let manifest = json!([one("a:1"), one("b:2")]).to_string();
    let layer = String::from_utf8(archive(&[("x", "1")])).unwrap();
    let files =
        [("manifest.json", manifest.as_str()), ("c.json", &config), ("l/layer.tar", &layer)];
    let path = layout.dir.path().join("saved.tar");
    fs::write(&path, archive(&files)).unwrap();
    let image = Image::open(&path, Some("b:2")).unwrap();
    assert_eq!(unpack(&image).unwrap(), ["x=1"]);
    assert_eq!(image.id(), &Digest::of(config.as_bytes()));
    let refused = Image::open(&path, None).err().unwrap().to_string();
    assert!(refused.contains("a:1, b:2"), "{refused}");
}

#[test]
fn archive_with_a_name_without_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image.tar");
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(1 << 33);
    header.set_cksum();
    fs::write(&path, header.as_bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(1 << 34).unwrap();
    let refused = Image::open(&path, None).err().unwrap();
    assert!(format!("{refused:?}").contains("too long"), "{refused:?}");
}
