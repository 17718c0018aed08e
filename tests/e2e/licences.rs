//! Every dependency carries a licence that deny.toml allows.

use std::process::Command;

/// `(A OR B) AND C` holds if C and one of A, B are allowed.
fn allowed(expression: &str, allow: &[String]) -> bool {
    let normal = expression.replace('/', " OR ");
    normal.split(" AND ").all(|part| {
        let part = part.trim().trim_matches(['(', ')']);
        part.split(" OR ").any(|one| allow.iter().any(|a| a == one.trim().trim_matches(['(', ')'])))
    })
}

#[test]
fn expressions_are_read_as_spdx_means_them() {
    let allow = ["MIT".to_owned(), "Apache-2.0".to_owned(), "Unicode-3.0".to_owned()];
    assert!(allowed("MIT OR GPL-3.0", &allow));
    assert!(allowed("(MIT OR Apache-2.0) AND Unicode-3.0", &allow));
    assert!(!allowed("MIT AND GPL-3.0", &allow));
    assert!(!allowed("GPL-3.0", &allow));
}

#[test]
fn every_dependency_has_an_allowed_licence() {
    let root = eyrie_tests::root();
    let deny = std::fs::read_to_string(root.join("deny.toml")).unwrap();
    let list = deny.split("allow = [").nth(1).and_then(|rest| rest.split(']').next()).unwrap();
    let allow: Vec<String> = list.split('"').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(allow.iter().any(|l| l == "MIT"), "{allow:?}");
    // Packages of other platforms are not downloaded here; what this platform builds is.
    let rustc = Command::new("rustc").arg("-vV").output().unwrap();
    let about = String::from_utf8(rustc.stdout).unwrap();
    let host = about.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", host])
        .current_dir(&root)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100);
    let refused: Vec<String> = packages
        .iter()
        .filter(|p| !p["license"].as_str().is_some_and(|l| allowed(l, &allow)))
        .map(|p| format!("{} {}: {}", p["name"], p["version"], p["license"]))
        .collect();
    assert!(refused.is_empty(), "not in deny.toml: {refused:#?}");
}
