//! Where CUDA's libraries may lie beside the linker's own paths: a toolkit's folder, and Python's packages.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Makes a library that the linker does not find by name findable, by loading it from where toolkits and Python
/// packages put it: who asks for the name afterwards gets what is loaded. What the linker finds stays first.
/// `names` are file names as in `libcudnn.so.9`, the best first.
pub fn load_library(names: &[&str]) -> bool {
    let found = names.iter().any(|name| load(Path::new(name)));
    found || folders().iter().any(|folder| names.iter().any(|name| is_there_and_loads(&folder.join(name))))
}

fn is_there_and_loads(path: &Path) -> bool {
    path.exists() && load(path)
}

/// Loads a library for the rest of the process.
fn load(path: &Path) -> bool {
    // SAFETY: loading runs the library's initialisers, which is what the user's installation is for.
    match unsafe { libloading::Library::new(path) } {
        Ok(library) => {
            // Unloading a library that keeps threads or contexts is not safe; nobody gains by it either.
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// Folders to look in, the likeliest first.
fn folders() -> Vec<PathBuf> {
    let var = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(var).collect();
    toolkits.push("/usr/local/cuda".into());
    toolkits.extend(entries(Path::new("/usr/local"), "cuda-"));
    let lib = |toolkit: PathBuf| [toolkit.join("lib64"), toolkit.join("lib")];
    let mut folders: Vec<PathBuf> = toolkits.into_iter().flat_map(lib).collect();
    let local = var("HOME").map(|home| home.join(".local"));
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(var).chain(local);
    for prefix in prefixes.chain(["/usr/local".into(), "/usr".into()]) {
        for python in entries(&prefix.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                let parts = entries(&python.join(packages).join("nvidia"), "");
                folders.extend(parts.into_iter().map(|part| part.join("lib")));
            }
        }
    }
    folders
}

/// What lies in a folder under names that begin so, the last in alphabetical order first.
fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(found) = std::fs::read_dir(folder) else { return vec![] };
    let names: BTreeSet<_> = found.flatten().map(|entry| entry.file_name()).collect();
    let begins = |name: &&std::ffi::OsString| name.to_string_lossy().starts_with(prefix);
    names.iter().rev().filter(begins).map(|name| folder.join(name)).collect()
}

/// The file from which this process has loaded a library whose name begins so, as in `libcudnn.so`.
pub fn loaded_from(stem: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = |line: &str| line.find('/').map(|at| PathBuf::from(&line[at..]));
    let named =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(stem));
    maps.lines().filter_map(path).find(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_loaded_is_found_by_its_file_and_one_that_is_not_there_is_not() {
        assert!(!load_library(&["libno-such-library.so.77"]));
        assert_eq!(loaded_from("libno-such-library"), None);
        let c = loaded_from("libc.so").or_else(|| loaded_from("libc-")).or_else(|| loaded_from("ld-musl"));
        assert!(c.is_some_and(|path| path.exists()), "the C library is loaded from somewhere");
    }

    #[test]
    fn folders_are_taken_from_the_last_to_the_first() {
        let folder = std::env::temp_dir().join(format!("shardloom-search-{}", std::process::id()));
        for name in ["cuda-12.8", "cuda-13.0", "other"] {
            std::fs::create_dir_all(folder.join(name)).unwrap();
        }
        let found = entries(&folder, "cuda-");
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [folder.join("cuda-13.0"), folder.join("cuda-12.8")]);
        assert!(entries(&folder, "").is_empty(), "a folder that is gone has no entries");
    }
}
