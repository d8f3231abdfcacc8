//! The tree of a VM's checkpoints: names, parents, times, and where the VM stands.
//!
//! The monitor process keeps it, with a template in each node; other processes get the list of its
//! nodes and draw it.

use serde::{Deserialize, Serialize};

/// The most checkpoints of one VM.
pub const MAX_CHECKPOINTS: usize = 64;
/// The longest name.
const MAX_NAME: usize = 63;

/// A checkpoint as other processes see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    pub name: String,
    /// The checkpoint that the VM stood on when this one was taken.
    pub parent: Option<String>,
    /// When it was taken, in milliseconds since 1970.
    pub created_ms: u64,
    /// Whether the VM goes on from here: it was taken last, or gone to since.
    pub current: bool,
}

/// Why the tree refuses something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    #[error(
        "checkpoint: use a name of 1 to 63 letters, digits, '.', '_' and '-', with a letter or a \
         digit first"
    )]
    BadName,
    #[error("checkpoint '{0}' exists already: take another name, or delete it first")]
    Taken(String),
    #[error("there is no checkpoint '{0}'")]
    Unknown(String),
    #[error("there is no checkpoint to go back to")]
    Empty,
    #[error("the VM has {MAX_CHECKPOINTS} checkpoints, the most that it may have: delete some")]
    Full,
}

/// Refuses a name that could not be typed, or taken for a flag or a path.
pub fn check_name(name: &str) -> Result<(), TreeError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    let good = begins && name.len() <= MAX_NAME && name.chars().all(allowed);
    if good { Ok(()) } else { Err(TreeError::BadName) }
}

/// The checkpoints of one VM, oldest first, each with a value.
#[derive(Debug)]
pub struct CheckpointTree<T> {
    nodes: Vec<Node<T>>,
    current: Option<String>,
    /// The last number that was given as a name.
    last_number: u64,
}

#[derive(Debug)]
struct Node<T> {
    name: String,
    parent: Option<String>,
    created_ms: u64,
    /// The name is a number that the tree gave.
    numbered: bool,
    value: T,
}

impl<T> Default for CheckpointTree<T> {
    fn default() -> Self {
        Self { nodes: Vec::new(), current: None, last_number: 0 }
    }
}

impl<T> CheckpointTree<T> {
    /// Returns the name of the next checkpoint: the given one, or the next free number. Fails if
    /// it is taken, or if there is no room for one more.
    pub fn name_next(&mut self, wanted: Option<&str>) -> Result<String, TreeError> {
        if let Some(name) = wanted {
            check_name(name)?;
            if self.find(name).is_some() {
                return Err(TreeError::Taken(name.to_owned()));
            }
        }
        if self.nodes.len() >= MAX_CHECKPOINTS && self.oldest_numbered().is_none() {
            return Err(TreeError::Full);
        }
        if let Some(name) = wanted {
            return Ok(name.to_owned());
        }
        loop {
            self.last_number += 1;
            let name = self.last_number.to_string();
            if self.find(&name).is_none() {
                return Ok(name);
            }
        }
    }

    /// Adds a checkpoint below the current one and makes it the current one. If the tree is full,
    /// the oldest one without a name of its own goes.
    pub fn add(&mut self, name: String, numbered: bool, created_ms: u64, value: T) -> Checkpoint {
        if self.nodes.len() >= MAX_CHECKPOINTS
            && let Some(oldest) = self.oldest_numbered()
        {
            let _ = self.remove(&oldest);
        }
        let parent = self.current.replace(name.clone());
        self.nodes.push(Node {
            name: name.clone(),
            parent: parent.clone(),
            created_ms,
            numbered,
            value,
        });
        Checkpoint { name, parent, created_ms, current: true }
    }

    /// Returns the value of a checkpoint.
    pub fn get(&self, name: &str) -> Result<&T, TreeError> {
        self.find(name).map(|node| &node.value).ok_or_else(|| TreeError::Unknown(name.to_owned()))
    }

    /// Returns the name of the current checkpoint.
    pub fn current(&self) -> Result<&str, TreeError> {
        self.current.as_deref().ok_or(TreeError::Empty)
    }

    /// Makes a checkpoint the current one.
    pub fn go_to(&mut self, name: &str) -> Result<(), TreeError> {
        self.get(name)?;
        self.current = Some(name.to_owned());
        Ok(())
    }

    /// Removes a checkpoint and returns its value. Those below it, and the VM if it stands there,
    /// then belong to its parent.
    pub fn remove(&mut self, name: &str) -> Result<T, TreeError> {
        let unknown = || TreeError::Unknown(name.to_owned());
        let index = self.nodes.iter().position(|node| node.name == name).ok_or_else(unknown)?;
        let removed = self.nodes.remove(index);
        for node in &mut self.nodes {
            if node.parent.as_deref() == Some(name) {
                node.parent.clone_from(&removed.parent);
            }
        }
        if self.current.as_deref() == Some(name) {
            self.current = removed.parent;
        }
        Ok(removed.value)
    }

    /// Lists the checkpoints, oldest first.
    pub fn list(&self) -> Vec<Checkpoint> {
        let seen = |node: &Node<T>| Checkpoint {
            name: node.name.clone(),
            parent: node.parent.clone(),
            created_ms: node.created_ms,
            current: self.current.as_ref() == Some(&node.name),
        };
        self.nodes.iter().map(seen).collect()
    }

    fn find(&self, name: &str) -> Option<&Node<T>> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// Returns the oldest checkpoint without a name of its own, except the current one.
    fn oldest_numbered(&self) -> Option<String> {
        let may_go = |node: &&Node<T>| node.numbered && self.current.as_ref() != Some(&node.name);
        self.nodes.iter().find(may_go).map(|node| node.name.clone())
    }
}

/// Draws checkpoints as a tree, one line each: parents above their children, older before newer,
/// the current one marked. `label` says what follows a name.
pub fn draw(all: &[Checkpoint], label: impl Fn(&Checkpoint) -> String) -> String {
    let mut lines: Vec<(String, String)> = Vec::new();
    draw_below(all, None, "", &label, &mut lines);
    let width = lines.iter().map(|(left, _)| left.chars().count()).max().unwrap_or(0);
    lines
        .iter()
        .map(|(left, right)| format!("{left:width$}  {right}").trim_end().to_owned() + "\n")
        .collect()
}

fn draw_below(
    all: &[Checkpoint],
    parent: Option<&str>,
    indent: &str,
    label: &impl Fn(&Checkpoint) -> String,
    lines: &mut Vec<(String, String)>,
) {
    let children: Vec<_> = all.iter().filter(|it| it.parent.as_deref() == parent).collect();
    for (index, child) in children.iter().enumerate() {
        // The list comes from another process: parents that form a ring must not be followed.
        if lines.len() >= all.len() {
            return;
        }
        let last = index + 1 == children.len();
        let (branch, below) = match (parent, last) {
            (None, _) => ("", ""),
            (_, true) => ("└─ ", "   "),
            (_, false) => ("├─ ", "│  "),
        };
        let mark = if child.current { "  <- current" } else { "" };
        let left = format!("{indent}{branch}{}", child.name);
        lines.push((left, format!("{}{mark}", label(child))));
        draw_below(all, Some(&child.name), &format!("{indent}{below}"), label, lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(tree: &mut CheckpointTree<u64>, name: Option<&str>) -> String {
        let at = tree.nodes.len() as u64;
        let next = tree.name_next(name).unwrap();
        tree.add(next, name.is_none(), at, at).name
    }

    fn shown(tree: &CheckpointTree<u64>) -> String {
        draw(&tree.list(), |it| it.created_ms.to_string())
    }

    #[test]
    fn checkpoint_after_a_checkout_is_a_branch() {
        let mut tree = CheckpointTree::default();
        assert_eq!(tree.current(), Err(TreeError::Empty));
        assert_eq!(add(&mut tree, Some("base")), "base");
        assert_eq!(add(&mut tree, None), "1");
        assert_eq!(add(&mut tree, Some("deep")), "deep");
        tree.go_to("base").unwrap();
        assert_eq!(add(&mut tree, None), "2");
        let drawn = "base        0\n├─ 1        1\n│  └─ deep  2\n└─ 2        3  <- current\n";
        assert_eq!(shown(&tree), drawn);
        assert_eq!((tree.get("deep"), tree.current()), (Ok(&2), Ok("2")));
        assert_eq!(tree.go_to("other"), Err(TreeError::Unknown("other".to_owned())));
    }

    #[test]
    fn removed_checkpoint_leaves_its_children_to_its_parent() {
        let mut tree = CheckpointTree::default();
        ["a", "b", "c"].iter().for_each(|name| drop(add(&mut tree, Some(name))));
        assert_eq!(tree.remove("b"), Ok(1));
        assert_eq!(shown(&tree), "a     0\n└─ c  2  <- current\n");
        tree.remove("c").unwrap();
        assert_eq!(tree.current(), Ok("a"));
        tree.remove("a").unwrap();
        assert_eq!((tree.current(), shown(&tree)), (Err(TreeError::Empty), String::new()));
    }

    #[test]
    fn full_tree_forgets_numbered_checkpoints_and_never_named_ones() {
        let mut tree = CheckpointTree::default();
        add(&mut tree, Some("first"));
        (1..MAX_CHECKPOINTS).for_each(|_| drop(add(&mut tree, None)));
        assert_eq!(add(&mut tree, None), MAX_CHECKPOINTS.to_string());
        assert_eq!(tree.nodes.len(), MAX_CHECKPOINTS);
        assert!(tree.get("first").is_ok() && tree.get("1").is_err() && tree.get("2").is_ok());
        for number in 2..MAX_CHECKPOINTS {
            add(&mut tree, Some(&format!("n{number}")));
        }
        add(&mut tree, Some("last"));
        assert_eq!(tree.name_next(None), Err(TreeError::Full));
    }

    #[test]
    fn names_are_checked_and_taken_once() {
        for bad in ["", "-x", ".", "a b", "a/b", "ä", &"x".repeat(64)] {
            assert_eq!(check_name(bad), Err(TreeError::BadName), "{bad}");
        }
        let mut tree = CheckpointTree::default();
        add(&mut tree, Some("1"));
        assert_eq!(tree.name_next(Some("1")), Err(TreeError::Taken("1".to_owned())));
        assert_eq!(add(&mut tree, None), "2");
    }

    #[test]
    fn parents_that_form_a_ring_are_not_followed_for_ever() {
        let node = |name: &str, parent: &str| Checkpoint {
            name: name.to_owned(),
            parent: Some(parent.to_owned()),
            created_ms: 0,
            current: false,
        };
        assert_eq!(draw(&[node("a", "b"), node("b", "a")], |_| String::new()), "");
    }
}
