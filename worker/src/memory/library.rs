//! Whether the system's loader finds a library: drivers bring theirs, and containers often lack them.

#![expect(unsafe_code, reason = "the loader is asked through the C library")]

use std::ffi::{CStr, CString};

/// Loads a shared library by name and lets it go again; what the loader says if it cannot.
///
/// # Errors
/// The loader's own words.
pub fn library_loads(name: &str) -> Result<(), String> {
    let name = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: the name is a C string. A library's initialisers run here, as they would in the process that wants it.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        // SAFETY: the handle came from the loader, and nobody has taken anything from the library.
        unsafe { libc::dlclose(handle) };
        return Ok(());
    }
    // SAFETY: asks the loader for the error of this thread's last call.
    let said = unsafe { libc::dlerror() };
    if said.is_null() {
        return Err("the loader does not say why".to_owned());
    }
    // SAFETY: the text lives until this thread's next call of the loader, and is copied before that.
    Err(unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_loads_or_the_loader_says_why() {
        assert_eq!(library_loads("libc.so.6"), Ok(()));
        let error = library_loads("libshimmer-is-not-there.so.1").unwrap_err();
        assert!(error.contains("libshimmer-is-not-there.so.1"), "{error}");
        assert!(library_loads("a\0b").is_err());
    }
}
