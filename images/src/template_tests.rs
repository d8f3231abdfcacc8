//! Tests of templates that need no network; `tests/build.rs` builds a real one.
//!
//! Next to the module because they write entries as an older or broken pvmm would have.

use super::*;
use crate::progress::Silent;

fn cache() -> (tempfile::TempDir, Cache) {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(&dir.path().join("pvmm")).unwrap();
    (dir, cache)
}

/// Publishes a template without building anything.
fn put(cache: &Cache, recipe: &Recipe) {
    let put = cache.publish(
        KIND,
        &recipe.name,
        &mut Silent,
        |_| false,
        |dir, _| {
            fs::write(dir.join(IMAGE), "image").unwrap();
            write_manifest(cache, dir, recipe, "Debian".into(), Vec::new(), None)
        },
    );
    put.unwrap();
}

#[test]
fn name_outside_the_rule_is_refused() {
    let long = "a".repeat(64);
    for bad in ["", ".", "..", "-a", "A", "a/b", "a b", "ä", "a\0", "../x", &long] {
        assert!(matches!(check_name(bad), Err(TemplateError::Name { .. })), "{bad:?}");
    }
    for good in ["a", "base", "py3.11", "my_template-2", &long[..63]] {
        check_name(good).unwrap();
    }
}

#[test]
fn recipe_with_same_packages_in_another_order_has_the_same_key() {
    let key = |packages: &[&str]| {
        let packages: Vec<_> = packages.iter().map(|p| (*p).to_owned()).collect();
        Recipe::new("x", &packages).unwrap().key()
    };
    assert_eq!(key(&["git", "curl", "git"]), key(&["curl", "git"]));
    assert_ne!(key(&["git"]), key(&["curl"]));
    assert_eq!(key(&[]), Recipe::base().key());
}

#[test]
fn recipe_for_base_takes_no_packages() {
    let err = Recipe::new(BASE, &["git".to_owned()]).unwrap_err();
    assert!(matches!(err, TemplateError::BasePackages));
}

#[test]
fn recipe_with_an_option_for_a_package_is_refused() {
    let err = Recipe::new("x", &["--allow-unauthenticated".to_owned()]).unwrap_err();
    assert!(err.to_string().starts_with("--packages: \"--allow-unauthenticated\""), "{err}");
}

#[test]
fn recipe_file_with_an_unknown_field_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("recipe.json");
    fs::write(&path, r#"{"name": "data", "packages": ["git"]}"#).unwrap();
    assert_eq!(Recipe::load(&path).unwrap(), Recipe::new("data", &["git".into()]).unwrap());
    fs::write(&path, r#"{"name": "data", "package": ["git"]}"#).unwrap();
    assert!(matches!(Recipe::load(&path), Err(TemplateError::ParseRecipe { .. })));
    assert!(matches!(Recipe::load(dir.path()), Err(TemplateError::ReadRecipe { .. })));
}

#[test]
fn find_of_unknown_template_says_how_to_build_it_and_what_there_is() {
    let (_dir, cache) = cache();
    let say = || Template::find(&cache, "nope").unwrap_err().to_string();
    assert!(say().ends_with("`pvmm template build nope`; there are none yet"), "{}", say());
    put(&cache, &Recipe::base());
    put(&cache, &Recipe::new("data", &["git".into()]).unwrap());
    assert!(say().ends_with("there are: base, data"), "{}", say());
}

#[test]
fn find_of_truncated_template_says_it_is_damaged() {
    let (_dir, cache) = cache();
    put(&cache, &Recipe::base());
    fs::write(cache.path(KIND, BASE).join(IMAGE), "ima").unwrap();
    assert!(matches!(Template::find(&cache, BASE), Err(TemplateError::Damaged { .. })));
    assert!(Template::list(&cache).unwrap().is_empty());
}

#[test]
fn ensure_of_current_template_does_no_work() {
    let (_dir, cache) = cache();
    put(&cache, &Recipe::base());
    let mut progress = |event: crate::Event<'_>| panic!("{event:?}");
    let template = Template::ensure(&cache, &Recipe::base(), &mut progress).unwrap();
    assert_eq!(fs::read_to_string(&template.rootfs).unwrap(), "image");
    let json = serde_json::to_value(&template).unwrap();
    assert_eq!(json["name"], "base");
    assert_eq!(json["digest"].as_str().unwrap().len(), 64);
}

#[test]
fn image_of_a_template_that_is_built_again_stays_under_its_name() {
    let (_dir, cache) = cache();
    put(&cache, &Recipe::base());
    let old = Template::find(&cache, BASE).unwrap().rootfs;
    let folder = cache.root().join("came");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join(IMAGE), "another image").unwrap();
    write_manifest(&cache, &folder, &Recipe::base(), "Other".into(), Vec::new(), None).unwrap();
    let new = Template::adopt(&cache, BASE, &folder, &mut Silent).unwrap().rootfs;
    assert_eq!(fs::read_to_string(&old).unwrap(), "image");
    assert_eq!(fs::read_to_string(&new).unwrap(), "another image");
    assert_eq!(store::without_template(&cache), [old]);
}

#[test]
fn remove_of_template_takes_it_from_the_list() {
    let (_dir, cache) = cache();
    put(&cache, &Recipe::base());
    assert_eq!(Template::list(&cache).unwrap().len(), 1);
    Template::remove(&cache, BASE, &mut Silent).unwrap();
    assert!(Template::list(&cache).unwrap().is_empty());
    let again = Template::remove(&cache, BASE, &mut Silent);
    assert!(matches!(again, Err(TemplateError::Unknown { .. })));
}

#[test]
fn recipe_that_is_built_in_is_one_that_a_user_could_write() {
    for name in Recipe::built_in_names() {
        let recipe = Recipe::built_in(name).unwrap();
        assert_eq!(Recipe::new(name, &recipe.packages).unwrap(), recipe);
    }
    assert!(Recipe::built_in("other").is_none());
}

#[test]
fn files_from_elsewhere_that_do_not_fit_together_leave_the_old_template() {
    let (_dir, cache) = cache();
    let recipe = |name: &str| Recipe { name: name.to_owned(), packages: Vec::new() };
    put(&cache, &recipe("x"));
    let old = Template::find(&cache, "x").unwrap();
    for (name, image) in [("y", "image"), ("x", "imagf"), ("x", "longer image")] {
        let folder = cache.root().join("came");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(IMAGE), "image").unwrap();
        write_manifest(&cache, &folder, &recipe(name), "Other".into(), Vec::new(), None).unwrap();
        // Not written in place: the store has the same file.
        fs::remove_file(folder.join(IMAGE)).unwrap();
        fs::write(folder.join(IMAGE), image).unwrap();
        let refused = Template::adopt(&cache, "x", &folder, &mut Silent).unwrap_err();
        assert!(matches!(refused, TemplateError::Adopt { .. }), "{refused}");
        assert_eq!(Template::find(&cache, "x").unwrap(), old);
        fs::remove_dir_all(&folder).unwrap();
    }
}
