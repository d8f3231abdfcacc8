//! Links of the documentation.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the targets of the links in a text of Markdown that has at most one link in a line.
pub fn targets(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.split_once("](")?.1.split_once(')')).map(|(link, _)| link)
}

/// Returns the links of a site's pages that lead to no file or to no heading, as a line each. Pages
/// below `foreign`, which another program has written, are only led to.
pub fn broken(site: &Path, foreign: &Path) -> io::Result<Vec<String>> {
    let mut broken = Vec::new();
    for page in pages(site, foreign)? {
        let text = fs::read_to_string(&page)?;
        for link in hrefs(&text).filter(|link| !leads_out(link)) {
            if !resolves(&page, &text, link) {
                let page = page.strip_prefix(site).unwrap_or(&page);
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    broken.sort_unstable();
    broken.dedup();
    Ok(broken)
}

fn pages(dir: &Path, foreign: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() && path != foreign {
            found.extend(pages(&path, foreign)?);
        } else if path.extension().is_some_and(|kind| kind == "html") && is_page(&path) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Whether a file is a page of its own: the table of contents is part of all, and the page for
/// unknown addresses has links from the root of a server.
fn is_page(path: &Path) -> bool {
    !path.ends_with("toc.html") && !path.ends_with("404.html")
}

fn hrefs(text: &str) -> impl Iterator<Item = &str> {
    text.split("href=\"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0))
}

fn leads_out(link: &str) -> bool {
    link.contains("://") || link.starts_with("mailto:") || link.starts_with("javascript:")
}

fn resolves(page: &Path, text: &str, link: &str) -> bool {
    let (file, heading) = link.split_once('#').unwrap_or((link, ""));
    let target =
        if file.is_empty() { page.to_owned() } else { page.parent().unwrap_or(page).join(file) };
    if heading.is_empty() || !file.is_empty() && !file.ends_with(".html") {
        return target.exists();
    }
    let anchor = format!("id=\"{heading}\"");
    if file.is_empty() {
        text.contains(&anchor)
    } else {
        fs::read_to_string(target).is_ok_and(|text| text.contains(&anchor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_to_a_missing_file_or_heading_is_found() {
        let site = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(site.path().join(name), text).unwrap();
        put("a.html", r##"<a href="b.html"><a href="b.html#x"><a href="#y"><a href="c.html">"##);
        put("b.html", r##"<h1 id="x"><a href="a.html#no"><a href="http://example.com/">"##);
        let broken = broken(site.path(), &site.path().join("rust")).unwrap();
        assert_eq!(broken, ["a.html: #y", "a.html: c.html", "b.html: a.html#no"]);
    }
}
